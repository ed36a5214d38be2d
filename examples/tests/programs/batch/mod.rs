//! `generate --batch`: what is refused before anything runs.

mod answers;
mod results;

use std::fs;
use std::path::PathBuf;

use replay_examples::generate::GenerateArgs;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{Run, demo, generate, generate_on, records, root};

/// A batch and a place for its results.
struct Batch {
    dir: TempDir,
    flags: Vec<&'static str>,
}

impl Batch {
    fn new(lines: &[Value], flags: &[&'static str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let lines: Vec<String> = lines.iter().map(Value::to_string).collect();
        fs::write(dir.path().join("in.jsonl"), lines.join("\n")).unwrap();
        let flags = flags.to_vec();
        Self { dir, flags }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs it on a checkpoint, with its results on standard output or in `out.jsonl`.
    fn run_on(&self, model: &str, to_file: bool, more: &[&str]) -> Run {
        let [input, output] = ["in.jsonl", "out.jsonl"].map(|name| self.path(name));
        let mut flags = vec!["--batch", input.to_str().unwrap()];
        if to_file {
            flags.extend(["--output", output.to_str().unwrap()]);
        }
        generate_on(model, &[&flags, &self.flags[..], more].concat(), "")
    }

    /// Its results on standard output.
    #[track_caller]
    fn results(&self) -> Vec<Value> {
        records(&self.run_on(&demo(), false, &[]).ok().0)
    }

    /// What it says on standard error, with its results in the file.
    #[track_caller]
    fn resume(&self, more: &[&str]) -> String {
        let (out, err) = self.run_on(&demo(), true, more).ok();
        assert_eq!(out, "");
        self.shown(&err)
    }

    /// Why it is refused.
    #[track_caller]
    fn refused(&self, more: &[&str]) -> String {
        let refused = self.run_on(&demo(), true, more).refused();
        self.shown(&refused)
    }

    fn shown(&self, text: &str) -> String {
        text.replace(self.dir.path().to_str().unwrap(), "DIR")
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }
}

/// A text to go on from, so many bytes of it.
fn text(from: usize, len: usize) -> String {
    let path = root().join("examples/perplexity/data/macbeth.txt");
    let text = fs::read_to_string(path).unwrap();
    text.chars().skip(from).take(len).collect()
}

/// Results in the order of their lines, without what depends on the clock.
fn in_order(mut results: Vec<Value>) -> Vec<Value> {
    results.sort_by_key(|result| result["line"].as_u64());
    for result in &mut results {
        result
            .as_object_mut()
            .unwrap()
            .remove("time_to_first_token_s");
    }
    results
}

/// All bad lines are told at once, before anything is written.
#[test]
fn bad_lines_are_all_told() {
    let batch = Batch::new(&[], &[]);
    batch.write(
        "in.jsonl",
        &[
            r#"{"prompt": "a"}"#,
            "",
            r#"{"prompt": "a", "promt": "b"}"#,
            r#"{"prompt": "a", "tokens": [1]}"#,
            r#"{"id": "x"}"#,
            r#"{"id": 1, "prompt": "a"}"#,
            r#"{"prompt": "a", "policy": "all"}"#,
            r#"{"prompt": "a", "top_p": 0}"#,
            r#"{"prompt": "a", "top_k": 0}"#,
            r#"{"prompt": "a", "seed": 1, "seed": 2}"#,
            r#"{"tokens": []}"#,
            r#"{"tokens": [1, 99999]}"#,
            &format!(r#"{{"prompt": "{}"}}"#, "word ".repeat(5000)),
            r#"{"prompt": "a"#,
        ]
        .join("\n"),
    );
    insta::assert_snapshot!(batch.refused(&[]));
    assert!(!batch.path("out.jsonl").exists());
    batch.write("in.jsonl", "\n{\"prompt\": \"a\", \"stop\": \"\"}\n");
    insta::assert_snapshot!(batch.refused(&[]), @r#"--batch DIR/in.jsonl line 2: stop: expected a text or a list of texts, none of them empty, got """#);
    let long = "x".repeat(100_000);
    let line = serde_json::json!({ "id": long, "prompt": "a" });
    batch.write("in.jsonl", &format!("{line}\n{line}"));
    let twice = batch.refused(&[]);
    assert!(
        twice.contains("is that of line 1, too") && twice.len() < 400,
        "{}",
        twice.len()
    );
    batch.write("in.jsonl", "\n\n");
    insta::assert_snapshot!(batch.refused(&[]), @"--batch DIR/in.jsonl: expected a request in each line, there is none");
    batch.write("in.jsonl", &"{}\n".repeat(25));
    assert!(batch.refused(&[]).ends_with("neither\n  and 5 more"));
}

/// Flags that a batch excludes, and those that mean nothing without one.
#[test]
fn flags_that_do_not_go_together() {
    for flag in [
        "--prompt=a",
        "--prompt-file=a",
        "--json",
        "--explain",
        "--profile",
    ] {
        let args = ["generate", "--batch", "a", flag];
        let error = <GenerateArgs as clap::Parser>::try_parse_from(args).unwrap_err();
        let name = flag.split('=').next().unwrap();
        let text = error.to_string();
        assert!(
            text.contains("'--batch <FILE>' cannot be used with") && text.contains(name),
            "{text}"
        );
    }
    let flags = [
        "--prompt",
        "a",
        "--output",
        "x",
        "--order",
        "input",
        "--max-running",
        "2",
    ];
    let refused = generate(&[&flags[..], &["--no-prefix-cache"]].concat()).refused();
    insta::assert_snapshot!(refused, @"--output, --order, --max-running, --no-prefix-cache: expected --batch FILE beside them, got none");
    let batch = Batch::new(&[json!({"prompt": "a"})], &[]);
    insta::assert_snapshot!(batch.refused(&["--memory-limit", "37MiB", "--max-new-tokens", "4000"]), @"--memory-limit 37 MiB: a KV cache of 4002 tokens in 1 sequence takes 3.1 MiB, expected at most the 1 MiB that weights (36 MiB) leave of 37 MiB: 2.1 MiB too much; 1280 tokens would fit (lower --max-running or max_new_tokens)");
}
