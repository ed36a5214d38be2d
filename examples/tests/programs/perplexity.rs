//! What `perplexity` measures and refuses.

use clap::Parser;
use replay_examples::perplexity::{PerplexityArgs, run};

use crate::{Run, broken_demo, demo, demo_without_replay, records, root};

fn perplexity(flags: &[&str]) -> Run {
    perplexity_on(&demo(), flags)
}

fn perplexity_on(model: &str, flags: &[&str]) -> Run {
    let texts = root().join("examples/perplexity/data");
    let text = texts.join("tempest.txt").display().to_string();
    let fixed = ["perplexity", "--model", model, "--text", &text];
    let args = PerplexityArgs::try_parse_from(fixed.iter().chain(flags)).unwrap();
    Run::of("", |io| run(&args, io))
}

/// `Exact` costs nothing; the bounded policy little, and it runs few rows.
#[test]
fn policies_differ_as_they_should() {
    let (json, _) = perplexity(&["--contexts", "64,256", "--windows", "3", "--json"]).ok();
    let scores = records(&json);
    let names: Vec<_> = scores
        .iter()
        .map(|score| score["policy"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        ["off", "prompt-tail", "exact", "off", "prompt-tail", "exact"]
    );
    for scores in scores.chunks(3) {
        let field = |policy: usize, field: &str| scores[policy][field].as_f64().unwrap();
        assert!((2.0..6.0).contains(&field(0, "mean_nll")), "{scores:?}");
        assert_eq!(
            (field(0, "difference"), field(0, "row_layers_share")),
            (0.0, 1.0)
        );
        assert!(field(1, "difference").abs() < 0.3, "{scores:?}");
        assert!(field(2, "difference").abs() < 5e-3, "{scores:?}");
        assert_eq!(field(1, "rows"), 24.0);
    }
    let share = scores[4]["row_layers_share"].as_f64().unwrap();
    assert!(
        (0.5..0.6).contains(&share),
        "half the layers run 32 of 256 rows: {share}"
    );
}

#[test]
fn perplexity_prints_a_table() {
    let (table, _) = perplexity(&["--contexts", "32", "--windows", "1", "--policies", "off"]).ok();
    assert_eq!(table.lines().count(), 2, "{table}");
    assert!(table.starts_with("context  policy"), "{table}");
}

#[test]
fn perplexity_refuses_what_it_cannot_measure() {
    insta::assert_snapshot!(perplexity(&["--contexts", "5000"]).refused(), @"--contexts 5000: expected 8 (--last-rows) to 4096 tokens (max_position_embeddings)");
    insta::assert_snapshot!(perplexity(&["--contexts", "64,4"]).refused(), @"--contexts 4: expected 8 (--last-rows) to 4096 tokens (max_position_embeddings)");
    insta::assert_snapshot!(perplexity(&["--text", "no/such"]).refused(), @"--text no/such: No such file or directory (os error 2)");
}

#[test]
fn more_windows_than_the_text_has_are_refused() {
    let text = root()
        .join("examples/perplexity/data")
        .display()
        .to_string();
    let refused = perplexity(&["--windows", "4294967295"]).refused();
    insta::assert_snapshot!(refused.replace(&text, "DATA"), @"--windows 4294967295: expected at most 38461, as many different contexts of 128 tokens are in --text DATA/tempest.txt");
}

#[test]
fn a_model_that_cannot_replay_is_refused_before_the_table() {
    let model = demo_without_replay();
    let model = model.path().to_str().unwrap();
    let flags = ["--contexts", "16", "--windows", "1"];
    insta::assert_snapshot!(perplexity_on(model, &flags).refused_at(model), @"--policies prompt-tail: no replay: the last KV source is layer 6, the last of the model");
    perplexity_on(model, &[&flags[..], &["--policies", "off"]].concat()).ok();
}

#[test]
fn a_model_that_computes_no_numbers_is_refused() {
    let model = broken_demo();
    let model = model.path().to_str().unwrap();
    let flags = ["--contexts", "16", "--windows", "1"];
    let refused = perplexity_on(model, &flags).refused_at(model);
    // Which of the two logits it is hangs on a sign.
    let refused = refused.replace("token 1", "token 0");
    insta::assert_snapshot!(refused, @"the logit of token 0 is inf: expected a number below infinity");
}

#[test]
fn negative_numbers_are_refused_by_name() {
    let refuse = |flag| {
        let error = PerplexityArgs::try_parse_from(["perplexity", flag, "-1"]).unwrap_err();
        error.to_string().lines().next().unwrap().to_owned()
    };
    insta::assert_snapshot!(refuse("--contexts"), @"error: invalid value '-1' for '--contexts <N>': invalid digit found in string");
    insta::assert_snapshot!(refuse("--last-rows"), @"error: invalid value '-1' for '--last-rows <N>': invalid digit found in string");
    insta::assert_snapshot!(refuse("--windows"), @"error: invalid value '-1' for '--windows <N>': invalid digit found in string");
}
