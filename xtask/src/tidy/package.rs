//! Rules on manifests: what a published package must carry.

use std::{fs, path::Path};

use anyhow::{Context, Result};
use serde_json::Value;

use super::Report;

/// Files that each published package carries beside its manifest.
const FILES: &[&str] = &["README.md", "LICENSE-MIT", "LICENSE-APACHE"];

pub(super) fn check(metadata: &Value, report: &mut Report) -> Result<()> {
    let members = metadata["workspace_members"].as_array();
    let members = members.context("cargo metadata: no list \"workspace_members\"")?;
    let packages = metadata["packages"].as_array().into_iter().flatten();
    for package in packages.filter(|package| members.contains(&package["id"])) {
        let name = package["name"].as_str().unwrap_or_default();
        let manifest = Path::new(package["manifest_path"].as_str().unwrap_or_default());
        let text = fs::read_to_string(manifest).with_context(|| manifest.display().to_string())?;
        check_lints(name, &text, report);
        // `publish = false` is an empty list of registries.
        if package["publish"].is_null() {
            check_published(name, package, report);
            let folder = manifest.parent().unwrap_or(manifest);
            for file in FILES.iter().filter(|file| !folder.join(file).is_file()) {
                report.error(format!("{name}: {file} is missing"));
            }
        }
    }
    Ok(())
}

fn check_lints(name: &str, manifest: &str, report: &mut Report) {
    if !manifest.contains("[lints]\nworkspace = true") {
        report.error(format!("{name}: [lints] workspace = true is missing"));
    }
}

fn check_published(name: &str, package: &Value, report: &mut Report) {
    let given = |value: &Value| match value {
        Value::String(text) => !text.is_empty(),
        Value::Array(list) => !list.is_empty(),
        Value::Object(map) => !map.is_empty(),
        _ => false,
    };
    let keys = [
        "description",
        "keywords",
        "categories",
        "license",
        "readme",
        "repository",
        "rust_version",
    ];
    for key in keys.into_iter().filter(|key| !given(&package[*key])) {
        report.error(format!("{name}: the manifest has no {key}"));
    }
    if !given(&package["metadata"]["docs"]["rs"]) {
        report.error(format!(
            "{name}: the manifest has no [package.metadata.docs.rs]"
        ));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn missing_facts_are_named_one_by_one() {
        let mut package = json!({
            "description": "d", "keywords": ["k"], "categories": ["c"], "license": "MIT",
            "readme": "README.md", "repository": "r", "rust_version": "1.90",
            "metadata": { "docs": { "rs": { "all-features": true } } },
        });
        let mut report = Report::default();
        check_published("a", &package, &mut report);
        assert_eq!(report.errors, [""; 0]);
        package["keywords"] = json!([]);
        package["metadata"] = Value::Null;
        check_published("a", &package, &mut report);
        check_lints("a", "[lints]\n", &mut report);
        assert_eq!(
            report.errors,
            [
                "a: the manifest has no keywords",
                "a: the manifest has no [package.metadata.docs.rs]",
                "a: [lints] workspace = true is missing",
            ]
        );
    }
}
