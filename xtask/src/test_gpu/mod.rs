//! `cargo xtask test-gpu`: the tests that need a GPU, run so that they cannot pass without one.
//!
//! What they are: every test target called `gpu` of the workspace. They are built in release with the
//! feature `cuda` and laid out in `target/gpu-tests` beside a runner, a shell script. The runner is
//! what runs them, here or, packed into an archive, on a machine without Rust: so both fail alike
//! when there is no GPU or when no test ran.

mod archive;
mod layout;
mod programs;
#[cfg(test)]
mod runner;

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::Result;

use crate::cuda_toolkit::{Purpose, Toolkit};
use crate::shell;

/// Build the GPU tests of all crates and run them on the GPU of this machine, one after the other.
///
/// Fails if there is no GPU, if a test is ignored, or if none ran.
#[derive(clap::Args)]
pub(crate) struct TestGpu {
    /// Build the tests, and run none.
    #[arg(long)]
    no_run: bool,

    /// Pack the tests into FILE (`.tar.xz`, `.tar.zst` or `.tar.gz`) and run none. Unpacked on a
    /// machine with a GPU, `sh run.sh` runs them; `sh run.sh --help` says what else it does.
    #[arg(long, value_name = "FILE", conflicts_with = "no_run")]
    archive: Option<PathBuf>,

    /// What to run, for the runner: `tests` (the default), `bench`, `sanitize`, `--out FOLDER`.
    #[arg(last = true)]
    runner: Vec<OsString>,
}

impl TestGpu {
    /// Builds the tests, and runs none.
    pub(crate) fn build_only() -> Self {
        Self {
            no_run: true,
            archive: None,
            runner: Vec::new(),
        }
    }

    pub(crate) fn run(self) -> Result<()> {
        let toolkit = Toolkit::prepare(Purpose::Build)?;
        let crates = programs::crates()?;
        let programs = programs::build(&crates, &toolkit)?;
        for program in &programs {
            println!("built {program}");
        }
        if self.no_run {
            return Ok(());
        }
        let folder = layout::lay_out(&crates, &programs)?;
        if let Some(file) = self.archive {
            return archive::pack(&folder, &file);
        }
        let mut runner = shell::command("sh");
        runner
            .arg(folder.join(layout::RUNNER_NAME))
            .args(self.runner);
        runner.env("CUDA_LIBRARIES", toolkit.libraries());
        shell::run(runner)
    }
}
