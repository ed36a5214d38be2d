//! The programs as processes: streams that close or end nowhere, and what ends them.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// The program, built beside this test. Cargo builds examples whenever it builds all tests.
pub(crate) fn program(name: &str) -> Command {
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

/// The same under a limit: what `ulimit` takes.
pub(crate) fn limited(limit: &str, name: &str) -> Command {
    let program = program(name);
    let mut command = Command::new("sh");
    command
        .args(["-c", &format!(r#"ulimit {limit}; exec "$0" "$@""#)])
        .arg(program.get_program())
        .current_dir(program.get_current_dir().unwrap());
    command
}

pub(crate) fn texts(output: &Output) -> (&str, &str) {
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

/// Whoever closes a pipe early needs no message, and whoever looks at the status must not take a part of the
/// results for all of them: it is that of a program that SIGPIPE ended.
#[test]
fn a_closed_pipe_is_told_by_the_status_alone() {
    let dir = tempfile::tempdir().unwrap();
    let requests = dir.path().join("in.jsonl");
    let lines = "{\"prompt\": \"a\", \"max_new_tokens\": 8}\n".repeat(100);
    std::fs::write(&requests, lines).unwrap();
    let batch = ["--max-running", "1", "--batch", requests.to_str().unwrap()];
    let text = ["--prompt", "a", "--max-new-tokens", "64"];
    for (flags, read) in [(&text[..], false), (&batch, false), (&batch, true)] {
        let mut child = program("generate")
            .arg("--greedy")
            .args(flags)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = BufReader::with_capacity(1, child.stdout.take().unwrap());
        let mut first = String::new();
        if read {
            out.read_line(&mut first).unwrap();
        }
        drop(out);
        let output = child.wait_with_output().unwrap();
        let ended = (output.status.code(), texts(&output).1);
        assert_eq!(ended, (Some(141), ""), "{flags:?}, {first}");
        assert_eq!(first.is_empty(), !read);
    }
}

/// A limit on files ends a program by a signal and without a word, unless the program asks for an error.
#[cfg(target_os = "linux")]
#[test]
fn a_file_beyond_its_limit_is_an_error_that_names_it() {
    let dir = tempfile::tempdir().unwrap();
    let [requests, results] = ["in.jsonl", "out.jsonl"].map(|name| dir.path().join(name));
    let lines = "{\"prompt\": \"a\", \"max_new_tokens\": 8}\n".repeat(20);
    std::fs::write(&requests, lines).unwrap();
    let run = |limit: &str| {
        let output = limited(&format!("-f {limit}"), "generate")
            .args(["--greedy", "--batch", requests.to_str().unwrap()])
            .args(["--output", results.to_str().unwrap()])
            .output();
        output.unwrap()
    };
    // In blocks of 512 bytes.
    let output = run("2");
    let err = texts(&output).1;
    assert_eq!(output.status.code(), Some(1), "{err}");
    let name = format!("error: --output {}: ", results.display());
    let told = err
        .lines()
        .any(|line| line.starts_with(&name) && line.contains("File too large"));
    assert!(told, "{err}");
    // What was written counts.
    let output = run("unlimited");
    assert!(output.status.success(), "{}", texts(&output).1);
    let text = std::fs::read_to_string(&results).unwrap();
    assert_eq!(text.lines().count(), 20);
}

/// A prompt that is not there yet is no error, and no empty prompt.
#[cfg(unix)]
#[test]
fn an_input_that_does_not_block_is_waited_for() {
    use std::io::Write;
    use std::os::{fd::OwnedFd, unix::net::UnixStream};

    let (mut ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    let child = program("generate")
        .args(["--prompt-file", "-", "--max-new-tokens", "1", "--greedy"])
        .stdin(OwnedFd::from(theirs))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(std::time::Duration::from_millis(300));
    ours.write_all(b"MACBETH.\n").unwrap();
    drop(ours);
    let output = child.wait_with_output().unwrap();
    let (_, err) = texts(&output);
    assert!(output.status.success(), "{err}");
    assert!(err.starts_with("prefill  "), "{err}");
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

/// The library answers this normalizer with a panic, whose text would come before the error.
#[test]
fn a_panic_that_becomes_an_error_is_told_once() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/v41-demo");
    let dir = tempfile::tempdir().unwrap();
    let config = std::fs::copy(demo.join("config.json"), dir.path().join("config.json"));
    config.unwrap();
    let file = std::fs::read(demo.join("tokenizer.json")).unwrap();
    let mut file: serde_json::Value = serde_json::from_slice(&file).unwrap();
    file["normalizer"] =
        serde_json::json!({"type": "Replace", "pattern": {"Regex": "(?=a)"}, "content": "b"});
    std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();

    let output = program("generate")
        .args(["--prompt", "a", "--model"])
        .arg(dir.path())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let (_, err) = texts(&output);
    assert!(
        err.starts_with("error: --model: the normalizer ")
            && err.contains("at which the tokenizers crate"),
        "{err}"
    );
    assert_eq!(err.lines().count(), 1, "{err}");
}

/// The arguments of a run that prints one token.
#[cfg(unix)]
const ONE_TOKEN: [&str; 4] = ["--prompt", "a", "--max-new-tokens", "1"];

/// `name` with `flags`, its standard output redirected as the shell says.
#[cfg(unix)]
fn redirected(name: &str, flags: &[&str], redirection: &str) -> Output {
    let program = program(name);
    Command::new("sh")
        .args(["-c", &format!(r#"exec "$0" "$@" {redirection}"#)])
        .arg(program.get_program())
        .args(flags)
        .current_dir(program.get_current_dir().unwrap())
        .output()
        .unwrap()
}

/// The standard library takes a closed standard output for `/dev/null`, and one that is not open for
/// writing as well.
#[cfg(unix)]
#[test]
fn a_result_that_goes_nowhere_is_an_error() {
    for (name, flags) in [
        ("generate", &ONE_TOKEN[..]),
        ("generate", &["--help"]),
        ("perplexity", &[]),
    ] {
        let output = redirected(name, flags, ">&-");
        assert_eq!(output.status.code(), Some(1), "{name} {flags:?}");
        let message = "error: standard output is closed: expected a place for the result\n";
        assert_eq!(texts(&output).1, message, "{name} {flags:?}");
    }
    let output = redirected("generate", &ONE_TOKEN, "1</dev/null");
    assert_eq!(output.status.code(), Some(1));
    let message = "error: standard output: Bad file descriptor (os error 9)\n";
    assert_eq!(texts(&output).1, message);
}

/// The standard library takes both for one that is empty.
#[cfg(unix)]
#[test]
fn a_prompt_that_cannot_be_read_is_no_empty_one() {
    let flags = ["--prompt-file", "-", "--max-new-tokens", "1"];
    for (redirection, reason) in [
        ("<&-", "it is closed"),
        ("0>/dev/null", "Bad file descriptor (os error 9)"),
    ] {
        let output = redirected("generate", &flags, redirection);
        assert_eq!(output.status.code(), Some(1), "{redirection}");
        let message = format!("error: --prompt-file -: cannot read standard input: {reason}\n");
        assert_eq!(texts(&output).1, message, "{redirection}");
    }
    let output = redirected("generate", &flags, "</dev/null");
    let message = "error: --prompt-file -: the prompt is empty\n";
    assert_eq!(texts(&output).1, message);
    // Nobody reads it.
    assert!(redirected("generate", &ONE_TOKEN, "<&-").status.success());
    let piped = redirected("generate", &flags, "<LICENSE-MIT");
    assert!(piped.status.success(), "{}", texts(&piped).1);
}

/// `/dev/null` that was asked for, however it was opened.
#[cfg(unix)]
#[test]
fn a_result_that_nobody_wants_is_no_error() {
    for redirection in [">/dev/null", "1<>/dev/null"] {
        let output = redirected("generate", &ONE_TOKEN, redirection);
        assert!(
            output.status.success(),
            "{redirection}: {}",
            texts(&output).1
        );
    }
}

/// Rayon would start them all and never come to an end.
#[test]
fn an_absurd_number_of_threads_is_refused() {
    let output = program("generate")
        .args(["--prompt", "a"])
        .env("RAYON_NUM_THREADS", "1000000")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let (out, err) = texts(&output);
    assert_eq!(out, "");
    assert!(
        err.starts_with("error: RAYON_NUM_THREADS=1000000: expected a number of threads, 0 (one for each core) to "),
        "{err}"
    );
}

/// Whatever moment a batch is killed at: what was written is there to the end, as it was, and each request is
/// answered once. Results that wait for the long first one under `input` count as written.
#[cfg(unix)]
#[test]
fn a_killed_batch_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let line = |i| {
        let new = if i == 0 { 150 } else { 4 + i % 5 };
        format!("{{\"prompt\": \"And God said {i}\", \"max_new_tokens\": {new}}}")
    };
    let lines: Vec<String> = (0..40).map(line).collect();
    let batch = dir.path().join("in.jsonl");
    std::fs::write(&batch, lines.join("\n")).unwrap();
    for order in ["finished", "input"] {
        let output = dir.path().join(order);
        let pending = dir.path().join(format!("{order}.pending"));
        // Whole lines, in either file.
        let written = || -> BTreeSet<String> {
            let read = |path| std::fs::read_to_string(path).unwrap_or_default();
            let text = [&output, &pending].map(read);
            let lines = text.iter().flat_map(|text| text.split_inclusive('\n'));
            let whole = lines.filter(|line| line.ends_with('\n'));
            whole.map(str::to_owned).collect()
        };
        let start = || {
            let mut command = program("generate");
            command.args([
                "--greedy",
                "--max-running",
                "3",
                "--order",
                order,
                "--batch",
            ]);
            command.arg(&batch).arg("--output").arg(&output);
            command.stderr(Stdio::piped());
            command
        };
        for (more, wait) in [(0, 0), (1, 0), (2, 7), (3, 3), (1, 11)] {
            let known = written();
            let mut child = start().spawn().unwrap();
            while written().len() < known.len() + more || !output.exists() {
                assert_eq!(
                    child.try_wait().unwrap(),
                    None,
                    "{order}: it ended by itself"
                );
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(wait));
            child.kill().unwrap();
            child.wait().unwrap();
            assert!(written().is_superset(&known), "{order}");
        }
        let known = written();
        assert!(known.len() >= 7, "{order}: {}", known.len());
        let last = start().output().unwrap();
        assert!(last.status.success(), "{}", texts(&last).1);
        let all = std::fs::read_to_string(&output).unwrap();
        let whole: BTreeSet<String> = all.split_inclusive('\n').map(str::to_owned).collect();
        assert!(whole.is_superset(&known) && !pending.exists(), "{order}");
        let ids: Vec<u64> = all
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
            .map(|result| result["id"].as_u64().unwrap())
            .collect();
        assert_eq!(
            ids.iter().copied().collect::<BTreeSet<_>>(),
            (1..=40).collect()
        );
        assert_eq!(ids.len(), 40, "{order}");
        assert!(order == "finished" || ids.is_sorted(), "{ids:?}");
    }
}
