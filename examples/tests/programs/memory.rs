//! The programs under a limit on their addresses (`ulimit -v`). The allocator would end them, with a number
//! of bytes and no word about what took them.

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::process::{limited, texts};
use crate::{change, copy_of_demo, root};

/// One token of a short prompt.
const SHORT: [&str; 5] = ["--prompt", "a", "--max-new-tokens", "1", "--greedy"];

/// A program with so many KiB of addresses.
fn under(kib: u32, name: &str, args: &[&str]) -> Output {
    of_addresses(kib, name, args).output().unwrap()
}

/// The same, not yet started.
fn of_addresses(kib: u32, name: &str, args: &[&str]) -> Command {
    let mut command = limited(&format!("-v {kib}"), name);
    command.args(args).env("RAYON_NUM_THREADS", "2");
    command
}

/// What a program says that is refused for lack of memory; the machine has enough, so that nothing else
/// would lead to the limit.
#[track_caller]
fn refusal(kib: u32, name: &str, args: &[&str]) -> String {
    let output = under(kib, name, args);
    let err = texts(&output).1;
    assert_eq!(output.status.code(), Some(1), "{name}, {kib} KiB: {err}");
    assert!(
        err.starts_with("error: ") && err.lines().count() == 1 && err.contains("ulimit -v"),
        "{name}, {kib} KiB: {err}"
    );
    err.to_owned()
}

/// The number in what a refusal of a step ends with.
fn chunk(refusal: &str) -> Option<u32> {
    let (_, end) = refusal.split_once(" rows would fit (lower --chunk to ")?;
    end.strip_suffix(")\n")?.parse().ok()
}

#[test]
fn a_step_that_does_not_fit_the_memory_is_refused_by_its_flag() {
    let dir = copy_of_demo();
    change(&dir.path().join("config.json"), |config| {
        config["text_config"]["max_position_embeddings"] = (1 << 20).into();
    });
    let prompt = dir.path().join("prompt.txt");
    std::fs::write(&prompt, "word ".repeat(100_000)).unwrap();
    let (model, prompt) = (dir.path().to_str().unwrap(), prompt.to_str().unwrap());
    let flags = ["--max-new-tokens", "0", "--chunk", "1000000"];
    let files = ["--model", model, "--prompt-file", prompt];
    // More than threads, model and cache take, less than 100,000 rows of a step.
    let err = refusal(1200 << 10, "generate", &[&flags[..], &files].concat());
    let start = "error: --chunk 1000000: step: 100003 rows take about ";
    assert!(err.starts_with(start), "{err}");
    let fits = chunk(&err).unwrap();
    assert!((1000..100_003).contains(&fits), "{err}");
}

/// The number for `--max-running` that a refusal ends with.
fn running(refusal: &str) -> Option<u32> {
    let (_, end) = refusal.split_once(" (lower --max-running to ")?;
    end.strip_suffix(")\n")?.parse().ok()
}

/// Tokens that would fit were named alone, of which there are none where the texts' own memory is too much.
#[test]
fn texts_at_a_time_that_a_refusal_names_are_served() {
    let serve = ["--port", "0", "--max-running"];
    for mib in [400, 700] {
        for (most, more) in [("5000", &[][..]), ("99999", &["--cache-tokens", "4096"])] {
            let flags = [&serve[..], &[most], more].concat();
            let err = refusal(mib << 10, "serve", &flags);
            let fits = running(&err).unwrap_or_else(|| panic!("{mib} MiB: {err}"));
            assert!((10..5000).contains(&fits), "{mib} MiB: {err}");
            let fits = fits.to_string();
            let flags = [&serve[..], &[&fits], more].concat();
            let mut child = of_addresses(mib << 10, "serve", &flags)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            let mut line = String::new();
            let out = child.stdout.take().unwrap();
            BufReader::new(out).read_line(&mut line).unwrap();
            child.kill().unwrap();
            let err = child.wait_with_output().unwrap().stderr;
            let err = String::from_utf8_lossy(&err);
            assert!(line.starts_with("listening"), "{mib} MiB, {fits}: {err}");
        }
    }
}

