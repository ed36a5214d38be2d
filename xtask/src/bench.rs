//! `cargo xtask bench`: measurements, with what one must know to compare them.

use std::fs;

use anyhow::Result;

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
}

impl Bench {
    pub(crate) fn run(self) -> Result<()> {
        match self.what {
            What::Cpu => cpu(),
        }
    }
}

fn cpu() -> Result<()> {
    let bench = shell::cargo(&["bench", "-p", "deepseek-model", "--bench", "cpu"]);
    println!("machine  {}", machine());
    println!("rustc    {}", first_line("rustc", &["--version"]));
    println!(
        "commit   {}",
        first_line("git", &["describe", "--always", "--dirty"])
    );
    println!("command  {}", shell::show(&bench));
    shell::run(bench)?;
    println!(
        "\nThe machine must have been quiet. Lines above go to docs/benchmarks.md with the date, and \
         from there to the table in README.md."
    );
    Ok(())
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
