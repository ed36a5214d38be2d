//! What `perplexity` measures and refuses.

use clap::{CommandFactory, Parser};
use deepseek_model::tokenizer::Tokenizer;
use replay_examples::perplexity::{PerplexityArgs, run};
use serde_json::Value;

use crate::{Run, broken_demo, demo, demo_that_rules_out, demo_without_replay, records, root};

/// The folder of texts as messages show it.
const DATA: &str = "HERE/../examples/perplexity/data";

fn data() -> String {
    root()
        .join("examples/perplexity/data")
        .display()
        .to_string()
}

fn perplexity(flags: &[&str]) -> Run {
    perplexity_on(&demo(), flags)
}

fn perplexity_on(model: &str, flags: &[&str]) -> Run {
    let text = data() + "/tempest.txt";
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
        assert!(
            (2.0..6.0).contains(&field(0, "mean_nll_nats")),
            "{scores:?}"
        );
        assert_eq!(
            (field(0, "difference_nats"), field(0, "row_layers_share")),
            (0.0, 1.0)
        );
        assert!(field(1, "difference_nats").abs() < 0.3, "{scores:?}");
        assert!(field(2, "difference_nats").abs() < 5e-3, "{scores:?}");
        assert_eq!(field(1, "rows"), 24.0);
    }
    let help = PerplexityArgs::command().render_long_help().to_string();
    for field in scores[0].as_object().unwrap().keys() {
        assert!(help.contains(field), "--help does not name {field}");
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
    let lines: Vec<_> = table.lines().collect();
    assert_eq!(lines.len(), 3, "{table}");
    assert!(lines[0].starts_with("context  policy"), "{table}");
    assert!(lines[1].contains(" 0.0000 ± n/a "), "{table}");
    assert!(
        lines[2].ends_with(", ± n/a, as one context has no standard error"),
        "{table}"
    );
}

/// A text and itself with a word changed would count as two.
#[test]
fn texts_that_are_mostly_the_same_are_noted() {
    let dir = tempfile::tempdir().unwrap();
    let edited = dir.path().join("edited.txt");
    let text = std::fs::read_to_string(data() + "/tempest.txt").unwrap();
    std::fs::write(&edited, text.replacen("Prospero", "Prospera", 1)).unwrap();
    let flags = ["--windows", "1", "--contexts", "32", "--policies", "off"];
    let both = [&["--text", edited.to_str().unwrap()][..], &flags].concat();
    let (_, err) = perplexity(&both).ok();
    assert!(
        err.starts_with("note: --text ") && err.contains("/edited.txt and --text "),
        "{err}"
    );
    assert_eq!(perplexity(&flags).ok().1, "");
}

/// The policies as `Score`s by chunk.
fn by_chunk(chunk: Option<&str>) -> Vec<Value> {
    let flags = ["--contexts", "96", "--windows", "2", "--json"];
    let policies = ["--policies", "off,step-tail,prompt-tail,exact"];
    let chunk = chunk.map(|chunk| ["--chunk", chunk]);
    let flags = [
        &flags[..],
        &policies,
        chunk.as_ref().map_or(&[], |c| &c[..]),
    ]
    .concat();
    records(&perplexity(&flags).ok().0)
}

/// In one chunk `StepTail` is `PromptTail`; in several it runs more rows, and nothing else changes.
#[test]
fn chunks_matter_to_step_tail_alone() {
    let field = |scores: &[Value], field: &str| -> Vec<f64> {
        scores
            .iter()
            .map(|score| score[field].as_f64().unwrap())
            .collect()
    };
    let whole = by_chunk(None);
    let (nlls, shares) = (
        field(&whole, "mean_nll_nats"),
        field(&whole, "row_layers_share"),
    );
    assert_eq!((nlls[1], shares[1]), (nlls[2], shares[2]));
    assert_eq!(field(&whole, "chunk_tokens"), [96.0; 4]);
    assert_eq!(by_chunk(Some("4096")), whole);

    // A last chunk of 46 rows, of one, and of fewer than are scored.
    for chunk in ["50", "95", "13"] {
        let cut = by_chunk(Some(chunk));
        assert_eq!(
            field(&cut, "chunk_tokens"),
            [chunk.parse::<f64>().unwrap(); 4]
        );
        let (cut_nlls, cut_shares) = (
            field(&cut, "mean_nll_nats"),
            field(&cut, "row_layers_share"),
        );
        for policy in [0, 2, 3] {
            let moved = (cut_nlls[policy] - nlls[policy]).abs();
            assert!(moved < 5e-3, "{chunk}: policy {policy} by {moved}");
            assert_eq!(
                cut_shares[policy], shares[policy],
                "{chunk}: policy {policy}"
            );
        }
        assert!(cut_shares[1] > shares[1], "{chunk}");
    }
}

