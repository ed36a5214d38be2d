//! The programs as processes: exit codes, and pipes that close.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// The program, built beside this test. Cargo builds examples whenever it builds all tests.
fn program(name: &str) -> Command {
    let test = std::env::current_exe().unwrap();
    let file = format!("{name}{}", std::env::consts::EXE_SUFFIX);
    let path: PathBuf = test.ancestors().nth(2).unwrap().join("examples").join(file);
    assert!(
        path.exists(),
        "{} is missing: build the examples first",
        path.display()
    );
    let mut command = Command::new(path);
    command.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
    command
}

fn texts(output: &Output) -> (&str, &str) {
    let text = |bytes| std::str::from_utf8(bytes).unwrap();
    (text(&output.stdout), text(&output.stderr))
}

/// The command that the README gives, but for its length.
#[test]
fn the_quick_start_works() {
    let prompt = r"MACBETH.\nTo-morrow, and to-morrow, and";
    let output = program("generate")
        .args(["--prompt", prompt, "--max-new-tokens", "4"])
        .output();
    let output = output.unwrap();
    let (out, err) = texts(&output);
    assert!(output.status.success(), "{err}");
    assert!(out.ends_with('\n') && out.len() > 4, "{out:?}");
    assert!(
        err.starts_with("prefill  "),
        "no progress bar where nobody watches: {err:?}"
    );
}

#[test]
fn a_closed_pipe_is_no_error() {
    let mut child = program("generate")
        .args(["--prompt", "a", "--max-new-tokens", "64", "--greedy"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), texts(&output).1), (Some(0), ""));
}

/// The text counts, the summary does not.
#[cfg(target_os = "linux")]
#[test]
fn a_full_standard_error_is_no_error() {
    let full = std::fs::File::options().write(true).open("/dev/full");
    let output = program("generate")
        .args(["--prompt", "a", "--max-new-tokens", "1"])
        .stderr(full.unwrap())
        .output()
        .unwrap();
    assert!(output.status.success() && output.stdout.ends_with(b"\n"));
}

#[test]
fn errors_have_exit_codes_and_one_line() {
    let output = program("generate")
        .args(["--prompt", "a", "--model", "no/such"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        texts(&output),
        ("", "error: --model no/such: there is no such directory\n")
    );

    let output = program("perplexity")
        .args(["--last-rows", "0"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(
        texts(&output)
            .1
            .starts_with("error: invalid value '0' for '--last-rows <N>'")
    );
}
