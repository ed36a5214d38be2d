//! Rules on dependencies, as `cargo metadata` resolves them with every feature on.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use serde_json::Value;

use super::Report;
use crate::shell;

/// Which of our own packages each may depend on. Arrows point one way, down this list.
const ARROWS: &[(&str, &[&str])] = &[
    ("replay-core", &[]),
    ("replay-cuda", &["replay-core"]),
    ("replay-graph", &["replay-core", "replay-cuda"]),
    (
        "deepseek-model",
        &["replay-core", "replay-cuda", "replay-graph"],
    ),
    (
        "replay-examples",
        &[
            "replay-core",
            "replay-cuda",
            "replay-graph",
            "deepseek-model",
        ],
    ),
    ("xtask", &[]),
];

/// Prefixes of packages that must not be found anywhere below a package of ours.
const NEVER_BELOW: &[(&str, &[&str])] = &[("replay-core", &["candle", "cudarc"])];

/// Packages whose types cross our interfaces: two versions of one would be different types.
const ONE_VERSION: &[&str] = &[
    "candle-core",
    "candle-nn",
    "cudarc",
    "safetensors",
    "tokenizers",
];

/// Packages that only programs, tests and tasks may depend on: a library's errors are typed.
const NOT_IN_LIBRARIES: &[&str] = &["anyhow"];

/// What `cargo metadata` says of the workspace and everything below it.
pub(super) fn metadata() -> Result<Value> {
    let args = [
        "metadata",
        "--format-version=1",
        "--all-features",
        "--locked",
    ];
    let text = shell::read(shell::cargo(&args))?;
    serde_json::from_str(&text).context("cannot read what `cargo metadata` printed")
}

pub(super) fn check(metadata: &Value, report: &mut Report) -> Result<()> {
    let graph = Graph::new(metadata)?;
    check_arrows(&graph, report);
    for (package, prefixes) in NEVER_BELOW {
        for below in graph.below(package) {
            if prefixes.iter().any(|prefix| below.starts_with(prefix)) {
                report.error(format!("{package}: depends on {below}, and must not"));
            }
        }
    }
    for name in ONE_VERSION {
        let versions = graph.versions.get(*name).map_or(0, BTreeSet::len);
        if versions > 1 {
            report.error(format!(
                "Cargo.lock: {versions} versions of {name}, whose types cross our interfaces"
            ));
        }
    }
    for (package, dependencies) in &graph.declared {
        if graph.libraries.contains(package) {
            for (name, kind) in dependencies {
                if NOT_IN_LIBRARIES.contains(&name.as_str()) && *kind == "normal" {
                    report.error(format!("{package}: {name} is for programs and tests"));
                }
            }
        }
    }
    Ok(())
}

/// Also holds for optional, dev and build dependencies: a cycle through tests is a cycle.
fn check_arrows(graph: &Graph, report: &mut Report) {
    for (package, dependencies) in &graph.declared {
        let Some((_, allowed)) = ARROWS.iter().find(|(name, _)| name == package) else {
            report.error(format!("{package}: not in the list of {}", file!()));
            continue;
        };
        for (name, kind) in dependencies {
            let ours = graph.declared.contains_key(name);
            if ours && !allowed.contains(&name.as_str()) {
                report.error(format!(
                    "{package}: must not depend on {name} ({kind} dependency)"
                ));
            }
        }
    }
}

/// The parts of the metadata that the rules are about.
#[derive(Debug, Default)]
struct Graph {
    /// Of each of our packages the declared dependencies, with their kind.
    declared: BTreeMap<String, Vec<(String, String)>>,
    /// Of our packages those that have a library target and are published.
    libraries: BTreeSet<String>,
    /// All versions in the tree of each package.
    versions: BTreeMap<String, BTreeSet<String>>,
    /// Of each package id its name.
    names: BTreeMap<String, String>,
    /// Of each package id the ids it is compiled with: dev-dependencies are not among them.
    edges: BTreeMap<String, Vec<String>>,
}

