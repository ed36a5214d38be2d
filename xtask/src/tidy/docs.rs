//! Rules on documents: links lead somewhere, the code map names what there is, named tests exist.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use super::{Report, files, read};

const MAP: &str = "docs/ARCHITECTURE.md";

/// Folders whose modules the code map lists, each below a heading that names it.
const MAPPED: &[&str] = &[
    "crates/replay-core/src",
    "crates/replay-cuda/src",
    "crates/replay-graph/src",
    "crates/deepseek-model/src",
    "examples/src",
    "xtask/src",
];

pub(super) fn check(root: &Path, report: &mut Report) -> Result<()> {
    for file in files(root, Path::new(""), "md")? {
        let text = read(root, &file)?;
        let folder = root
            .join(&file)
            .parent()
            .map(PathBuf::from)
            .unwrap_or_default();
        for (line, target) in links(&text) {
            if !folder.join(target).exists() {
                report.error(format!("{}:{line}: no file {target}", file.display()));
            }
        }
    }
    let map = read(root, Path::new(MAP))?;
    for folder in MAPPED {
        check_map(&map, folder, &modules(&root.join(folder))?, report);
    }
    let mut sources = String::new();
    for file in files(root, Path::new(""), "rs")? {
        sources.push_str(&read(root, &file)?);
    }
    for (line, test) in tests(&map) {
        if !sources.contains(&format!("fn {test}(")) {
            report.error(format!("{MAP}:{line}: no test {test}"));
        }
    }
    Ok(())
}

/// Names of tests, with their line: code of lower-case words, more than three of them.
fn tests(text: &str) -> Vec<(usize, &str)> {
    let part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let is_name = |code: &&str| code.chars().all(part) && code.matches('_').count() >= 3;
    let mut names = Vec::new();
    for (line, text) in (1..).zip(text.lines()) {
        let code = text.split('`').skip(1).step_by(2);
        names.extend(code.filter(is_name).map(|name| (line, name)));
    }
    names
}

/// Targets of links to files, with their line, without fragments.
fn links(text: &str) -> Vec<(usize, &str)> {
    let mut links = Vec::new();
    for (line, text) in (1..).zip(text.lines()) {
        for (at, _) in text.match_indices("](") {
            let rest = &text[at + 2..];
            let target = &rest[..rest.find([')', '#', ' ']).unwrap_or(rest.len())];
            // An address, a fragment of the same page, or a path of rustdoc's.
            if !target.is_empty() && !target.contains("://") && !target.contains("::") {
                links.push((line, target));
            }
        }
    }
    links
}

/// Modules in a folder, as `name.rs` or `name/`; crate roots are left out.
fn modules(folder: &Path) -> Result<BTreeSet<String>> {
    let mut modules = BTreeSet::new();
    let entries = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_source = entry.path().extension().is_some_and(|e| e == "rs");
        if entry.file_type()?.is_dir() {
            modules.insert(format!("{name}/"));
        } else if is_source && name != "lib.rs" && name != "main.rs" {
            modules.insert(name);
        }
    }
    Ok(modules)
}

/// The section below the heading of `folder` has one row per module that starts with its name, and
/// no other.
fn check_map(map: &str, folder: &str, modules: &BTreeSet<String>, report: &mut Report) {
    let heading = format!("`{folder}`");
    let mut lines = (1..).zip(map.lines());
    let found = lines.find(|(_, line)| line.starts_with('#') && line.contains(&heading));
    if found.is_none() {
        report.error(format!("{MAP}: no heading for {heading}"));
        return;
    }
    let mut listed = BTreeSet::new();
    for (number, line) in lines.take_while(|(_, line)| !line.starts_with('#')) {
        let Some(cell) = line
            .strip_prefix("| `")
            .and_then(|rest| rest.split('|').next())
        else {
            continue;
        };
        for name in cell.split(", ").map(|name| name.trim().trim_matches('`')) {
            if !modules.contains(name) {
                report.error(format!("{MAP}:{number}: {folder} has no module {name}"));
            }
            listed.insert(name);
        }
    }
    for module in modules
        .iter()
        .filter(|module| !listed.contains(module.as_str()))
    {
        report.error(format!("{MAP}: {folder}/{module} is not in the code map"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_to_files_are_found() {
        let text = "[a](a.md) [b](https://b)\n[c](#c) [d](d/e.rs#L3) [`F`](crate::F)";
        assert_eq!(links(text), [(1, "a.md"), (2, "d/e.rs")]);
    }

    #[test]
    fn tests_are_told_from_other_code() {
        let text = "`a_b` and `this_is_a_test`,\n| `Type::of_a_long_name` | `x y_z_u_v` `of_one_more_test` |";
        assert_eq!(
            tests(text),
            [(1, "this_is_a_test"), (2, "of_one_more_test")]
        );
    }

    #[test]
    fn the_map_lists_every_module_and_no_other() {
        let map = "## `a/src`\n\n| module | knows |\n|---|---|\n| `x.rs`, `y/` | .. |\n| `z.rs` | .. |\n\n## Next\n| `w.rs` |\n";
        let modules = |names: &[&str]| names.iter().map(ToString::to_string).collect();
        let mut report = Report::default();
        check_map(map, "a/src", &modules(&["x.rs", "y/", "z.rs"]), &mut report);
        assert_eq!(report.errors, [""; 0]);
        check_map(map, "a/src", &modules(&["x.rs", "y/", "w.rs"]), &mut report);
        check_map(map, "b/src", &modules(&[]), &mut report);
        assert_eq!(
            report.errors,
            [
                "docs/ARCHITECTURE.md:6: a/src has no module z.rs",
                "docs/ARCHITECTURE.md: a/src/w.rs is not in the code map",
                "docs/ARCHITECTURE.md: no heading for `b/src`",
            ]
        );
    }
}
