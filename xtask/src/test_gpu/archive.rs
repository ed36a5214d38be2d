//! Packing the tests for another machine.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::shell;

/// The largest archive, in bytes: what services that lend machines with a GPU take.
const MAX_BYTES: u64 = 60_000_000;

/// How an archive's name may end: `tar` chooses the compression by it.
const ENDINGS: [&str; 3] = [".tar.xz", ".tar.zst", ".tar.gz"];

/// An archive that is to be written.
#[derive(Debug)]
pub(super) struct Archive {
    file: PathBuf,
    /// Beside it, what is written until it is whole; its name ends alike.
    part: PathBuf,
}

impl Archive {
    /// An archive at a path that can be written: what is wrong with it is known before anything is
    /// built.
    pub(super) fn at(file: &Path) -> Result<Self> {
        let name = file.file_name().and_then(OsStr::to_str).unwrap_or_default();
        ensure!(
            ENDINGS.iter().any(|ending| name.ends_with(ending)),
            "--archive {}: expected a name that ends in {}",
            file.display(),
            ENDINGS.join(" or ")
        );
        ensure!(
            !file.is_dir(),
            "--archive {}: expected a file, got a folder",
            file.display()
        );
        let file = std::path::absolute(file)?;
        if let Some(parent) = file.parent() {
            fs::create_dir_all(parent)
                .with_context(|| format!("cannot make {}", parent.display()))?;
        }
        let part = file.with_file_name(format!(".{}.{name}", std::process::id()));
        File::create(&part).with_context(|| format!("cannot write {}", file.display()))?;
        Ok(Self { file, part })
    }

    /// Packs the folder.
    pub(super) fn pack(self, folder: &Path) -> Result<()> {
        let mut tar = shell::command("tar");
        // The kernels of candle are in every program. A dictionary that reaches from one program to
        // the next keeps them once.
        tar.env("XZ_OPT", "--lzma2=preset=6,dict=256MiB");
        tar.env("ZSTD_CLEVEL", "19");
        tar.args([
            "--create",
            "--auto-compress",
            "--owner=0",
            "--group=0",
            "--file",
        ])
        .arg(&self.part);
        tar.arg("--directory").arg(folder).arg(".");
        shell::run(tar)?;
        self.keep(MAX_BYTES)
    }

    /// Puts what was written in its place, if it is small enough.
    fn keep(self, max_bytes: u64) -> Result<()> {
        let bytes = fs::metadata(&self.part)
            .with_context(|| format!("no {}", self.part.display()))?
            .len();
        ensure!(
            bytes <= max_bytes,
            "{}: expected an archive of at most {} MB, got {:.1} MB: not kept",
            self.file.display(),
            max_bytes as f64 / 1e6,
            bytes as f64 / 1e6
        );
        fs::rename(&self.part, &self.file)
            .with_context(|| format!("cannot write {}", self.file.display()))?;
        println!(
            "packed {}: {:.1} MB",
            self.file.display(),
            bytes as f64 / 1e6
        );
        Ok(())
    }
}

impl Drop for Archive {
    fn drop(&mut self) {
        // What was kept is not there any more.
        let _ = fs::remove_file(&self.part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A build takes minutes; what is wrong with the path is said before.
    #[test]
    fn a_path_that_cannot_be_written_is_refused() {
        let folder = std::env::temp_dir();
        let cases = [
            (
                Path::new("tests.zip"),
                "ends in .tar.xz or .tar.zst or .tar.gz",
            ),
            (Path::new("tests.tar"), "tests.tar: expected a name"),
            (&folder, "expected a name"),
            (Path::new("/dev/null/tests.tar.xz"), "/dev/null"),
            (Path::new("/proc/tests.tar.xz"), "cannot"),
        ];
        for (file, message) in cases {
            let error = format!("{:#}", Archive::at(file).unwrap_err());
            assert!(error.contains(message), "{error}");
        }
    }

    /// What no service takes is not left there to be sent, and what was there before stays.
    #[test]
    fn an_archive_over_the_limit_is_not_kept() {
        let folder = std::env::temp_dir().join(format!("archive-{}", std::process::id()));
        let file = folder.join("new/tests.tar.gz");
        let written = |text: &str| {
            let archive = Archive::at(&file).unwrap();
            fs::write(&archive.part, text).unwrap();
            archive
        };
        written("12345").keep(5).unwrap();
        let error = written("123456").keep(5).unwrap_err().to_string();
        assert!(error.contains("tests.tar.gz: expected"), "{error}");
        assert_eq!(fs::read_to_string(&file).unwrap(), "12345");
        assert_eq!(fs::read_dir(folder.join("new")).unwrap().count(), 1);
        fs::remove_dir_all(&folder).unwrap();
    }
}
