//! What `generate` prints.

use clap::CommandFactory;
use deepseek_model::tokenizer::Tokenizer;
use replay_examples::generate::GenerateArgs;
use serde_json::Value;

use crate::{change, copy_of_demo, demo, generate, generate_on, records, root};

const MACBETH: &str = r"MACBETH.\nTo-morrow, and to-morrow, and";

#[test]
fn a_single_prompt_streams_the_text_that_json_holds() {
    let flags = ["--prompt", MACBETH, "--max-new-tokens", "12", "--greedy"];
    let (text, summary) = generate(&flags).ok();
    let (json, _) = generate(&[&flags[..], &["--json"]].concat()).ok();
    let [record] = records(&json).try_into().unwrap();
    assert_eq!(format!("{}\n", record["text"].as_str().unwrap()), text);
    assert_eq!(record["prompt"], "MACBETH.\nTo-morrow, and to-morrow, and");
    assert_eq!(
        record["prompt_ids"][0], 0,
        "the beginning-of-text id comes first"
    );
    assert_eq!(record["ids"].as_array().unwrap().len(), 12);
    assert_eq!(record["finish"], "length");
    assert_eq!(record.get("logprobs_nats"), None);
    let names: Vec<_> = summary
        .lines()
        .map(|line| line.split_whitespace().next())
        .collect();
    let lines = ["prefill", "decode", "replay", "steps"];
    assert_eq!(names, lines.map(Some));
}

