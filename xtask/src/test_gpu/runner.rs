//! Tests of the runner, `run.sh`, beside programs and tools that are scripts.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use super::layout::{RUNNER, RUNNER_NAME};
use crate::shell;

/// The runner in a folder of its own, beside programs that are scripts.
struct Machine(PathBuf);

impl Machine {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("runner-{name}-{}", std::process::id()));
        let machine = Self(path);
        for folder in ["programs", "peers", "crates/rows", "bin"] {
            fs::create_dir_all(machine.0.join(folder)).unwrap();
        }
        fs::write(machine.0.join(RUNNER_NAME), RUNNER).unwrap();
        machine
    }

    fn program(self, name: &str, script: &str) -> Self {
        let file = self.0.join(name);
        fs::write(&file, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        self
    }

    fn gpu(self) -> Self {
        self.program("bin/nvidia-smi", "echo 'Some GPU, 1.2'")
    }

    /// A sanitizer that reports the runs that a pattern of the shell matches.
    fn sanitizer(self, pattern: &str) -> Self {
        let script = format!(
            r#"case $1 in --version) echo "Version 1"; exit;; esac
            tool=$2
            echo "$tool"
            while case $1 in --*) ;; *) false;; esac; do shift 2; done
            "$@" || exit
            case "$tool $*" in {pattern}) exit 86;; esac"#
        );
        self.program("bin/compute-sanitizer", &script)
    }

    /// Whether the runner succeeds, and what it prints.
    fn run(&self, args: &[&str]) -> (bool, String) {
        self.run_with(&[], args)
    }

    /// The same, with variables.
    fn run_with(&self, variables: &[(&str, &str)], args: &[&str]) -> (bool, String) {
        let path = std::env::var("PATH").unwrap();
        let path = format!("{}:{path}", self.0.join("bin").display());
        let mut sh = shell::command("sh");
        sh.arg(self.0.join(RUNNER_NAME))
            .args(args)
            .env("PATH", path)
            .current_dir(&self.0);
        for name in [
            "TEST_FILTER",
            "CUDA_LIBRARIES",
            "SECONDS_PER_STAGE",
            "REPLAY_GPU_SMALL",
            "REPLAY_GPU_PLAIN_MEMORY",
        ] {
            sh.env_remove(name);
        }
        sh.envs(variables.iter().copied());
        let output = sh.output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(text).unwrap())
    }
}