/// The shorter contexts go well, and may have taken hours: their rows are there when the longer ones
/// fail, and none of the others.
#[test]
fn a_length_that_fails_leaves_what_was_measured() {
    let text = std::fs::read_to_string(data() + "/tempest.txt");
    let ids = Tokenizer::load(demo()).unwrap().encode(&text.unwrap());
    // The token behind the longer context, whose first is not of the text.
    let model = demo_that_rules_out(ids.unwrap()[31]);
    let model = model.path().to_str().unwrap();
    let flags = ["--windows", "1", "--last-rows", "1", "--contexts"];
    for form in [&[][..], &["--json"]] {
        let run = |lengths| perplexity_on(model, &[&flags[..], &[lengths], form].concat());
        let (alone, _) = run("16").ok();
        let failed = run("16,32");
        assert_eq!(failed.out, alone);
        let error = format!("{:#}", failed.result.unwrap_err());
        let error = error.replace(&data(), "DATA");
        insta::allow_duplicates! {
            insta::assert_snapshot!(error, @"--text DATA/tempest.txt, 32 tokens from token 0 on, policy off: --model: the negative log-likelihood of token 34 after position 31 is inf: expected a finite number");
        }
    }
}

#[test]
fn perplexity_refuses_what_it_cannot_measure() {
    insta::assert_snapshot!(perplexity(&["--contexts", "5000"]).refused(), @"--contexts 5000: expected 8 (--last-rows) to 4096 tokens (max_position_embeddings)");
    insta::assert_snapshot!(perplexity(&["--contexts", "64,4"]).refused(), @"--contexts 4: expected at least 8 tokens, as many as --last-rows scores");
    insta::assert_snapshot!(perplexity(&["--contexts", "5000", "--last-rows", "6000"]).refused(), @"--contexts 5000: expected at least 6,000 tokens, as many as --last-rows scores");
    insta::assert_snapshot!(perplexity(&["--contexts", "64,32,64"]).refused(), @"--contexts: expected each once, got 64 again");
    insta::assert_snapshot!(perplexity(&["--replay", "off,exact,off"]).refused(), @"--policies: expected each once, got off again");
    insta::assert_snapshot!(perplexity(&["--text", "no/such"]).refused(), @"--text no/such: cannot read HERE/no/such: No such file or directory (os error 2)");
}

/// With `texts` alone, and `stdin` for `-`.
fn perplexity_of(texts: &[&str], stdin: &str) -> Run {
    let demo = demo();
    let fixed = [
        "perplexity",
        "--model",
        &demo,
        "--contexts",
        "16",
        "--windows",
        "1",
    ];
    let flags = ["--policies", "off", "--text"];
    let args = [&fixed[..], &flags, texts].concat();
    let args = PerplexityArgs::try_parse_from(args).unwrap();
    Run::of(stdin, |io| run(&args, io))
}

/// It once asked for as many tokens as are scored, where a context has more; and the length of the text that
/// it asks for must do, of all contexts.
#[test]
fn a_text_of_as_many_tokens_as_are_asked_for_is_measured() {
    let text = std::fs::read_to_string(data() + "/tempest.txt").unwrap();
    let tokenizer = Tokenizer::load(demo()).unwrap();
    let of = |tokens: usize| {
        let mut prefixes = (1..2000).filter_map(|end| text.get(..end));
        let is_long = |text: &&str| tokenizer.encode(text).unwrap().len() == tokens;
        prefixes.find(is_long).unwrap()
    };
    let flags = ["--contexts", "16,40", "--windows", "3", "--policies", "off"];
    let run = |text| {
        let demo = demo();
        let fixed = ["perplexity", "--model", &demo, "--text", "-"];
        let args = PerplexityArgs::try_parse_from(fixed.iter().chain(&flags)).unwrap();
        Run::of(text, |io| run(&args, io))
    };
    insta::assert_snapshot!(run(of(7)).refused(), @"--text -: expected at least 42 tokens for 3 contexts of 40 tokens (--windows, --contexts), the first of which is the beginning-of-text token, got 7: give a longer text, or lower --contexts and --last-rows to 5");
    insta::assert_snapshot!(run(of(41)).refused(), @"--text -: expected at least 42 tokens for 3 contexts of 40 tokens (--windows, --contexts), the first of which is the beginning-of-text token, got 41: give a longer text, or lower --windows to 2, or lower --contexts to 39");
    run(of(42)).ok();
}

