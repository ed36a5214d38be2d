//! What is left of a run that is interrupted.

#![cfg(unix)]

use std::process::{Command, Stdio};
use std::time::Duration;

use crate::process::{program, texts};

/// Of several texts none is printed before it has ended: what was made of them would be lost.
#[test]
fn an_interrupt_leaves_what_was_made() {
    let interrupted = |prompts: &[&str], wait: Duration| {
        let child = program("generate")
            .args(["--greedy", "--max-new-tokens", "4000"])
            .args(prompts)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        std::thread::sleep(wait);
        let sent = Command::new("kill")
            .args(["-s", "INT", &child.id().to_string()])
            .status();
        assert!(sent.unwrap().success());
        child.wait_with_output().unwrap()
    };
    // Before the first step there is nothing to be lost, and the signal ends the program.
    let in_the_middle = |prompts: &[&str]| {
        let waits = (1..60).map(|tenths| Duration::from_millis(100 * tenths));
        let mut ends = waits.map(|wait| interrupted(prompts, wait));
        ends.find(|output| output.stdout.len() > 100).unwrap()
    };
    let several = in_the_middle(&["--prompt", "MACBETH.", "--prompt", "And God said"]);
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
    let one = in_the_middle(&["--prompt", "MACBETH."]);
    assert_eq!(one.status.code(), Some(130), "{}", texts(&one).1);
    assert!(one.stdout.ends_with(b"\n"));
}
