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
/// the signal ends the program.
fn in_the_middle(name: &str, flags: &[&str], signal: &str) -> Output {
    let waits = (0..7).map(|doublings| Duration::from_millis(200 << doublings));
    let mut ends = waits.map(|wait| ended(name, flags, signal, wait));
    ends.find(|output| output.stdout.len() > 100).unwrap()
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