/// The same of requests at once.
#[test]
fn requests_at_once_that_a_refusal_names_run() {
    let dir = tempfile::tempdir().unwrap();
    let batch = dir.path().join("in.jsonl");
    let line =
        "{\"prompt\": \"a\", \"max_new_tokens\": 4000, \"stop\": [\"e\", \"a\", \"o\", \" \"]}\n";
    std::fs::write(&batch, line.repeat(600)).unwrap();
    let flags = ["--batch", batch.to_str().unwrap(), "--max-running"];
    let err = refusal(500 << 10, "generate", &[&flags[..], &["600"]].concat());
    let fits = running(&err).unwrap_or_else(|| panic!("{err}"));
    assert!((10..600).contains(&fits), "{err}");
    let output = under(
        500 << 10,
        "generate",
        &[&flags[..], &[&fits.to_string()]].concat(),
    );
    assert!(output.status.success(), "{}", texts(&output).1);
}

/// What was given back of one step was once no room for the next: a number of rows that was said to fit was
/// refused when it was used, in the second step where not in the first.
#[test]
fn rows_that_a_refusal_names_run() {
    let text =
        std::fs::read_to_string(root().join("examples/perplexity/data/macbeth.txt")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let prompt = dir.path().join("prompt.txt");
    std::fs::write(&prompt, &text[..6000]).unwrap();
    let prompt = prompt.to_str().unwrap();
    let flags = ["--prompt-file", prompt, "--max-new-tokens", "1", "--greedy"];
    let mut named = 0;
    for mib in (100..240).step_by(3) {
        let output = under(mib << 10, "generate", &flags);
        if output.status.success() {
            break;
        }
        let Some(rows) = chunk(texts(&output).1) else {
            continue;
        };
        named += 1;
        let rows = rows.to_string();
        let output = under(
            mib << 10,
            "generate",
            &[&flags[..], &["--chunk", &rows]].concat(),
        );
        let err = texts(&output).1;
        assert!(output.status.success(), "{mib} MiB, {rows} rows: {err}");
    }
    assert!(named >= 3, "{named} limits too low for the whole prompt");
}

/// Threads could take addresses that weights need: 160 MiB were refused where 100 were enough. And what
/// passes the checks must not be ended by the allocator.
#[test]
fn what_runs_under_a_limit_runs_under_every_higher_one() {
    let mut refused = None;
    for mib in (5..80).rev().map(|n: u32| 4 * n) {
        let output = under(mib << 10, "generate", &SHORT);
        let err = texts(&output).1;
        match output.status.code() {
            Some(0) => assert_eq!(refused, None, "{mib} MiB are enough"),
            Some(1) if err.starts_with("error: ") => {
                // The machine has enough: nothing else would lead to the limit.
                assert!(err.contains("ulimit -v"), "{mib} MiB: {err}");
                refused = refused.or(Some(mib));
            }
            // Not ours: the program was not even loaded.
            Some(127) => break,
            code => panic!("{code:?} under {mib} MiB: {err}"),
        }
    }
    let most = refused.expect("a limit that is too low");
    assert!((64..160).contains(&most), "{most} MiB are too few");
}

/// Between what threads take and what weights take there was a band where the texts took the rest.
#[test]
fn no_text_is_encoded_where_nothing_is_left() {
    let flags = ["--contexts", "16", "--windows", "1"];
    let mut refused = 0;
    for kib in (40..160).rev().map(|n: u32| n << 9) {
        let output = under(kib, "perplexity", &flags);
        let err = texts(&output).1;
        match output.status.code() {
            Some(1) => assert!(
                err.contains("ulimit -v") || err.contains("Cannot allocate memory"),
                "{kib} KiB: {err}"
            ),
            // Not ours: the program was not even loaded.
            Some(127) => break,
            code => panic!("{code:?} under {kib} KiB: {err}"),
        }
        refused += 1;
    }
    assert!(refused > 40, "{refused} limits");
}

/// Encoding takes some hundred bytes for each byte of a text.
#[test]
fn a_long_text_is_refused_by_its_flag_with_the_length_that_would_do() {
    let text =
        std::fs::read_to_string(root().join("examples/perplexity/data/macbeth.txt")).unwrap();
    let dir = copy_of_demo();
    let long = dir.path().join("long.txt");
    std::fs::write(&long, text.repeat(20)).unwrap();
    let text = format!(
        "--text {}: to encode a text of 2 MiB may take ",
        long.display()
    );
    let long = long.to_str().unwrap();
    let perplexity = ["--contexts", "16", "--windows", "1", "--text", long];
    for mib in [100, 160, 300] {
        let err = refusal(mib << 10, "perplexity", &perplexity);
        assert!(err.starts_with(&format!("error: {text}")), "{err}");
        assert!(
            err.contains("; a text of ") && err.ends_with(" would fit\n"),
            "{err}"
        );
    }
    // A model of so many positions that the length alone is no reason.
    change(&dir.path().join("config.json"), |config| {
        config["text_config"]["max_position_embeddings"] = (1 << 20).into();
    });
    let prompt = [
        "--model",
        dir.path().to_str().unwrap(),
        "--prompt-file",
        long,
    ];
    let err = refusal(300 << 10, "generate", &prompt);
    let start = text.replace("--text", "error: --prompt-file");
    assert!(err.starts_with(&start), "{err}");
}

/// Memory that parsing takes goes by what is in a file, not by its length alone.
#[test]
fn a_file_that_takes_more_memory_than_there_is_is_named() {
    let strings: Value = vec!["a".repeat(100); 100_000].into();
    let objects: Value = vec![serde_json::json!({"": 0}); 100_000].into();
    for (file, extra, kib) in [
        ("config.json", &strings, 50_000),
        ("config.json", &objects, 90_000),
        ("tokenizer.json", &strings, 70_000),
        ("tokenizer.json", &objects, 90_000),
        ("generation_config.json", &strings, 60_000),
        ("generation_config.json", &objects, 90_000),
        ("model.safetensors.index.json", &strings, 90_000),
    ] {
        let dir = copy_of_demo();
        let path = dir.path().join(file);
        if !path.exists() {
            std::fs::write(&path, "{}").unwrap();
        }
        change(&path, |json| json["extra"] = extra.clone());
        let model = dir.path().to_str().unwrap();
        for (name, flags) in [
            ("generate", &SHORT[..]),
            (
                "perplexity",
                &[
                    "--contexts",
                    "16",
                    "--windows",
                    "1",
                    "--text",
                    "LICENSE-MIT",
                ],
            ),
        ] {
            let err = refusal(kib, name, &[&["--model", model], flags].concat());
            let start = format!("error: --model: reading {} may take ", path.display());
            assert!(err.starts_with(&start), "{name}, {file}: {err}");
        }
    }
}

/// Many short lines become requests that take many times as much.
#[test]
fn a_batch_that_does_not_fit_the_memory_is_refused_by_its_flag() {
    let dir = tempfile::tempdir().unwrap();
    let batch = dir.path().join("batch.jsonl");
    std::fs::write(&batch, "{\"prompt\":\"x\"}\n".repeat(100_000)).unwrap();
    let batch = batch.to_str().unwrap();
    for mib in [54, 58, 62, 66] {
        let err = refusal(
            mib << 10,
            "generate",
            &["--batch", batch, "--max-new-tokens", "0"],
        );
        assert!(
            err.starts_with(&format!("error: --batch {batch}")),
            "{mib} MiB: {err}"
        );
    }
}

/// A file that never ends is a text that is too long, or one that memory does not hold; either way its flag
/// and what is wrong are named.
#[test]
fn a_text_without_end_is_refused_in_words() {
    for kib in [200_000, 300_000, 600_000, 1_000_000] {
        for (name, flag) in [("generate", "--prompt-file"), ("perplexity", "--text")] {
            let output = under(kib, name, &[flag, "/dev/zero"]);
            let err = texts(&output).1;
            let begins = format!("error: {flag} /dev/zero: expected a text ");
            assert!(err.starts_with(&begins), "{kib} KiB: {err}");
            assert_eq!(output.status.code(), Some(1));
        }
    }
}
