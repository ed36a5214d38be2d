//! What is on a terminal in the end, where results and progress bars share one.

#![cfg(unix)]

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::num::NonZeroU16;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;

use rustix::fs::OFlags;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use serde_json::Value;

use crate::process::program;

/// Wider than any result here, so that each is a line, and higher than all of them.
const COLUMNS: NonZeroU16 = NonZeroU16::new(2000).unwrap();
const ROWS: NonZeroU16 = NonZeroU16::new(50).unwrap();

/// A terminal: what a program does to it, and what it writes to.
fn terminal() -> (File, File) {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let size = Winsize {
        ws_row: ROWS.get(),
        ws_col: COLUMNS.get(),
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    tcsetwinsize(&ours, size).unwrap();
    let name = ptsname(&ours, Vec::new()).unwrap();
    let theirs = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(OFlags::NOCTTY.bits().cast_signed())
        .open(OsStr::from_bytes(name.to_bytes()));
    (ours.into(), theirs.unwrap())
}

/// What is told behind a bar would stand in its line, and half of it below.
#[test]
fn an_interrupt_leaves_no_bar() {
    let dir = tempfile::tempdir().unwrap();
    let [requests, results] = ["in.jsonl", "out.jsonl"].map(|name| dir.path().join(name));
    let lines = "{\"prompt\": \"a\", \"max_new_tokens\": 1}\n{\"prompt\": \"b\", \"max_new_tokens\": 4000}\n";
    std::fs::write(&requests, lines).unwrap();
    let (mut ours, theirs) = terminal();
    let mut command = program("generate");
    command.args(["--greedy", "--batch"]).arg(&requests);
    command.arg("--output").arg(&results).stderr(theirs);
    let mut child = command.spawn().unwrap();
    drop(command);
    // It would wait for a terminal that is full.
    let written = std::thread::spawn(move || {
        let mut written = Vec::new();
        let _ = ours.read_to_end(&mut written);
        written
    });
    while std::fs::read_to_string(&results).map_or(true, |text| text.is_empty()) {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let signal = std::process::Command::new("kill")
        .args(["-s", "INT", &child.id().to_string()])
        .status();
    assert!(signal.unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let written = written.join().unwrap();
    let mut screen = vt100::Parser::new(ROWS, COLUMNS, 0);
    screen.process(&written);
    let left = screen.screen().contents();
    let lines: Vec<&str> = left.lines().collect();
    assert!(
        lines[0].starts_with("batch    2 requests: 1 answered, 1 left"),
        "{left}"
    );
    assert_eq!(
        *lines.last().unwrap(),
        "error: interrupted: 1 of 2 requests had no result; the same command goes on from there"
    );
    assert!(!left.contains("waiting"), "{left}");
}

/// A bar that is drawn again would wipe out what came behind it.
#[test]
fn results_stay_where_a_bar_is_drawn() {
    let dir = tempfile::tempdir().unwrap();
    let requests = dir.path().join("in.jsonl");
    let lines = (0..8).map(|n| format!("{{\"prompt\": \"a\", \"max_new_tokens\": {}}}\n", 4 + n));
    std::fs::write(&requests, lines.collect::<String>()).unwrap();
    let (mut ours, theirs) = terminal();
    let mut command = program("generate");
    command
        .args(["--greedy", "--max-running", "1", "--batch"])
        .arg(&requests)
        .stdout(theirs.try_clone().unwrap())
        .stderr(theirs);
    let mut child = command.spawn().unwrap();
    // It holds the other end, too.
    drop(command);
    let mut written = Vec::new();
    // The end of a terminal is an error.
    let _ = ours.read_to_end(&mut written);
    assert!(child.wait().unwrap().success());
    let text = String::from_utf8_lossy(&written);
    let drawn = (0..=8).any(|done| text.contains(&format!("requests {done}/8")));
    assert!(drawn, "no bar where a person watches");
    let mut screen = vt100::Parser::new(ROWS, COLUMNS, 0);
    screen.process(&written);
    let left = screen.screen().contents();
    let texts = left.lines().filter_map(|line| {
        let result: Value = serde_json::from_str(line).ok()?;
        Some(result["ids"].as_array()?.len())
    });
    assert_eq!(
        texts.collect::<Vec<_>>(),
        (4..12).collect::<Vec<_>>(),
        "{left}"
    );
    assert!(
        !left.contains("requests 8/8"),
        "the bar is gone in the end: {left}"
    );
}
