//! The example `plan` as a process: exit codes, and what is refused before anything is printed.

use std::fmt::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

/// The program, built beside this test. Cargo builds examples whenever it builds all tests.
fn plan(args: &[&str]) -> Command {
    let test = std::env::current_exe().unwrap();
    let file = format!("plan{}", std::env::consts::EXE_SUFFIX);
    let path: PathBuf = test.ancestors().nth(2).unwrap().join("examples").join(file);
    let path = path.display().to_string();
    assert!(
        PathBuf::from(&path).exists(),
        "{path} is missing: build the examples first"
    );
    let mut command = Command::new(path);
    command.args(args);
    command
}

fn texts(output: &Output) -> (&str, &str) {
    let text = |bytes| std::str::from_utf8(bytes).unwrap();
    (text(&output.stdout), text(&output.stderr))
}

#[test]
fn the_picture_of_the_readme_is_printed() {
    let output = plan(&[]).output().unwrap();
    let (out, err) = texts(&output);
    assert_eq!((output.status.code(), err), (Some(0), ""));
    assert!(out.starts_with("prompt of 32,768 tokens in chunks of 8,192; 40 layers"));
}

/// Each is refused at once, by the flag's name.
#[test]
fn refused_flags_are_named_before_anything_is_printed() {
    let mut report = String::new();
    for args in [
        &["--window", "0"][..],
        &["--window", "99999999"],
        &["--window", "x"],
        &["--cut", "0"],
        &["--cut", "39"],
        &["--cut", "4294967295"],
        &["--kv-share", "2"],
        &["--kv-share", "-1"],
        &["--kv-share", "NaN"],
        &["--prompt", "0"],
        &["--prompt", "4294967295"],
        &["--prompt", "16777216"],
        &["--prompt", "1000000", "--chunk", "1"],
        &["--layers", "4294967295"],
        &["--layers", "0"],
        &["--columns", "4294967295"],
    ] {
        let output = plan(args).output().unwrap();
        let (out, err) = texts(&output);
        assert_eq!((output.status.code(), out), (Some(2), ""), "{args:?}");
        let first = err.lines().next().unwrap();
        writeln!(report, "{}\n    {first}", args.join(" ")).unwrap();
    }
    insta::assert_snapshot!(report);
}

#[test]
fn a_closed_pipe_is_no_error() {
    let mut child = plan(&["--columns", "4096"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), texts(&output).1), (Some(0), ""));
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_standard_output_is_an_error() {
    let full = std::fs::File::options().write(true).open("/dev/full");
    let output = plan(&[]).stdout(full.unwrap()).output().unwrap();
    let (_, err) = texts(&output);
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(err.starts_with("error: standard output: "), "{err}");
}
