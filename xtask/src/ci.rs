//! `cargo xtask ci`: everything a change must pass, in one command.
//!
//! Cheap steps come first. Dependencies are compiled twice, not more: once in the dev profile, for
//! tests, and once in the release profile, for the program that the README runs. (Clippy and rustdoc
//! share one further pass that only checks them.) The step `cuda` compiles candle, and what depends
//! on it, once more in release. The tests come last, so that a log ends with their results.

use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::{
    cuda_toolkit::{Purpose, Toolkit},
    readme, shell, test_gpu, tidy,
};

/// Run every check but `cuda`: fmt, tidy, clippy, doc, package, readme, test. Stops at the first
/// failure.
#[derive(clap::Args)]
pub(crate) struct Ci {
    /// Run only these steps. `cuda`, which compiles candle's kernels, runs only when it is named.
    steps: Vec<String>,

    /// Run all steps, `cuda` too.
    #[arg(long, conflicts_with = "steps")]
    all: bool,
}

/// What the README tells people to run, word for word.
const TEST: &str = "cargo test --workspace";

struct Step {
    name: &'static str,
    what: &'static str,
    run: fn() -> Result<()>,
    /// Whether it runs when no step is named.
    always: bool,
}

const STEPS: &[Step] = &[
    Step {
        name: "fmt",
        what: "formatting",
        run: || cargo(&["fmt", "--all", "--", "--check"]),
        always: true,
    },
    Step {
        name: "tidy",
        what: "rules on sources, dependencies and documents",
        run: tidy::check,
        always: true,
    },
    Step {
        name: "clippy",
        what: "lints, warnings are errors",
        run: clippy,
        always: true,
    },
    Step {
        name: "doc",
        what: "documentation, warnings are errors",
        run: doc,
        always: true,
    },
    Step {
        name: "package",
        what: "what the library crates publish",
        run: package,
        always: true,
    },
    Step {
        name: "readme",
        what: "commands of README.md",
        run: || readme::run_except(TEST),
        always: true,
    },
    Step {
        name: "cuda",
        what: "lints with the feature cuda, and a build of the GPU tests; needs no GPU",
        run: cuda,
        always: false,
    },
    Step {
        name: "test",
        what: "unit tests, integration tests, examples, doc tests",
        run: test,
        always: true,
    },
];

impl Ci {
    pub(crate) fn run(self) -> Result<()> {
        for name in &self.steps {
            ensure!(
                STEPS.iter().any(|step| step.name == name),
                "no step is called {name:?}: expected one of {}",
                STEPS.iter().map(|s| s.name).collect::<Vec<_>>().join(", ")
            );
        }
        let chosen = |step: &&Step| {
            if self.steps.is_empty() {
                step.always || self.all
            } else {
                self.steps.iter().any(|name| name == step.name)
            }
        };
        let steps: Vec<_> = STEPS.iter().filter(chosen).collect();
        let started = Instant::now();
        let mut times = Vec::new();
        for (i, step) in steps.iter().enumerate() {
            println!(
                "\n=== [{}/{}] {}: {}",
                i + 1,
                steps.len(),
                step.name,
                step.what
            );
            let begun = Instant::now();
            (step.run)().with_context(|| {
                let time = shell::time(begun.elapsed());
                format!("step {} failed after {time}", step.name)
            })?;
            let time = shell::time(begun.elapsed());
            println!("=== {} passed in {time}", step.name);
            times.push(format!("{} {time}", step.name));
        }
        println!(
            "\n=== passed in {}: {}",
            shell::time(started.elapsed()),
            times.join(", ")
        );
        Ok(())
    }
}

fn cargo(args: &[&str]) -> Result<()> {
    run(shell::cargo(args))
}

fn run(command: std::process::Command) -> Result<()> {
    println!("$ {}", shell::show(&command));
    shell::run(command)
}

fn clippy() -> Result<()> {
    let deny = ["--", "-D", "warnings"];
    let all = ["clippy", "--workspace", "--all-targets"];
    cargo(&[all.as_slice(), deny.as_slice()].concat())?;
    // The one feature that needs no GPU. Other crates use replay-core without it.
    let serde = [
        "clippy",
        "-p",
        "replay-core",
        "--all-features",
        "--all-targets",
    ];
    cargo(&[serde.as_slice(), deny.as_slice()].concat())
}

fn doc() -> Result<()> {
    let mut doc = shell::cargo(&["doc", "--workspace", "--no-deps"]);
    doc.env("RUSTDOCFLAGS", "-D warnings");
    run(doc)
}

/// Packs the library crates together, since they are published together. The packages are not built:
/// that would compile candle once more.
fn package() -> Result<()> {
    cargo(&[
        "package",
        "--no-verify",
        "--allow-dirty",
        "-p",
        "replay-core",
        "-p",
        "replay-cuda",
        "-p",
        "replay-graph",
        "-p",
        "deepseek-model",
    ])
}

/// In release and of the same crates as the GPU tests: so candle's kernels are compiled once. The
/// programs have no CUDA code of their own.
fn cuda() -> Result<()> {
    let toolkit = Toolkit::prepare(Purpose::Build)?;
    let mut clippy = shell::cargo(&[
        "clippy",
        "--release",
        "-p",
        "replay-cuda",
        "-p",
        "replay-graph",
        "-p",
        "deepseek-model",
        "--all-targets",
        "--features",
        "replay-cuda/cuda,replay-graph/cuda,deepseek-model/cuda",
        "--",
        "-D",
        "warnings",
    ]);
    toolkit.apply(&mut clippy)?;
    run(clippy)?;
    test_gpu::TestGpu::build_only().run()
}

fn test() -> Result<()> {
    cargo(&TEST.split(' ').skip(1).collect::<Vec<_>>())
}
