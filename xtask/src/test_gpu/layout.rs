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

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::programs::{Crate, Kind, Program};
use crate::shell;

/// The runner's name in the folder.
pub(super) const RUNNER_NAME: &str = "run.sh";

/// The runner.
pub(super) const RUNNER: &str = include_str!("run.sh");

/// Lays the programs out, stripped, and gives the folder.
pub(super) fn lay_out(crates: &[Crate], programs: &[Program]) -> Result<PathBuf> {
    // Beside what cargo builds: target/release/deps/PROGRAM.
    let target = programs
        .first()
        .and_then(|program| program.file.ancestors().nth(3));
    let folder = target.context("no program was built")?.join("gpu-tests");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    for sub in ["programs", "peers"] {
        fs::create_dir_all(folder.join(sub))?;
    }
    fs::write(folder.join(RUNNER_NAME), RUNNER)?;
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
        fs::create_dir_all(&to)?;
        copy_folder(&c.folder.join("tests/data"), &to.join("tests/data"))?;
        for script in files(&c.folder.join("benches"))? {
            let name = script.file_name().unwrap_or_default().to_string_lossy();
            if script.extension().is_some_and(|e| e == "py") {
                fs::copy(
                    &script,
                    folder.join("peers").join(format!("{}.{name}", c.name)),
                )?;
            }
        }
    }
    Ok(folder)
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
    fs::read_dir(folder)?
        .map(|entry| Ok(entry?.path()))
        .collect()
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    for path in files(from)? {
        let to = to.join(path.file_name().unwrap_or_default());
        if path.is_dir() {
            copy_folder(&path, &to)?;
        } else {
            fs::create_dir_all(to.parent().context("a file in no folder")?)?;
            fs::copy(&path, &to)?;
        }
    }
    Ok(())
}