impl Machine {
    fn summary(&self) -> String {
        fs::read_to_string(self.0.join("results/summary.txt")).unwrap()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const PASSED: &str = "echo 'test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured'";

#[test]
fn tests_are_counted() {
    let machine = Machine::new("counted").gpu();
    let machine = machine.program("programs/rows.test", PASSED);
    let (passed, printed) = machine.run(&[]);
    assert!(passed, "{printed}");
    assert!(
        printed.contains("tests: 3 tests passed on Some GPU, 1.2"),
        "{printed}"
    );
    let summary = fs::read_to_string(machine.0.join("results/summary.txt")).unwrap();
    assert!(
        summary.contains("3 tests passed") && summary.contains("all passed"),
        "{summary}"
    );
}

/// Whatever keeps tests from running makes the run fail, and says what it was.
#[test]
fn nothing_passes_for_a_test() {
    let failing = format!("{PASSED}; exit 101");
    let ignoring = format!("echo 'test slow ... ignored'; {PASSED}");
    let counted = PASSED.replace("0 ignored", "10 ignored");
    let none = "echo 'test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured'";
    for (name, script, message) in [
        (
            "failing",
            failing.as_str(),
            "tests of rows (exit status 101)",
        ),
        ("ignoring", ignoring.as_str(), "tests were ignored"),
        ("counted-ignored", counted.as_str(), "tests were ignored"),
        ("none", none, "no test ran"),
    ] {
        let machine = Machine::new(name)
            .gpu()
            .program("programs/rows.test", script);
        let (passed, printed) = machine.run(&["tests"]);
        assert!(!passed && printed.contains(message), "{name}: {printed}");
    }
    let machine = Machine::new("no-gpu").program("programs/rows.test", PASSED);
    // It says so on its standard output.
    let machine = machine.program("bin/nvidia-smi", "echo 'no driver'; exit 9");
    let (passed, printed) = machine.run(&[]);
    let message = "no GPU: nvidia-smi failed (exit status 9): no driver";
    assert!(!passed && printed.contains(message), "{printed}");
}

/// The tests of one crate cannot hide that those of another did not run.
#[test]
fn each_program_must_run_a_test() {
    let none = "echo 'test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured'";
    let machine = Machine::new("each").gpu();
    let machine = machine
        .program("programs/rows.test", PASSED)
        .program("programs/rows.unit.test", none);
    let (passed, printed) = machine.run(&[]);
    let message = "no test of rows.unit ran";
    assert!(!passed && printed.contains(message), "{printed}");
    assert!(printed.contains("tests: 3 tests passed"), "{printed}");
    // A filter may leave a program none, but not all of them.
    let (passed, printed) = machine.run_with(&[("TEST_FILTER", "some")], &[]);
    assert!(passed, "{printed}");
    let machine = machine.program("programs/rows.test", none);
    let (passed, printed) = machine.run_with(&[("TEST_FILTER", "some")], &[]);
    assert!(!passed && printed.contains("no test ran"), "{printed}");
}

/// Who reads the summary later must not take a part for the whole.
#[test]
fn a_partial_run_is_called_one() {
    let script = format!(
        "echo \"<$* ${{REPLAY_GPU_SMALL-unset}} ${{REPLAY_GPU_PLAIN_MEMORY-unset}}>\"; {PASSED}"
    );
    let machine = Machine::new("partial").gpu();
    let machine = machine.program("programs/rows.test", &script);
    let (passed, printed) = machine.run_with(&[("TEST_FILTER", "some")], &[]);
    let summary = machine.summary();
    assert!(passed, "{printed}");
    let last = "partial: what was chosen passed (TEST_FILTER=some)\n";
    assert!(
        summary.ends_with(last) && !summary.contains("all passed"),
        "{summary}"
    );

    // What was exported for another run changes nothing here.
    let exported = [("REPLAY_GPU_SMALL", "1"), ("REPLAY_GPU_PLAIN_MEMORY", "")];
    let (passed, printed) = machine.run_with(&exported, &[]);
    let summary = machine.summary();
    assert!(passed && summary.ends_with("all passed\n"), "{printed}");
    assert!(
        printed.contains("<--test-threads=1 unset unset>"),
        "{printed}"
    );
    for (name, _) in exported {
        assert!(
            summary.contains(&format!("not used: {name}=")),
            "{name}: {summary}"
        );
    }
}

/// A program that hangs is stopped, and what stopped it is said.
#[test]
fn a_program_that_hangs_is_stopped() {
    let machine = Machine::new("hangs").gpu();
    let machine = machine.program("programs/rows.test", "exec sleep 60");
    let (passed, printed) = machine.run_with(&[("SECONDS_PER_STAGE", "1")], &[]);
    let message = "stopped: not done after 1 seconds (SECONDS_PER_STAGE)";
    assert!(!passed && printed.contains(message), "{printed}");
    assert!(machine.summary().contains("SECONDS_PER_STAGE=1"));
}

/// The summary of an earlier run does not stand for one that could not begin.
#[test]
fn a_failed_start_replaces_the_summary() {
    let machine = Machine::new("stale").gpu();
    let machine = machine.program("programs/rows.test", PASSED);
    let (passed, printed) = machine.run(&[]);
    assert!(passed, "{printed}");
    assert!(machine.summary().contains("command: sh run.sh tests\n"));
    let machine = machine.program("bin/nvidia-smi", "exit 9");
    let (passed, _) = machine.run(&[]);
    let summary = machine.summary();
    assert!(!passed && !summary.contains("passed"), "{summary}");
    assert!(summary.contains("FAILED: no GPU"), "{summary}");
}

/// A stage that finds nothing to do has not passed.
#[test]
fn stages_with_nothing_to_run_fail() {
    let machine = Machine::new("no-bench").gpu();
    let machine = machine.program("programs/rows.test", PASSED);
    let (passed, printed) = machine.run(&["bench"]);
    assert!(
        !passed && printed.contains("no bench among the programs"),
        "{printed}"
    );

    let script = format!("case $* in --list) exit 101;; esac; {PASSED}");
    let machine = Machine::new("no-list").gpu().sanitizer("nothing");
    let machine = machine.program("programs/rows.test", &script);
    let (passed, printed) = machine.run(&["memcheck"]);
    let message = "rows.test cannot list its tests";
    assert!(!passed && printed.contains(message), "{printed}");
}

/// Folders may be called anything, but an option is not taken for one.
#[test]
fn folders_with_odd_names() {
    let machine = Machine::new("odd").gpu();
    let machine = machine.program(
        "programs/rows.test",
        &format!("echo \"<$LD_LIBRARY_PATH>\"; {PASSED}"),
    );
    let libraries = machine.0.join("with a space");
    fs::create_dir_all(&libraries).unwrap();
    let libraries = libraries.to_str().unwrap();
    let variables = [("CUDA_LIBRARIES", libraries), ("LD_LIBRARY_PATH", "/own")];
    let (passed, printed) = machine.run_with(&variables, &["--out", "an out"]);
    assert!(passed, "{printed}");
    assert!(printed.contains(&format!("</own:{libraries}")), "{printed}");
    assert!(machine.0.join("an out/summary.txt").is_file());
    // The caller's choice comes after one that was made for it.
    let (passed, printed) = machine.run(&["--out", "first", "tests", "--out", "second"]);
    assert!(passed && !machine.0.join("first").exists(), "{printed}");
    assert!(machine.0.join("second/summary.txt").is_file());
    for folder in ["-x", ""] {
        let (passed, printed) = machine.run(&["--out", folder]);
        assert!(
            !passed && printed.contains(&format!("expected a folder, got '{folder}'")),
            "{printed}"
        );
    }
}

/// Every stage sees the programs, and a sanitizer runs them small.
#[test]
fn stages_run_in_order() {
    let machine = Machine::new("stages").gpu();
    let machine = machine
        .program(
            "programs/rows.test",
            &format!("echo \"small: $REPLAY_GPU_SMALL\"; {PASSED}"),
        )
        .program(
            "programs/rows.copy.bench",
            "echo \"bench $*\" | sed 's/ [^ ]*results/ results/'",
        )
        .sanitizer("nothing");
    let (passed, printed) = machine.run(&["bench", "sanitize", "--out", "/dev/null/x"]);
    assert!(!passed, "{printed}");
    let out = machine.0.join("out");
    let out = out.to_str().unwrap();
    let (passed, printed) = machine.run(&["bench", "sanitize", "--out", out]);
    assert!(passed, "{printed}");
    let expected = [
        "bench --bench --json",
        "memcheck",
        "small: 1",
        "racecheck",
        "small: 1",
    ];
    let mut rest = printed.as_str();
    for word in expected {
        let (_, after) = rest
            .split_once(word)
            .unwrap_or_else(|| panic!("{word}: {printed}"));
        rest = after;
    }
    assert!(
        fs::read_to_string(format!("{out}/memcheck.txt"))
            .unwrap()
            .contains("3 passed")
    );
}

/// Reports of legal programs are no reason to believe no report at all, nor to hide any.
#[test]
fn a_sanitizer_that_reports_legal_programs() {
    let list = "echo 'probes::a: test'; echo 'probes::b: test'; echo 'memory::c: test'";
    let script = format!(
        "case $* in --list) {list};; *) echo \"<$* $REPLAY_GPU_PLAIN_MEMORY>\"; {PASSED};; esac"
    );
    let machine = |name: &str, pattern: &str| {
        let machine = Machine::new(name)
            .gpu()
            .program("programs/rows.test", &script)
            .sanitizer(pattern);
        let (passed, printed) = machine.run(&["sanitize"]);
        let summary = fs::read_to_string(machine.0.join("results/summary.txt")).unwrap();
        (passed, printed, summary)
    };
    let (passed, printed, summary) = machine("sound", "nothing");
    assert!(passed, "{printed}");
    assert!(printed.contains("<--test-threads=1 >"), "{printed}");
    assert!(!summary.contains("legal"), "{summary}");

    let (passed, printed, summary) = machine("misread", "*probes::b|*memory::c");
    assert!(passed, "{printed}");
    let plain = "<--test-threads=1 --skip probes:: --skip memory:: 1>";
    assert!(printed.contains(plain), "{printed}");
    assert!(printed.contains("<--test-threads=1 >"), "{printed}");
    for line in ["legal programs on this machine: probes::b", ": memory::c"] {
        assert!(summary.contains(line), "{line}: {summary}");
    }

    // Sound by its probes, or with nothing left to misread: then it is believed.
    for (name, pattern) in [
        ("believed", "*memcheck*threads=1"),
        ("plain", "*probes::a|*--skip*"),
    ] {
        let (passed, printed, _) = machine(name, pattern);
        assert!(!passed && printed.contains("exit status 86"), "{printed}");
    }
}