impl Graph {
    fn new(metadata: &Value) -> Result<Self> {
        let mut graph = Self::default();
        let ours: BTreeSet<&str> = array(metadata, "workspace_members")?
            .iter()
            .filter_map(Value::as_str)
            .collect();
        for package in array(metadata, "packages")? {
            let (id, name) = (string(package, "id")?, string(package, "name")?);
            let version = string(package, "version")?;
            graph.names.insert(id.into(), name.into());
            let versions = graph.versions.entry(name.into()).or_default();
            versions.insert(version.into());
            if !ours.contains(id) {
                continue;
            }
            let mut declared = Vec::new();
            for dependency in array(package, "dependencies")? {
                let kind = dependency["kind"].as_str().unwrap_or("normal");
                declared.push((string(dependency, "name")?.into(), kind.into()));
            }
            graph.declared.insert(name.into(), declared);
            if package["publish"].is_null() {
                graph.libraries.insert(name.into());
            }
        }
        for node in array(&metadata["resolve"], "nodes")? {
            let mut edges = Vec::new();
            for dependency in array(node, "deps")? {
                let dev = |kind: &Value| kind["kind"] == "dev";
                if !array(dependency, "dep_kinds")?.iter().all(dev) {
                    edges.push(string(dependency, "pkg")?.into());
                }
            }
            graph.edges.insert(string(node, "id")?.into(), edges);
        }
        Ok(graph)
    }

    /// Names of all packages below one of ours.
    fn below(&self, package: &str) -> BTreeSet<&str> {
        let mut open: Vec<&str> = self
            .names
            .iter()
            .filter(|(_, name)| *name == package)
            .map(|(id, _)| id.as_str())
            .collect();
        let mut seen = BTreeSet::new();
        while let Some(id) = open.pop() {
            for next in self.edges.get(id).into_iter().flatten() {
                if seen.insert(next.as_str()) {
                    open.push(next);
                }
            }
        }
        seen.into_iter()
            .filter_map(|id| self.names.get(id).map(String::as_str))
            .collect()
    }
}

fn array<'a>(value: &'a Value, key: &str) -> Result<&'a Vec<Value>> {
    value[key]
        .as_array()
        .with_context(|| format!("cargo metadata: no list {key:?}"))
}

fn string<'a>(value: &'a Value, key: &str) -> Result<&'a str> {
    value[key]
        .as_str()
        .with_context(|| format!("cargo metadata: no text {key:?}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn package(name: &str, version: &str, dependencies: &Value) -> Value {
        json!({
            "id": format!("{name}@{version}"), "name": name, "version": version,
            "publish": null, "dependencies": dependencies,
        })
    }

    fn node(id: &str, dependencies: &[(&str, Option<&str>)]) -> Value {
        let deps: Vec<_> = dependencies
            .iter()
            .map(|(id, kind)| json!({ "pkg": id, "dep_kinds": [{ "kind": kind }] }))
            .collect();
        json!({ "id": id, "deps": deps })
    }

    fn errors(packages: &[Value], nodes: &[Value]) -> Vec<String> {
        let metadata = json!({
            "workspace_members": ["replay-core@1", "replay-cuda@1"],
            "packages": packages, "resolve": { "nodes": nodes },
        });
        let mut report = Report::default();
        check(&metadata, &mut report).unwrap();
        report.errors
    }

    #[test]
    fn an_arrow_up_is_refused_in_tests_as_well() {
        let core = package(
            "replay-core",
            "1",
            &json!([{ "name": "replay-cuda", "kind": "dev" }]),
        );
        let cuda = package(
            "replay-cuda",
            "1",
            &json!([{ "name": "replay-core", "kind": null }]),
        );
        assert_eq!(
            errors(&[core, cuda], &[]),
            ["replay-core: must not depend on replay-cuda (dev dependency)"]
        );
    }

    #[test]
    fn what_is_below_is_found_at_any_depth_but_not_through_dev_dependencies() {
        let core = package("replay-core", "1", &json!([]));
        let others = ["a", "candle-core", "cudarc"].map(|name| package(name, "1", &json!([])));
        let nodes = [
            node("replay-core@1", &[("a@1", None), ("cudarc@1", Some("dev"))]),
            node("a@1", &[("candle-core@1", Some("build"))]),
        ];
        let packages = [vec![core], others.to_vec()].concat();
        assert_eq!(
            errors(&packages, &nodes),
            ["replay-core: depends on candle-core, and must not"]
        );
    }

    #[test]
    fn two_versions_and_an_untyped_error_are_refused() {
        let core = package(
            "replay-core",
            "1",
            &json!([{ "name": "anyhow", "kind": null }]),
        );
        let cudarc = ["1", "2"].map(|version| package("cudarc", version, &json!([])));
        assert_eq!(
            errors(&[vec![core], cudarc.to_vec()].concat(), &[]),
            [
                "Cargo.lock: 2 versions of cudarc, whose types cross our interfaces",
                "replay-core: anyhow is for programs and tests",
            ]
        );
    }
}
