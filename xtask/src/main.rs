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
    let result = match Task::parse() {
        Task::Ci(ci) => ci.run(),
        Task::Tidy(tidy) => tidy.run(),
        Task::Readme(readme) => readme.run(),
        Task::Bench(bench) => bench.run(),
        Task::CudaToolkit(task) => task.run(),
        Task::TestGpu(task) => task.run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
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
