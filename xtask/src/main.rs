//! Project tasks: `cargo xtask --help`. One command per file.

mod bench;
mod ci;
mod cuda_toolkit;
mod readme;
mod shell;
mod test_gpu;
mod tidy;

use std::process::ExitCode;

use clap::Parser;

/// Project tasks.
#[derive(Parser)]
#[command(bin_name = "cargo xtask", version)]
enum Task {
    Ci(ci::Ci),
    Tidy(tidy::Tidy),
    Readme(readme::Readme),
    Bench(bench::Bench),
    CudaToolkit(cuda_toolkit::CudaToolkit),
    TestGpu(test_gpu::TestGpu),
}

fn main() -> ExitCode {
    let done = |()| ExitCode::SUCCESS;
    let result = match Task::parse() {
        Task::Ci(ci) => ci.run().map(done),
        Task::Tidy(tidy) => tidy.run().map(done),
        Task::Readme(readme) => readme.run().map(done),
        Task::Bench(bench) => bench.run().map(done),
        // Of a command that it runs, the exit status is passed on.
        Task::CudaToolkit(task) => task.run(),
        Task::TestGpu(task) => task.run().map(done),
    };
    match result {
        Ok(status) => status,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Task::command().debug_assert();
    }
}