#[test]
fn a_batch_gives_each_prompt_what_it_gets_alone() {
    let flags = ["--max-new-tokens", "8", "--greedy", "--json"];
    let run = |prompts: &[&str]| records(&generate(&[&flags[..], prompts].concat()).ok().0);
    let batch = run(&["--prompt", "And God said", "--prompt", MACBETH]);
    let alone = [
        run(&["--prompt", "And God said"]),
        run(&["--prompt", MACBETH]),
    ]
    .concat();
    let text = |records: &[Value]| {
        let mut records = records.to_vec();
        records.sort_by_key(|record| record["index"].as_u64());
        records
            .iter()
            .map(|record| record["text"].clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        text(&batch),
        [text(&alone[..1]), text(&alone[1..])].concat()
    );
}

#[test]
fn several_prompts_come_under_headings() {
    let flags = [
        "--prompt",
        "And God said",
        "--prompt-file",
        "-",
        "--max-new-tokens",
        "3",
    ];
    let (text, _) = generate_on(&demo(), &flags, "ROMEO.\nO, ").ok();
    let headings: Vec<_> = text
        .lines()
        .filter(|line| line.starts_with("==="))
        .collect();
    assert_eq!(headings.len(), 2, "{text}");
    assert!(
        headings.contains(&r#"=== 2 of 2, standard input: "ROMEO.\nO, ""#),
        "{text}"
    );
}

#[test]
fn a_seed_decides_what_is_drawn() {
    let draw = |seed| {
        let flags = [
            "--prompt",
            "The ",
            "--max-new-tokens",
            "16",
            "--temperature",
            "1",
            "--seed",
        ];
        generate(&[&flags[..], &[seed]].concat()).ok().0
    };
    assert_eq!(draw("1"), draw("1"));
    assert_ne!(draw("1"), draw("2"));
}

#[test]
fn log_probabilities_cover_prompt_and_output() {
    let flags = [
        "--prompt",
        "And God said",
        "--max-new-tokens",
        "4",
        "--greedy",
        "--logprobs",
    ];
    let (json, _) = generate(&[&flags[..], &["--json"]].concat()).ok();
    let [record] = records(&json).try_into().unwrap();
    let count = |field: &str| record[field].as_array().unwrap().len();
    assert_eq!(count("prompt_logprobs_nats"), count("prompt_ids"));
    assert_eq!(record["prompt_logprobs_nats"][0], Value::Null);
    assert!(record["prompt_logprobs_nats"][1].as_f64().unwrap() < 0.0);
    assert_eq!((count("logprobs_nats"), count("ids")), (4, 4));
    documents_every_field(&record);

    let (text, _) = generate(&flags).ok();
    let table: Vec<_> = text
        .lines()
        .skip_while(|line| !line.starts_with("log-probability, in nats, of each token"))
        .collect();
    assert!(
        table[1].ends_with("  \"<｜begin▁of▁sentence｜>\""),
        "{text}"
    );
    assert!(table.len() > 5 + count("ids"), "{text}");
}

fn documents_every_field(record: &Value) {
    let help = GenerateArgs::command().render_long_help().to_string();
    for field in record.as_object().unwrap().keys() {
        assert!(help.contains(field), "--help does not name {field}");
    }
}

/// A cap that nobody sees would be a wrong answer, were it to change one. Sums run in another order, so that
/// log-probabilities differ in their last bits.
#[test]
fn the_smaller_chunks_of_log_probabilities_change_nothing() {
    let prompt = "It is the hour of day. ".repeat(100);
    let run = |chunk| {
        let flags = ["--logprobs", "--json", "--max-new-tokens", "2", "--greedy"];
        let exact = ["--no-activation-rounding", "--prompt", &prompt];
        let flags = [&flags[..], &exact, &["--chunk", chunk]].concat();
        let [mut record] = records(&generate(&flags).ok().0).try_into().unwrap();
        record["time_to_first_token_s"] = Value::Null;
        let logprobs = ["prompt_logprobs_nats", "logprobs_nats"].map(|name| record[name].take());
        let logprobs = logprobs.iter().flat_map(|list| list.as_array().unwrap());
        let logprobs: Vec<_> = logprobs.map(Value::as_f64).collect();
        (record, logprobs)
    };
    let ((record, whole), (of_chunks, in_chunks)) = (run("8192"), run("512"));
    assert!(record["prompt_ids"].as_array().unwrap().len() > 512);
    assert_eq!(record, of_chunks);
    assert_eq!(whole.len(), in_chunks.len());
    for (index, pair) in whole.iter().zip(&in_chunks).enumerate() {
        match pair {
            (Some(a), Some(b)) => assert!((a - b).abs() < 1e-3, "{index}: {a} and {b}"),
            pair => assert_eq!(pair, (&None, &None), "{index}"),
        }
    }
}

/// Not even an empty line; but what was asked for beside the text.
#[test]
fn no_new_tokens_print_no_text() {
    let flags = ["--max-new-tokens", "0", "--prompt", "And God said"];
    assert_eq!(generate(&flags).ok().0, "");
    let two = [&flags[..], &["--prompt", MACBETH]].concat();
    assert_eq!(generate(&two).ok().0, "");

    let first = |flags: &[&str]| {
        let (text, _) = generate(&[flags, &["--logprobs"]].concat()).ok();
        text.lines().take(2).map(str::to_owned).collect::<Vec<_>>()
    };
    let title = "log-probability, in nats, of each token";
    assert!(first(&flags)[0].starts_with(title));
    assert!(first(&two)[0].starts_with("===") && first(&two)[1].starts_with(title));
}

/// The first token of a text comes with its prefill; the summary says so.
#[test]
fn the_summary_counts_every_token_that_was_chosen() {
    let flags = [
        "--max-new-tokens",
        "3",
        "--greedy",
        "--prompt",
        "And God said",
    ];
    let (_, summary) = generate(&flags).ok();
    let decode = summary.lines().nth(1).unwrap();
    assert!(decode.starts_with("decode   2 of 3 tokens"), "{summary}");
    assert!(
        decode.ends_with("; the other came with the prefill"),
        "{summary}"
    );
}

/// A text that stops in the middle of a sentence, with no word about it, looks like a fault.
#[test]
fn a_text_that_ends_at_the_last_position_says_so() {
    let dir = copy_of_demo();
    change(&dir.path().join("config.json"), |config| {
        config["text_config"]["max_position_embeddings"] = 40.into();
    });
    let model = dir.path().to_str().unwrap();
    let flags = ["--greedy", "--prompt", "a", "--prompt", MACBETH];
    let end = |n| [&flags[..], &["--max-new-tokens", n]].concat();
    let (_, summary) = generate_on(model, &end("100"), "").ok();
    let line = summary.lines().find(|line| line.starts_with("ended"));
    insta::assert_snapshot!(line.unwrap(), @"ended    2 of 2 texts at the last of the model's 40 positions (max_position_embeddings)");
    let (_, summary) = generate_on(model, &end("2"), "").ok();
    assert!(!summary.contains("ended"), "{summary}");
}

#[test]
fn a_special_token_can_be_spelled_in_a_prompt() {
    let flags = ["--json", "--max-new-tokens", "0"];
    let flags = [&flags[..], &["--prompt", r"a<｜end▁of▁sentence｜>\n\d"]].concat();
    let [record] = records(&generate(&flags).ok().0).try_into().unwrap();
    assert_eq!(record["prompt"], "a<｜end▁of▁sentence｜>\n\\d");
    let ids = record["prompt_ids"].as_array().unwrap();
    assert!(ids.contains(&Value::from(1)), "{ids:?}");
}

/// The bounded policy runs a window of rows in the six layers from the cut on.
#[test]
fn explain_draws_the_rows_that_ran() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prompt");
    std::fs::write(&file, "word ".repeat(300)).unwrap();
    let flags = [
        "--max-new-tokens",
        "0",
        "--explain",
        "--prompt-file",
        file.to_str().unwrap(),
    ];
    let (text, err) = generate(&flags).ok();
    assert_eq!(text, "");
    let lines: Vec<&str> = err
        .lines()
        .filter(|line| line.starts_with("layer"))
        .collect();
    let rows: Vec<_> = lines
        .iter()
        .map(|line| line.rsplit("│ ").next().unwrap())
        .collect();
    assert_eq!(lines.len(), 3, "{err}");
    assert!(
        lines[0].starts_with("layers  0-5  │███") && lines[1].contains("░░▐██"),
        "{err}"
    );
    assert_eq!(rows[1..], ["32 rows", "32 rows"], "{err}");
    assert!(err.contains("replay   prompt-tail: "), "{err}");
    // What a CPU does not set apart has no row.
    let table = err.split("\n\n").find(|part| part.starts_with("weights"));
    let names = table.expect(&err).lines().map(|line| &line[..9]);
    assert_eq!(names.collect::<Vec<_>>(), ["weights  ", "KV cache "]);
}

/// Chunks change neither the text nor the rows that run.
#[test]
fn chunks_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prompt");
    std::fs::write(&file, "It is the hour of day. ".repeat(20)).unwrap();
    let run = |chunk| {
        let file = file.to_str().unwrap();
        let flags = [
            "--prompt-file",
            file,
            "--greedy",
            "--max-new-tokens",
            "8",
            "--json",
            "--chunk",
            chunk,
        ];
        let (json, _) = generate(&[&flags[..], &["--no-activation-rounding"]].concat()).ok();
        let [mut record] = records(&json).try_into().unwrap();
        record["time_to_first_token_s"] = Value::Null;
        record
    };
    assert_eq!(run("50"), run("8192"));
}

