//! Packing the tests for another machine.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::shell;

/// The largest archive, in bytes: what services that lend machines with a GPU take.
const MAX_BYTES: u64 = 60_000_000;

/// Packs the folder.
pub(super) fn pack(folder: &Path, file: &Path) -> Result<()> {
    let file = std::path::absolute(file)?;
    if let Some(parent) = file.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut tar = shell::command("tar");
    // The kernels of candle are in every program. A dictionary that reaches from one program to the
    // next keeps them once.
    tar.env("XZ_OPT", "--lzma2=preset=6,dict=256MiB");
    tar.env("ZSTD_CLEVEL", "19");
    tar.args([
        "--create",
        "--auto-compress",
        "--owner=0",
        "--group=0",
        "--file",
    ])
    .arg(&file);
    tar.arg("--directory").arg(folder).arg(".");
    shell::run(tar)?;
    let bytes = fs::metadata(&file)
        .with_context(|| format!("no {}", file.display()))?
        .len();
    println!("packed {}: {:.1} MB", file.display(), bytes as f64 / 1e6);
    ensure!(
        bytes <= MAX_BYTES,
        "the archive is larger than {} MB",
        MAX_BYTES / 1_000_000
    );
    Ok(())
}
