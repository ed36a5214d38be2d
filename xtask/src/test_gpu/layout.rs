//! The folder that the runner runs from.
//!
//! ```text
//! run.sh                      the runner
//! programs/CRATE.test         the tests of a crate
//! programs/CRATE.unit.test    its unit tests, of which those named gpu_... run
//! programs/CRATE.TARGET.bench a bench of a crate
//! models/                     the checkpoints of the repository
//! crates/CRATE/               where they run: its test data, where the crate's own folder has them
//! peers/CRATE.NAME.py         scripts that measure other software for comparison
//! ```

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::programs::{Crate, Kind, Program};
use crate::cuda_toolkit::lock;
use crate::shell;

/// The runner's name in the folder.
pub(super) const RUNNER_NAME: &str = "run.sh";

/// The runner.
pub(super) const RUNNER: &str = include_str!("run.sh");

/// Where the programs lie, for as long as this is held.
pub(super) struct Layout {
    /// What `run.sh` runs from. It is made anew each time.
    pub(super) folder: PathBuf,
    /// Where results are kept from run to run.
    pub(super) results: PathBuf,
    /// Another process would take the folder away under the tests that run in it.
    _lock: File,
}

/// Lays the programs out, stripped.
pub(super) fn lay_out(crates: &[Crate], programs: &[Program]) -> Result<Layout> {
    // Beside what cargo builds: target/release/deps/PROGRAM.
    let target = programs
        .first()
        .and_then(|program| program.file.ancestors().nth(3));
    let layout = Layout::begin(target.context("no program was built")?)?;
    let folder = &layout.folder;
    for sub in ["programs", "peers"] {
        let sub = folder.join(sub);
        fs::create_dir_all(&sub).with_context(|| format!("cannot make {}", sub.display()))?;
    }
    let runner = folder.join(RUNNER_NAME);
    fs::write(&runner, RUNNER).with_context(|| format!("cannot write {}", runner.display()))?;
    for program in programs {
        let mut strip = shell::command("strip");
        strip.arg("--strip-all").arg("-o");
        strip
            .arg(folder.join("programs").join(name(program)))
            .arg(&program.file);
        shell::run(strip)?;
    }
    copy_folder(&shell::root().join("models"), &folder.join("models"))?;
    for c in crates {
        let to = folder.join("crates").join(&c.name);
        fs::create_dir_all(&to).with_context(|| format!("cannot make {}", to.display()))?;
        copy_folder(&c.folder.join("tests/data"), &to.join("tests/data"))?;
        for script in files(&c.folder.join("benches"))? {
            let name = script.file_name().unwrap_or_default().to_string_lossy();
            if script.extension().is_some_and(|e| e == "py") {
                copy(
                    &script,
                    &folder.join("peers").join(format!("{}.{name}", c.name)),
                )?;
            }
        }
    }
    Ok(layout)
}

impl Layout {
    /// An empty folder in `target`, which no other process lays out or runs from meanwhile.
    fn begin(target: &Path) -> Result<Self> {
        let lock = lock::lock(&target.join("gpu-tests.lock"))?;
        let folder = target.join("gpu-tests");
        if folder.exists() {
            fs::remove_dir_all(&folder)
                .with_context(|| format!("cannot remove {}", folder.display()))?;
        }
        Ok(Self {
            folder,
            results: target.join("gpu-results"),
            _lock: lock,
        })
    }
}

fn name(program: &Program) -> String {
    match program.kind {
        Kind::Test => format!("{}.test", program.crate_name),
        Kind::Unit => format!("{}.unit.test", program.crate_name),
        Kind::Bench => format!("{}.{}.bench", program.crate_name, program.target),
    }
}

/// The entries of a folder; none if there is no such folder.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    fs::read_dir(folder)
        .with_context(|| format!("cannot read {}", folder.display()))?
        .map(|entry| Ok(entry?.path()))
        .collect()
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    for path in files(from)? {
        let to = to.join(path.file_name().unwrap_or_default());
        if path.is_dir() {
            copy_folder(&path, &to)?;
        } else {
            let parent = to.parent().context("a file in no folder")?;
            fs::create_dir_all(parent)
                .with_context(|| format!("cannot make {}", parent.display()))?;
            copy(&path, &to)?;
        }
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to)
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    /// A second run must neither take the programs of the first away, nor the results of any.
    #[test]
    fn one_at_a_time_and_results_stay() {
        let target = std::env::temp_dir().join(format!("layout-{}", std::process::id()));
        let first = Layout::begin(&target).unwrap();
        let program = first.folder.join("programs/rows.test");
        for file in [&program, &first.results.join("summary.txt")] {
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, "x").unwrap();
        }
        let (sender, receiver) = mpsc::channel();
        let second = std::thread::spawn({
            let target = target.clone();
            move || sender.send(Layout::begin(&target).unwrap()).unwrap()
        });
        assert!(receiver.recv_timeout(Duration::from_millis(100)).is_err());
        assert!(program.is_file());
        drop(first);
        let second_layout = receiver.recv_timeout(Duration::from_secs(10)).unwrap();
        second.join().unwrap();
        assert!(!program.exists());
        assert!(second_layout.results.join("summary.txt").is_file());
        fs::remove_dir_all(&target).unwrap();
    }
}
