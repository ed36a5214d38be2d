//! `cargo xtask tidy`: rules that no compiler checks. Every broken one is reported, with its place.

mod code;
mod deps;
mod docs;
mod package;
mod sources;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

use crate::shell;

/// Check the rules on sources, dependencies, packages and documents.
#[derive(clap::Args)]
pub(crate) struct Tidy {}

impl Tidy {
    #[expect(clippy::unused_self, reason = "every command is run by a method")]
    pub(crate) fn run(self) -> Result<()> {
        check()
    }
}

/// Checks every rule.
pub(crate) fn check() -> Result<()> {
    let root = shell::root();
    let metadata = deps::metadata()?;
    let mut report = Report::default();
    sources::check(&root, &mut report)?;
    deps::check(&metadata, &mut report)?;
    package::check(&metadata, &mut report)?;
    docs::check(&root, &mut report)?;
    for warning in &report.warnings {
        println!("warning: {warning}");
    }
    for error in &report.errors {
        println!("error: {error}");
    }
    match report.errors.len() {
        0 => Ok(()),
        n => bail!("tidy: {n} broken rules"),
    }
}

/// What was found. An entry begins with its place.
#[derive(Debug, Default)]
struct Report {
    errors: Vec<String>,
    warnings: Vec<String>,
}

impl Report {
    fn error(&mut self, text: impl Into<String>) {
        self.errors.push(text.into());
    }

    fn warn(&mut self, text: impl Into<String>) {
        self.warnings.push(text.into());
    }
}

/// Files below `dir` with this extension, sorted, as paths relative to `root`. Build output and
/// hidden folders are passed over; new files that git does not know yet are not.
fn files(root: &Path, dir: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut open = vec![root.join(dir)];
    while let Some(dir) = open.pop() {
        let entries = fs::read_dir(&dir).with_context(|| dir.display().to_string())?;
        for entry in entries {
            let entry = entry?;
            let (path, name) = (entry.path(), entry.file_name());
            if name == "target" || name.to_string_lossy().starts_with('.') {
                continue;
            }
            if entry.file_type()?.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|e| e == extension) {
                found.push(path.strip_prefix(root)?.to_path_buf());
            }
        }
    }
    found.sort();
    Ok(found)
}

fn read(root: &Path, file: &Path) -> Result<String> {
    fs::read_to_string(root.join(file)).with_context(|| file.display().to_string())
}
