//! Which programs there are, and building them.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::cuda_toolkit::Toolkit;
use crate::shell;

/// Name of the test targets that need a GPU.
const TEST_TARGET: &str = "gpu";

/// A crate with tests for the GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Crate {
    pub(super) name: String,
    /// Its folder.
    pub(super) folder: PathBuf,
    /// The benches that need the feature `cuda`, and those that the manifest names, by
    /// `package.metadata.test-gpu.benches`: they measure a GPU where there is one.
    pub(super) benches: Vec<String>,
    /// Whether some of its unit tests need a GPU: those of names that begin with `gpu_`. The
    /// manifest says so, by `package.metadata.test-gpu.unit`.
    pub(super) unit: bool,
}

/// What a program is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Test,
    Unit,
    Bench,
}

/// A program that was built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Program {
    pub(super) crate_name: String,
    pub(super) target: String,
    pub(super) kind: Kind,
    pub(super) file: PathBuf,
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Test => "tests",
            Kind::Unit => "unit tests",
            Kind::Bench => "bench",
        };
        write!(
            f,
            "{kind} {}/{}: {}",
            self.crate_name,
            self.target,
            self.file.display()
        )
    }
}

/// The crates of the workspace that have tests for the GPU.
pub(super) fn crates() -> Result<Vec<Crate>> {
    let metadata = shell::read(shell::cargo(&[
        "metadata",
        "--no-deps",
        "--format-version=1",
    ]))?;
    let crates = crates_in(&serde_json::from_str(&metadata)?)?;
    ensure!(
        !crates.is_empty(),
        "no crate has a test target called `{TEST_TARGET}`"
    );
    Ok(crates)
}

fn crates_in(metadata: &Value) -> Result<Vec<Crate>> {
    let packages = metadata["packages"]
        .as_array()
        .context("cargo metadata lists no packages")?;
    let mut crates = Vec::new();
    for package in packages {
        let targets = package["targets"]
            .as_array()
            .context("a package without targets")?;
        let named = |kind: &str| {
            let of_kind = targets.iter().filter(|target| target["kind"][0] == kind);
            let on_gpu = of_kind.filter(|target| {
                let features = target["required-features"].as_array();
                features.is_some_and(|features| features.iter().any(|f| f == "cuda"))
            });
            on_gpu
                .filter_map(|target| target["name"].as_str().map(str::to_owned))
                .collect()
        };
        let tests: Vec<String> = named("test");
        if !tests.iter().any(|test| test == TEST_TARGET) {
            continue;
        }
        let metadata = &package["metadata"]["test-gpu"];
        let mut benches = named("bench");
        let others = metadata["benches"].as_array().into_iter().flatten();
        benches.extend(others.filter_map(|name| name.as_str().map(str::to_owned)));
        let text = |key: &str| package[key].as_str().context("a package without a name");
        let manifest = Path::new(text("manifest_path")?);
        crates.push(Crate {
            name: text("name")?.to_owned(),
            folder: manifest
                .parent()
                .context("a manifest in no folder")?
                .to_path_buf(),
            benches,
            unit: metadata["unit"] == true,
        });
    }
    Ok(crates)
}

/// Builds the programs of the crates, all at once.
pub(super) fn build(crates: &[Crate], toolkit: &Toolkit) -> Result<Vec<Program>> {
    let mut cargo = shell::cargo(&["test", "--release", "--no-run", "--test", TEST_TARGET]);
    if crates.iter().any(|c| c.unit) {
        cargo.arg("--lib");
    }
    for c in crates {
        cargo.args([
            "--package",
            &c.name,
            "--features",
            &format!("{}/cuda", c.name),
        ]);
        for bench in &c.benches {
            cargo.args(["--bench", bench]);
        }
    }
    cargo.arg("--message-format=json-render-diagnostics");
    toolkit.apply(&mut cargo)?;
    cargo.stderr(Stdio::inherit());
    let messages = shell::read(cargo)?;
    let programs = programs_in(&messages, crates)?;
    for c in crates {
        let built = |kind| {
            let mut of_crate = programs.iter().filter(|p| p.crate_name == c.name);
            of_crate.any(|p| p.kind == kind)
        };
        ensure!(built(Kind::Test), "cargo built no tests of {}", c.name);
        ensure!(
            !c.unit || built(Kind::Unit),
            "cargo built no unit tests of {}",
            c.name
        );
    }
    Ok(programs)
}

/// The programs among cargo's messages, one message a line.
fn programs_in(messages: &str, crates: &[Crate]) -> Result<Vec<Program>> {
    let mut programs = Vec::new();
    for line in messages.lines() {
        let message: Value = serde_json::from_str(line).context("a message that is no JSON")?;
        let manifest = message["manifest_path"].as_str().unwrap_or_default();
        let owner = crates
            .iter()
            .find(|c| Path::new(manifest).parent() == Some(&c.folder));
        let (Some(file), Some(owner)) = (message["executable"].as_str(), owner) else {
            continue;
        };
        let kind = match message["target"]["kind"][0].as_str() {
            Some("test") => Kind::Test,
            Some("lib") if owner.unit => Kind::Unit,
            Some("bench") => Kind::Bench,
            _ => continue,
        };
        programs.push(Program {
            crate_name: owner.name.clone(),
            target: message["target"]["name"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
            kind,
            file: file.into(),
        });
    }
    programs.sort_by(|a, b| (a.kind, &a.crate_name).cmp(&(b.kind, &b.crate_name)));
    Ok(programs)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn rows() -> Crate {
        Crate {
            name: "rows".into(),
            folder: "/w/rows".into(),
            benches: vec!["gpu_rows".into(), "flash".into()],
            unit: true,
        }
    }

    #[test]
    fn crates_are_those_with_tests_for_the_gpu() {
        let target = |kind: &str, name: &str, features: &[&str]| json!({ "kind": [kind], "name": name, "required-features": features });
        let targets = [
            target("lib", "rows", &[]),
            target("test", "gpu", &["cuda"]),
            target("bench", "gpu_rows", &["cuda"]),
            target("bench", "cpu", &[]),
        ];
        let metadata = json!({ "packages": [
            { "name": "rows", "manifest_path": "/w/rows/Cargo.toml", "targets": targets,
              "metadata": { "test-gpu": { "unit": true, "benches": ["flash"] } } },
            { "name": "core", "manifest_path": "/w/core/Cargo.toml",
              "targets": [target("test", "laws", &[]), target("test", "gpu", &[])] },
        ]});
        assert_eq!(crates_in(&metadata).unwrap(), [rows()]);
    }

    #[test]
    fn programs_are_read_from_the_messages() {
        let artifact = |kind: &str, name: &str, file: Value| {
            let target = json!({ "kind": [kind], "name": name });
            json!({ "manifest_path": "/w/rows/Cargo.toml", "target": target, "executable": file })
        };
        let messages = [
            artifact("bench", "gpu_rows", json!("/t/gpu_rows-1")),
            artifact("lib", "rows", Value::Null),
            artifact("lib", "rows", json!("/t/rows-3")),
            artifact("test", "gpu", json!("/t/gpu-2")),
            json!({ "reason": "build-finished", "success": true }),
        ];
        let lines = messages.map(|message| message.to_string()).join("\n");
        let programs = programs_in(&lines, &[rows()]).unwrap();
        let shown: Vec<_> = programs.iter().map(Program::to_string).collect();
        assert_eq!(
            shown,
            [
                "tests rows/gpu: /t/gpu-2",
                "unit tests rows/rows: /t/rows-3",
                "bench rows/gpu_rows: /t/gpu_rows-1"
            ]
        );
    }
}
