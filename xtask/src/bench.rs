//! `cargo xtask bench`: measurements, with what one must know to compare them.

use std::ffi::OsString;
use std::fs;
use std::process::Command;

use anyhow::Result;

use crate::cuda_toolkit::{Purpose, Toolkit};
use crate::shell;

/// Measure and print a table; docs/benchmarks.md keeps the results.
#[derive(clap::Args)]
pub(crate) struct Bench {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// The demo checkpoint on the CPU: load, prefill by policy, decode, peak memory.
    Cpu,
    /// The demo checkpoint in an engine on the CPU: requests at once, and beginnings that are known.
    Engine,
    /// V4.1-Flash's geometry on the GPU of this machine: time to first token by policy, decode, and
    /// the share of what the device can do. `-- --help` lists its flags.
    Gpu {
        /// For the bench, such as `--budget 1800 --json FILE --svg FILE`.
        #[arg(last = true)]
        flags: Vec<OsString>,
    },
    /// The same phases in PyTorch, by the `python3` on PATH.
    Peer {
        /// For the script, such as `--json FILE`.
        #[arg(last = true)]
        flags: Vec<OsString>,
    },
}

impl Bench {
    pub(crate) fn run(self) -> Result<()> {
        match self.what {
            What::Cpu => on_demo("cpu"),
            What::Engine => on_demo("engine"),
            What::Gpu { flags } => gpu(&flags),
            What::Peer { flags } => peer(&flags),
        }
    }
}

/// A bench of the demo checkpoint on the CPU.
fn on_demo(name: &str) -> Result<()> {
    let bench = shell::cargo(&["bench", "-p", "deepseek-model", "--bench", name]);
    head(&bench);
    shell::run(bench)?;
    println!(
        "\nThe machine must have been quiet. Lines above go to docs/benchmarks.md with the date, and \
         those of `bench cpu` from there to the table in README.md."
    );
    Ok(())
}

fn gpu(flags: &[OsString]) -> Result<()> {
    let toolkit = Toolkit::prepare(Purpose::Build)?;
    let mut bench = shell::cargo(&[
        "bench",
        "-p",
        "deepseek-model",
        "--features",
        "deepseek-model/cuda",
        "--bench",
        "flash",
        "--",
    ]);
    bench.args(absolute(flags)?);
    head(&bench);
    toolkit.apply(&mut bench)?;
    shell::run(bench)
}

fn peer(flags: &[OsString]) -> Result<()> {
    let mut script = shell::command("python3");
    script.arg("crates/deepseek-model/benches/peer_torch.py");
    script.args(absolute(flags)?);
    head(&script);
    shell::run(script)
}

/// The flags, with files beside where the caller is: cargo runs a bench in the folder of its crate.
fn absolute(flags: &[OsString]) -> Result<Vec<OsString>> {
    let mut is_file = false;
    let mut words = Vec::new();
    for flag in flags {
        words.push(if is_file {
            std::path::absolute(flag)?.into()
        } else {
            flag.clone()
        });
        is_file = ["--json", "--svg", "--peer"].iter().any(|of| flag == of);
    }
    Ok(words)
}

/// What one must know of a run.
fn head(bench: &Command) {
    println!("machine  {}", machine());
    println!("rustc    {}", first_line("rustc", &["--version"]));
    println!(
        "commit   {}",
        first_line("git", &["describe", "--always", "--dirty"])
    );
    println!("command  {}", shell::show(bench));
}

/// The CPU's name and the cores this process may use.
fn machine() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map_or("unknown CPU", |rest| {
            rest.trim_start_matches([' ', '\t', ':'])
        });
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!("{name}, {cores} cores")
}

/// What a small program says about a version; "unknown" where it is not there.
fn first_line(program: &str, args: &[&str]) -> String {
    let mut command = shell::command(program);
    command.args(args).stderr(std::process::Stdio::null());
    let output = command.output().ok().filter(|out| out.status.success());
    let text = output.map(|out| String::from_utf8_lossy(&out.stdout).into_owned());
    text.as_deref()
        .and_then(|text| text.lines().next())
        .unwrap_or("unknown")
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_lie_beside_the_caller() {
        let words = ["--json", "a.json", "--tiny", "--svg", "/b.svg"].map(OsString::from);
        let absolute = absolute(&words).unwrap();
        let here = std::env::current_dir().unwrap();
        assert_eq!(absolute[..1], words[..1]);
        assert_eq!(absolute[1], here.join("a.json"));
        assert_eq!(absolute[2..], words[2..]);
    }
}
