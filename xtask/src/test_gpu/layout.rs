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
const RUNNER: &str = include_str!("run.sh");

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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

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
            let path = std::env::var("PATH").unwrap();
            let path = format!("{}:{path}", self.0.join("bin").display());
            let mut sh = shell::command("sh");
            sh.arg(self.0.join(RUNNER_NAME))
                .args(args)
                .env("PATH", path);
            let output = sh.output().unwrap();
            let text = [output.stdout, output.stderr].concat();
            (output.status.success(), String::from_utf8(text).unwrap())
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
        let none = "echo 'test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured'";
        for (name, script, message) in [
            (
                "failing",
                failing.as_str(),
                "tests of rows (exit status 101)",
            ),
            ("ignoring", ignoring.as_str(), "tests were ignored"),
            ("none", none, "no test ran"),
        ] {
            let machine = Machine::new(name)
                .gpu()
                .program("programs/rows.test", script);
            let (passed, printed) = machine.run(&["tests"]);
            assert!(!passed && printed.contains(message), "{name}: {printed}");
        }
        let machine = Machine::new("no-gpu").program("programs/rows.test", PASSED);
        let machine = machine.program("bin/nvidia-smi", "exit 9");
        let (passed, printed) = machine.run(&[]);
        assert!(!passed && printed.contains("no GPU"), "{printed}");
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
}
