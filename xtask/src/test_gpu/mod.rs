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

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Context, Result};

use self::archive::Archive;
use crate::cuda_toolkit::{Purpose, Toolkit};
use crate::shell;

/// Build the GPU tests of all crates and run them on the GPU of this machine, one after the other.
///
/// Fails if there is no GPU, if a test is ignored, or if a program runs none. Results are kept in
/// `target/gpu-results`; the last line of `summary.txt` there says how the run ended.
#[derive(clap::Args)]
pub(crate) struct TestGpu {
    /// Build the tests, and run none.
    #[arg(long, conflicts_with = "runner")]
    no_run: bool,

    /// Pack the tests into FILE (`.tar.xz`, `.tar.zst` or `.tar.gz`) and run none. Unpacked on a
    /// machine with a GPU, `sh run.sh` runs them; `sh run.sh --help` says what else it does.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["no_run", "runner"])]
    archive: Option<PathBuf>,

    /// What to run, for the runner: `tests` (the default), `bench`, `sanitize`, `--out FOLDER`.
    /// A folder is one beside where you are.
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
        let archive = self.archive.as_deref().map(Archive::at).transpose()?;
        let toolkit = Toolkit::prepare(Purpose::Build)?;
        let crates = programs::crates()?;
        let programs = programs::build(&crates, &toolkit)?;
        for program in &programs {
            println!("built {program}");
        }
        if self.no_run {
            return Ok(());
        }
        let layout = layout::lay_out(&crates, &programs)?;
        if let Some(archive) = archive {
            return archive.pack(&layout.folder);
        }
        let mut runner = shell::command("sh");
        runner.arg(layout.folder.join(layout::RUNNER_NAME));
        // Of two folders the runner takes the last.
        runner.arg("--out").arg(&layout.results).args(self.runner);
        runner.env("CUDA_LIBRARIES", toolkit.libraries());
        // A folder among the arguments is one beside where the caller is.
        runner.current_dir(env::current_dir().context("no current folder")?);
        shell::run(runner)
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args, Command, FromArgMatches};

    use super::*;

    /// What would run nothing must not look as if it had.
    #[test]
    fn arguments_for_a_runner_that_does_not_run_are_refused() {
        let parse = |words: &[&str]| {
            let command = TestGpu::augment_args(Command::new("test-gpu"));
            let matches = command.try_get_matches_from([&["test-gpu"], words].concat());
            matches.and_then(|matches| TestGpu::from_arg_matches(&matches))
        };
        assert!(parse(&["--", "bench", "--out", "x"]).is_ok());
        assert!(parse(&["--archive", "x.tar.xz"]).is_ok());
        for words in [
            ["--archive=x.tar.xz", "--", "bench"].as_slice(),
            &["--no-run", "--", "tests"],
            &["--no-run", "--archive=x.tar.xz"],
        ] {
            assert!(parse(words).is_err(), "{words:?}");
        }
    }
}