/// The reference's greedy continuation of 599 tokens of The Tempest, with a replayed prefill and
/// without.
#[test]
fn the_reference_s_continuations_come_out() {
    let bytes =
        std::fs::read(root().join("crates/deepseek-model/tests/data/demo-expected.safetensors"));
    let bytes = bytes.unwrap();
    let expected = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let ids = |name: &str| -> Vec<i64> {
        let words = expected.tensor(name).unwrap().data().as_chunks().0;
        words.iter().map(|word| i64::from_le_bytes(*word)).collect()
    };
    let prompt: Vec<u32> = ids("tokens")[1..].iter().map(|id| *id as u32).collect();
    let text = Tokenizer::load(demo()).unwrap().decode(&prompt).unwrap();

    for (policy, name) in [
        ("off", "off"),
        ("prompt-tail", "bounded"),
        ("exact", "exact"),
    ] {
        let flags = [
            "--prompt-file",
            "-",
            "--greedy",
            "--max-new-tokens",
            "48",
            "--json",
            "--replay",
            policy,
        ];
        let flags = [&flags[..], &["--no-activation-rounding"]].concat();
        let [record] = records(&generate_on(&demo(), &flags, &text).ok().0)
            .try_into()
            .unwrap();
        assert_eq!(record["prompt_ids"], serde_json::json!(ids("tokens")));
        assert_eq!(
            record["ids"],
            serde_json::json!(ids(&format!("plain.{name}.ids"))),
            "{policy}"
        );
    }
}
