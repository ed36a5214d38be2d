//! `cargo xtask cuda-toolkit`: a CUDA toolkit to build with, on a machine with or without one.
//!
//! An installed toolkit is used as it is. Without one, its parts are fetched as wheels from the
//! Python package index, at pinned versions and checksums, and put together under
//! `target/cuda-toolkit`. No GPU and no driver are needed to build: what a driver would bring,
//! `libcuda.so`, is stood in for by a stub at link time.

mod assemble;
mod damage;
pub(crate) mod lock;
mod stub;
mod toolkit;
mod wheels;

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};

use anyhow::{Context, Result, bail};

pub(crate) use self::toolkit::Toolkit;
use crate::shell;

/// Find a CUDA toolkit or assemble one, and print the environment that builds with it.
///
/// To build by hand: `eval "$(cargo xtask cuda-toolkit)"`, or put the command after `--`. It runs in
/// the folder where you are, reads your standard input, and its exit status is passed on.
#[derive(clap::Args)]
pub(crate) struct CudaToolkit {
    /// Say what would be used, and change nothing. Fails when the toolkit is not complete.
    #[arg(long, conflicts_with = "command")]
    check: bool,

    /// What the toolkit is for. `check` (also for clippy and rustdoc) fetches 100 MB, `build`
    /// another 570 MB for the libraries that programs are linked to.
    #[arg(long = "for", value_enum, default_value_t = Purpose::Build)]
    purpose: Purpose,

    /// A command to run in that environment.
    #[arg(last = true)]
    command: Vec<OsString>,
}

/// What a toolkit is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub(crate) enum Purpose {
    /// Type-checking: the compiler for kernels, and headers.
    Check,
    /// Linking programs too.
    Build,
}

impl CudaToolkit {
    pub(crate) fn run(self) -> Result<ExitCode> {
        if self.check {
            check(self.purpose)?;
            return Ok(ExitCode::SUCCESS);
        }
        let toolkit = Toolkit::prepare(self.purpose)?;
        let Some((program, args)) = self.command.split_first() else {
            print!("{}", toolkit.exports()?);
            return Ok(ExitCode::SUCCESS);
        };
        let mut command = Command::new(program);
        command.args(args);
        toolkit.apply(&mut command)?;
        let status = command
            .status()
            .with_context(|| format!("cannot start `{}`", program.display()))?;
        Ok(passed_on(status))
    }
}

/// A command's status as that of this program; of a command that a signal ended, as a shell gives it.
fn passed_on(status: ExitStatus) -> ExitCode {
    let code = status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    u8::try_from(code).map_or(ExitCode::FAILURE, ExitCode::from)
}

/// `--check`.
fn check(purpose: Purpose) -> Result<()> {
    let folder = folder()?;
    if let Some(toolkit) = Toolkit::installed(&folder) {
        println!("{toolkit}");
        return Ok(());
    }
    let missing = assemble::missing(&folder, purpose);
    let unfinished = assemble::unfinished(&assemble::root(&folder));
    if missing.is_empty() && unfinished.is_empty() {
        println!("{}", Toolkit::assembled(&folder)?);
        return Ok(());
    }
    for part in missing {
        println!("to fetch: {part}");
    }
    for part in unfinished {
        println!("to make: {part}");
    }
    bail!(
        "no CUDA toolkit is installed, and {} is not complete: run `cargo xtask cuda-toolkit`",
        folder.display()
    );
}

/// Where a toolkit is assembled: beside what cargo builds.
fn folder() -> Result<PathBuf> {
    let metadata = shell::read(shell::cargo(&[
        "metadata",
        "--no-deps",
        "--format-version=1",
    ]))?;
    let metadata: serde_json::Value = serde_json::from_str(&metadata)?;
    let target = metadata["target_directory"]
        .as_str()
        .context("cargo metadata names no target")?;
    Ok(Path::new(target).join("cuda-toolkit"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who runs a command in the environment learns how the command ended.
    #[test]
    fn a_status_is_passed_on() {
        for (script, code) in [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)] {
            let status = Command::new("sh").args(["-c", script]).status().unwrap();
            assert_eq!(passed_on(status), ExitCode::from(code), "{script}");
        }
    }
}
