//! What is left of a run that is interrupted.

#![cfg(unix)]

use std::process::{Command, Output, Stdio};
use std::time::Duration;

use crate::process::{program, texts};

/// Ends a program by a signal after a while.
fn ended(name: &str, flags: &[&str], signal: &str, wait: Duration) -> Output {
    let child = program(name)
        .args(flags)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(wait);
    let sent = Command::new("kill")
        .args(["-s", signal, &child.id().to_string()])
        .status();
    assert!(sent.unwrap().success());
    child.wait_with_output().unwrap()
}

/// The same at a moment at which something was made. Before the first step there is nothing to be lost, and
/// the signal ends the program; one that came to its end by itself, where a machine is busy no more, was
/// waited for too long.
fn in_the_middle(name: &str, flags: &[&str], signal: &str) -> Output {
    let waits = (0..12).map(|n| Duration::from_millis(200).mul_f64(1.5f64.powi(n)));
    let mut ends = waits
        .cycle()
        .take(36)
        .map(|wait| ended(name, flags, signal, wait));
    let middle = |output: &Output| output.stdout.len() > 100 && !output.status.success();
    ends.find(middle).unwrap()
}

/// Of several texts none is printed before it has ended: what was made of them would be lost.
#[test]
fn an_interrupt_leaves_what_was_made() {
    let interrupted = |prompts: &[&str], signal| {
        let flags = ["--greedy", "--max-new-tokens", "4000"];
        in_the_middle("generate", &[&flags[..], prompts].concat(), signal)
    };
    let several = interrupted(&["--prompt", "MACBETH.", "--prompt", "And God said"], "INT");
    let (out, err) = texts(&several);
    assert_eq!(several.status.code(), Some(130), "{err}");
    assert!(out.starts_with("=== 1 of 2"), "{out}");
    assert!(out.contains("=== 2 of 2") && out.ends_with('\n'), "{out}");
    assert!(
        err.starts_with("prefill  ")
            && err.ends_with("error: interrupted: 2 of 2 texts had not come to an end\n"),
        "{err}"
    );
    // One is printed as it is made, and its line is ended.
    let one = interrupted(&["--prompt", "MACBETH."], "TERM");
    let err = texts(&one).1;
    assert_eq!(one.status.code(), Some(143), "{err}");
    assert!(one.stdout.ends_with(b"\n"));
    let said = "error: terminated: 1 of 1 text had not come to an end\n";
    assert!(err.ends_with(said), "{err}");
}

/// What is done is there, in a file or on standard output, and a file is gone on from.
#[test]
fn an_interrupt_leaves_the_results_of_a_batch() {
    let dir = tempfile::tempdir().unwrap();
    let [requests, results] = ["in.jsonl", "out.jsonl"].map(|name| dir.path().join(name));
    // The first results come soon, the last ones late.
    let lines = (0..40).map(|n| {
        let new = if n < 4 { 2 } else { 3000 };
        format!("{{\"prompt\": \"And God said {n}\", \"max_new_tokens\": {new}}}\n")
    });
    std::fs::write(&requests, lines.collect::<String>()).unwrap();
    let flags = ["--greedy", "--max-running", "8", "--batch"];
    let flags = [&flags[..], &[requests.to_str().unwrap()]].concat();
    let left = |output: &Output, status, said: &str| {
        let err = texts(output).1;
        assert_eq!(output.status.code(), Some(status), "{err}");
        let last = err.lines().last().unwrap();
        let left = last.strip_prefix(&format!("error: {said}: ")).unwrap();
        let (left, rest) = left.split_once(" of 40 requests had no result").unwrap();
        let left: usize = left.parse().unwrap();
        let summary = format!(
            "batch    40 requests: {} answered, {left} left\n",
            40 - left
        );
        assert!(err.contains(&summary), "{err}");
        (left, rest.to_owned())
    };
    let output = in_the_middle("generate", &flags, "INT");
    let done = texts(&output).0.lines().count();
    assert_eq!(
        left(&output, 130, "interrupted"),
        (40 - done, String::new())
    );
    // Nothing on standard output tells when there is something.
    let to_file = [&flags[..], &["--output", results.to_str().unwrap()]].concat();
    let done = || std::fs::read_to_string(&results).map_or(0, |text| text.lines().count());
    let waits = (0..7).map(|doublings| Duration::from_millis(200 << doublings));
    let mut ends = waits.map(|wait| ended("generate", &to_file, "TERM", wait));
    let output = ends.find(|_| done() > 0).unwrap();
    let goes_on = "; the same command goes on from there".to_owned();
    assert_eq!(left(&output, 143, "terminated"), (40 - done(), goes_on));
    let before = done();
    let output = ended("generate", &to_file, "TERM", Duration::from_secs(2));
    let said = texts(&output).1;
    assert!(
        done() >= before && said.contains(&format!("{before} had results before")),
        "{said}"
    );
}

/// The rows of the short contexts are measured within a moment, and wait for those of the long ones.
#[test]
fn an_interrupt_leaves_what_was_measured() {
    let text = "examples/perplexity/data/tempest.txt";
    // Long contexts take longer than any wait that is tried first.
    let flags = |lengths| {
        let fixed = ["--text", text, "--policies", "off", "--windows", "8"];
        [&fixed[..], &["--chunk", "512", "--contexts", lengths]].concat()
    };
    let short = program("perplexity").args(flags("16")).output().unwrap();
    for (signal, status, said) in [("INT", 130, "interrupted"), ("TERM", 143, "terminated")] {
        let output = in_the_middle("perplexity", &flags("16,4000"), signal);
        let (out, err) = texts(&output);
        assert_eq!(output.status.code(), Some(status), "{err}");
        assert_eq!(out, texts(&short).0);
        let said = format!("error: {said}: 1 of 2 measurements had not come to an end\n");
        assert!(err.ends_with(&said), "{err}");
    }
}