/// Contexts that are measured twice would count as independent.
#[test]
fn a_text_that_comes_twice_is_refused_however_it_is_spelled() {
    let dir = tempfile::tempdir().unwrap();
    let tempest = data() + "/tempest.txt";
    let copy = dir.path().join("copy.txt");
    std::fs::copy(&tempest, &copy).unwrap();
    let other = data() + "/../data/tempest.txt";
    let twice = perplexity_of(&[&tempest, &tempest], "")
        .result
        .unwrap_err()
        .to_string();
    assert_eq!(
        twice,
        format!("--text: expected each once, got {tempest} again")
    );
    for again in [&other, copy.to_str().unwrap()] {
        let refused = format!(
            "{:#}",
            perplexity_of(&[&tempest, again], "").result.unwrap_err()
        );
        let expected =
            format!("--text {again}: expected each text once, got that of --text {tempest} again");
        assert_eq!(refused, expected);
    }
}

#[test]
fn standard_input_is_a_text_as_it_is_a_prompt() {
    let text = "To be, or not to be, that is the question. ".repeat(8);
    perplexity_of(&["-"], &text).ok();
    insta::assert_snapshot!(perplexity_of(&["-"], "").refused(), @"--text -: the text is empty");
    insta::assert_snapshot!(perplexity_of(&["-"], "a").refused(), @"--text -: expected at least 16 tokens for 1 context of 16 tokens (--windows, --contexts), the first of which is the beginning-of-text token, got 1: give a longer text, or lower --contexts and --last-rows to 1");
    insta::assert_snapshot!(perplexity_of(&["-", "-"], &text).refused(), @"--text -: standard input can be read only once");
}

#[test]
fn more_windows_than_the_text_has_are_refused() {
    let refused = perplexity(&["--windows", "4294967295"]).refused();
    insta::assert_snapshot!(refused.replace(DATA, "DATA"), @"--text DATA/tempest.txt: expected at least 4,294,969,342 tokens for 4,294,967,295 contexts of 2,048 tokens (--windows, --contexts), the first of which is the beginning-of-text token, got 38,588: give a longer text, or lower --windows to 36541");
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
    let refused = refused.replace("the logit of token 1", "the logit of token 0");
    let refused = refused.replace(DATA, "DATA");
    insta::assert_snapshot!(refused, @"--text DATA/tempest.txt, 16 tokens from token 0 on, policy off: --model: numbers of config.json or the weights are too large to compute with: the logit of token 0 is inf: expected a number below infinity");
}

#[test]
fn numbers_that_cannot_be_are_refused_by_name() {
    let refuse = |flag, value| {
        let error = PerplexityArgs::try_parse_from(["perplexity", flag, value]).unwrap_err();
        error.to_string().lines().next().unwrap().to_owned()
    };
    insta::assert_snapshot!(refuse("--contexts", "-1"), @"error: invalid value '-1' for '--contexts <N>': expected a whole number, 1 or more; several are separated by commas, without blanks");
    insta::assert_snapshot!(refuse("--contexts", "128,,512"), @"error: invalid value '' for '--contexts <N>': expected a whole number, 1 or more; several are separated by commas, without blanks");
    insta::assert_snapshot!(refuse("--last-rows", "0"), @"error: invalid value '0' for '--last-rows <N>': expected a whole number, 1 or more");
    insta::assert_snapshot!(refuse("--last-rows", "4294967296"), @"error: invalid value '4294967296' for '--last-rows <N>': expected at most 4294967295");
    insta::assert_snapshot!(refuse("--windows", "0"), @"error: invalid value '0' for '--windows <N>': expected a whole number, 1 or more");
    insta::assert_snapshot!(refuse("--windows", "-1"), @"error: invalid value '-1' for '--windows <N>': expected a whole number, 1 or more");
    insta::assert_snapshot!(refuse("--chunk", "0"), @"error: invalid value '0' for '--chunk <N>': expected a whole number, 1 or more");
    insta::assert_snapshot!(refuse("--chunk", "all"), @"error: invalid value 'all' for '--chunk <N>': expected a whole number, 1 or more");
}
