//! What `generate` refuses, and how it ends when nobody reads on.

use std::io::{self, Write};

use clap::Parser;
use clap::error::ErrorKind;
use replay_examples::generate::{GenerateArgs, run};
use replay_examples::io::{Io, is_closed_pipe};

use crate::{
    broken_demo, change, copy_of_demo, demo, demo_without_replay, generate, generate_on,
    without_first_token,
};

/// A reader that closes the pipe.
struct Closed;

impl Write for Closed {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::BrokenPipe.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_closed_pipe_ends_the_program_and_is_known_as_such() {
    for flags in [&[][..], &["--json"], &["--prompt", "b"]] {
        let demo = demo();
        let fixed = [
            "generate",
            "--model",
            &demo,
            "--max-new-tokens",
            "4",
            "--prompt",
            "a",
        ];
        let args = GenerateArgs::parse_from(fixed.iter().chain(flags));
        let (stdin, out, err) = (&mut io::empty(), &mut Closed, &mut Vec::new());
        let error = run(
            &args,
            &mut Io {
                stdin,
                out,
                err,
                watched: false,
                interrupt: None,
            },
        )
        .unwrap_err();
        assert!(is_closed_pipe(&error), "{flags:?}: {error:#}");
    }
}

#[test]
fn bad_input_is_refused_before_any_output() {
    let long = "word ".repeat(5000);
    insta::assert_snapshot!(generate(&[]).refused(), @"there is no prompt: give one with --prompt TEXT or --prompt-file PATH");
    insta::assert_snapshot!(generate(&["--prompt", ""]).refused(), @"--prompt number 1: the prompt is empty");
    insta::assert_snapshot!(generate(&["--prompt", &long]).refused(), @"--prompt number 1: the prompt has 5003 tokens, the model takes 4096 (max_position_embeddings): shorten it");
    insta::assert_snapshot!(generate(&["--prompt", "a", "--device", "cuda:0"]).refused(), @"--device cuda:0: this program was built without CUDA: build it with --features cuda");
    insta::assert_snapshot!(generate_on("no/such", &["--prompt", "a"], "").refused(), @"--model no/such: expected a directory, there is none at HERE/no/such");
    insta::assert_snapshot!(generate(&["--prompt-file", "no/such"]).refused(), @"--prompt-file no/such: cannot read HERE/no/such: No such file or directory (os error 2)");
}

/// Before the weights are read: the demo's take 36 MiB, and its cache 3 MiB for the longest text.
#[test]
fn a_run_beyond_the_memory_limit_is_refused_with_what_would_fit() {
    let refuse = |flags: &[&str]| generate(&[&["--prompt", "a"], flags].concat()).refused();
    insta::assert_snapshot!(refuse(&["--memory-limit", "1MiB"]), @"--memory-limit 1 MiB: the weights take 36 MiB, expected at most 1 MiB: 35 MiB are missing");
    insta::assert_snapshot!(refuse(&["--memory-limit", "37 MiB", "--max-new-tokens", "4000"]), @"--memory-limit 37 MiB: a KV cache of 4002 tokens in 1 sequence takes 3.1 MiB, expected at most the 1 MiB that weights (36 MiB) leave of 37 MiB: 2.1 MiB too much; 1280 tokens would fit (shorten the prompt, or lower --max-new-tokens)");
    let (text, _) = generate(&[
        "--prompt",
        "a",
        "--memory-limit",
        "1GiB",
        "--max-new-tokens",
        "1",
    ])
    .ok();
    assert!(!text.is_empty());
}

/// No flag limits the memory here, but the machine does.
#[test]
fn a_cache_beyond_the_machine_s_memory_is_refused_with_what_would_fit() {
    let dir = copy_of_demo();
    change(&dir.path().join("config.json"), |config| {
        config["text_config"]["max_position_embeddings"] = i32::MAX.into();
    });
    let model = dir.path().to_str().unwrap();
    let flags = ["--prompt", "a", "--max-new-tokens", "2000000000"];
    let refused = generate_on(model, &flags, "").refused();
    let (cache, fits) = refused.rsplit_once("; ").unwrap();
    assert!(
        cache.starts_with("--prompt number 1, 2 tokens, and --max-new-tokens 2000000000: a KV cache of 2000000002 tokens in 1 sequence needs 1.")
            && cache.contains(" TiB of memory, expected "),
        "{refused}"
    );
    let fits: u64 = fits
        .strip_suffix(" tokens would fit")
        .unwrap()
        .parse()
        .unwrap();
    assert!((1 << 20..2_000_000_000).contains(&fits), "{refused}");
}

/// What can be known of graphs without the weights, which are not even there.
#[test]
fn graphs_that_make_no_sense_are_refused_before_loading() {
    let dir = copy_of_demo();
    for file in std::fs::read_dir(dir.path()).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_some_and(|kind| kind == "safetensors") {
            std::fs::remove_file(path).unwrap();
        }
    }
    let model = dir.path().to_str().unwrap();
    let refuse = |flags: &[&str]| {
        let flags = [&["--prompt", "a"], flags].concat();
        generate_on(model, &flags, "").refused()
    };
    insta::assert_snapshot!(refuse(&["--capture-sizes", "64", "--max-captured-tokens", "32"]), @"--capture-sizes, --max-captured-tokens: graphs of steps: graph size 64 is above 32, the most rows that a graph may have");
    insta::assert_snapshot!(refuse(&["--capture-sizes", "64", "--replay-capture-sizes", "65"]), @"--replay-capture-sizes: graphs of the replay layers: graph size 65 is above 64, the most rows that a graph may have");
    insta::assert_snapshot!(refuse(&["--trim-threshold", "32"]), @"--trim-threshold 32: the trim threshold must exceed the sliding window of 32 rows, got 32");
}

/// A flag that is accepted and changes nothing looks as if it did.
#[test]
fn graph_flags_on_a_cpu_are_noted() {
    let run = |flags: &[&str]| {
        let flags = [&["--prompt", "a", "--max-new-tokens", "1"], flags].concat();
        generate(&flags).ok().1
    };
    let note = "nothing with --device cpu, which has no CUDA graphs";
    let told = run(&["--graphs", "full", "--capture-sizes", "8"]);
    assert!(
        told.starts_with(&format!("note: --graphs, --capture-sizes change {note}\n")),
        "{told}"
    );
    for flags in [&[][..], &["--graphs", "off"]] {
        let told = run(flags);
        assert!(!told.contains("note:"), "{told}");
    }
}

/// A checkpoint's recommendation that is not followed would look as if it were.
#[test]
fn recommendations_that_are_not_followed_are_noted() {
    let dir = copy_of_demo();
    change(&dir.path().join("generation_config.json"), |file| {
        file["repetition_penalty"] = 1.5.into();
    });
    let model = dir.path().to_str().unwrap();
    let flags = ["--prompt", "a", "--max-new-tokens", "1"];
    let told = generate_on(model, &flags, "").ok().1.replace(model, "DEMO");
    insta::assert_snapshot!(told.lines().next().unwrap(), @"note: DEMO/generation_config.json asks for repetition_penalty 1.5, which is not followed");
}

/// A tokenizer that has more tokens than the embedding has rows.
#[test]
fn an_id_outside_the_vocabulary_is_refused() {
    let dir = copy_of_demo();
    change(&dir.path().join("tokenizer.json"), |file| {
        let mut token = file["added_tokens"][0].clone();
        token["id"] = 2048.into();
        token["content"] = "<new>".into();
        file["added_tokens"].as_array_mut().unwrap().push(token);
    });
    let model = dir.path().to_str().unwrap();
    let refused = generate_on(model, &["--prompt", "a <new>"], "").refused_at(model);
    insta::assert_snapshot!(refused, @r#"--model: DEMO/tokenizer.json gives the token "<new>" the id 2048, expected less than the model's vocab_size (2048): tokenizer.json and config.json do not belong together"#);
}

/// A tokenizer that strips spaces, and no beginning-of-text id to stand in for a token.
#[test]
fn a_prompt_without_a_token_is_refused() {
    let dir = without_first_token();
    change(&dir.path().join("tokenizer.json"), |file| {
        file["normalizer"] =
            serde_json::json!({"type": "Strip", "strip_left": true, "strip_right": true});
    });
    let model = dir.path().to_str().unwrap();
    let flags = ["--prompt", "a", "--prompt", " "];
    insta::assert_snapshot!(generate_on(model, &flags, "").refused_at(model), @"--prompt number 2: DEMO/tokenizer.json leaves no token of a text that is not empty, expected at least 1");
}

/// Every number is one that a file may hold; together they overflow, and nothing says so but what a layer
/// makes of them.
#[test]
fn numbers_that_overflow_name_the_model() {
    let refuse = |key: &str, value: f64| {
        let dir = copy_of_demo();
        change(&dir.path().join("config.json"), |config| {
            config["text_config"][key] = value.into();
        });
        let model = dir.path().to_str().unwrap();
        let refused = generate_on(model, &["--prompt", "a b"], "").refused_at(model);
        // What follows is a backtrace, where the machine asks for one.
        refused.lines().next().unwrap().to_owned()
    };
    let what = "--model: numbers of config.json or the weights are too large to compute with";
    let why = "router chose 0 of 2 experts: its logits are not finite";
    for (key, layer) in [("routed_scaling_factor", 1), ("hc_eps", 0)] {
        assert_eq!(refuse(key, 1e30), format!("{what}: layer {layer}: {why}"));
    }
}

/// The file is read before any flag can be blamed for how tokens are chosen.
#[test]
fn a_bad_recommendation_names_the_model() {
    let refuse = |key: &str, value: serde_json::Value| {
        let dir = copy_of_demo();
        change(&dir.path().join("generation_config.json"), |file| {
            file[key] = value;
        });
        let model = dir.path().to_str().unwrap();
        generate_on(model, &["--prompt", "a"], "").refused_at(model)
    };
    insta::assert_snapshot!(refuse("top_k", (-1).into()), @"--model: DEMO/generation_config.json: top_k: expected a whole number, 0 or above, got -1");
    insta::assert_snapshot!(refuse("do_sample", "x".into()), @r#"--model: DEMO/generation_config.json: do_sample: expected true or false, got "x""#);
    insta::assert_snapshot!(refuse("temperature", (-1).into()), @"--model: DEMO/generation_config.json: temperature is -1: expected a finite number, 0 (greedy) or above");
    insta::assert_snapshot!(refuse("top_p", 0.into()), @"--model: DEMO/generation_config.json: top_p is 0: expected above 0 and at most 1");
    insta::assert_snapshot!(refuse("eos_token_id", "x".into()), @r#"
    --model: DEMO/generation_config.json breaks 1 rule:
      eos_token_id: expected a token id or a list of at most 4096, found "x"
    "#);
}

/// Even where no token is chosen.
#[test]
fn log_probabilities_of_no_numbers_are_refused() {
    let model = broken_demo();
    let model = model.path().to_str().unwrap();
    let flags = ["--prompt", "a b", "--logprobs", "--max-new-tokens", "0"];
    let refused = generate_on(model, &flags, "").refused_at(model);
    // Which of the two logits it is hangs on a sign.
    let refused = refused.replace("token 1", "token 0");
    insta::assert_snapshot!(refused, @"--model: numbers of config.json or the weights are too large to compute with: the logit of token 0 is inf: expected a number below infinity");
}

#[test]
fn a_model_that_cannot_replay_names_the_flag() {
    let model = demo_without_replay();
    let model = model.path().to_str().unwrap();
    let flags = ["--prompt", "a", "--max-new-tokens", "1"];
    insta::assert_snapshot!(generate_on(model, &flags, "").refused_at(model), @"--replay prompt-tail (off runs every model): no replay: the last KV source is layer 6, the last of the model");
    generate_on(model, &[&flags[..], &["--replay", "off"]].concat(), "").ok();
}

/// A cause is told once.
#[test]
fn a_damaged_tokenizer_is_refused_in_one_breath() {
    let dir = copy_of_demo();
    let (model, path) = (
        dir.path().to_str().unwrap(),
        dir.path().join("tokenizer.json"),
    );
    std::fs::write(&path, "{").unwrap();
    insta::assert_snapshot!(generate_on(model, &["--prompt", "a"], "").refused_at(model), @"--model: DEMO/tokenizer.json is not valid JSON (truncated?): EOF while parsing an object at line 1 column 1");
    std::fs::remove_file(&path).unwrap();
    insta::assert_snapshot!(generate_on(model, &["--prompt", "a"], "").refused_at(model), @"--model DEMO: expected a checkpoint, there is no tokenizer.json");
}

/// A summary that nobody can read takes nothing from the result.
#[test]
fn a_summary_that_cannot_be_written_is_no_error() {
    let demo = demo();
    let flags = ["--prompt", "a", "--max-new-tokens", "1", "--explain"];
    let args = ["generate", "--model", &demo].into_iter().chain(flags);
    let mut out = Vec::new();
    run(
        &GenerateArgs::parse_from(args),
        &mut Io {
            stdin: &mut io::empty(),
            out: &mut out,
            err: &mut Closed,
            watched: false,
            interrupt: None,
        },
    )
    .unwrap();
    assert!(out.ends_with(b"\n"));
}

#[test]
fn flags_out_of_range_are_refused_by_name() {
    let refuse = |flags: &[&str]| {
        let fixed = ["generate", "--prompt", "a"];
        let error = GenerateArgs::try_parse_from(fixed.iter().chain(flags)).unwrap_err();
        assert_ne!(error.kind(), ErrorKind::DisplayHelp);
        assert_eq!(error.exit_code(), 2);
        error.to_string().lines().next().unwrap().to_owned()
    };
    insta::assert_snapshot!(refuse(&["--chunk", "0"]), @"error: invalid value '0' for '--chunk <N>': expected a whole number, 1 or more");
    insta::assert_snapshot!(refuse(&["--top-p", "1.5"]), @"error: invalid value '1.5' for '--top-p <P>': top_p is 1.5: expected above 0 and at most 1");
    insta::assert_snapshot!(refuse(&["--top-k", "0"]), @"error: invalid value '0' for '--top-k <K>': expected a whole number, 1 or more");
    insta::assert_snapshot!(refuse(&["--temperature", "-1"]), @"error: invalid value '-1' for '--temperature <T>': temperature is -1: expected a finite number, 0 (greedy) or above");
    insta::assert_snapshot!(refuse(&["--top-k", "-1"]), @"error: invalid value '-1' for '--top-k <K>': expected a whole number, 1 or more");
    insta::assert_snapshot!(refuse(&["--temperature", "hot"]), @"error: invalid value 'hot' for '--temperature <T>': expected a number, such as 0.7");
    insta::assert_snapshot!(refuse(&["--seed", "18446744073709551616"]), @"error: invalid value '18446744073709551616' for '--seed <N>': expected at most 18446744073709551615");
    insta::assert_snapshot!(refuse(&["--max-new-tokens", "many"]), @"error: invalid value 'many' for '--max-new-tokens <N>': expected a whole number, 0 or more");
    insta::assert_snapshot!(refuse(&["--top-p", "-0.5"]), @"error: invalid value '-0.5' for '--top-p <P>': top_p is -0.5: expected above 0 and at most 1");
    insta::assert_snapshot!(refuse(&["--seed", "-1"]), @"error: invalid value '-1' for '--seed <N>': expected a whole number, 0 or more");
    insta::assert_snapshot!(refuse(&["--chunk", "-1"]), @"error: invalid value '-1' for '--chunk <N>': expected a whole number, 1 or more");
    insta::assert_snapshot!(refuse(&["--max-new-tokens", "-1"]), @"error: invalid value '-1' for '--max-new-tokens <N>': expected a whole number, 0 or more");
    insta::assert_snapshot!(refuse(&["--temperature", "nan"]), @"error: invalid value 'nan' for '--temperature <T>': temperature is NaN: expected a finite number, 0 (greedy) or above");
    insta::assert_snapshot!(refuse(&["--replay", "some"]), @r#"error: invalid value 'some' for '--replay <POLICY>': no replay policy is called "some": expected off, step-tail, prompt-tail or exact"#);
    insta::assert_snapshot!(refuse(&["--memory-limit", "8GB"]), @"error: invalid value '8GB' for '--memory-limit <BYTES>': expected bytes, such as 1000000000, 512MiB or 1.5GiB (units: KiB to EiB)");
    insta::assert_snapshot!(refuse(&["--device", "gpu"]), @"error: invalid value 'gpu' for '--device <DEVICE>': expected cpu, cuda or cuda:N, N the number of a GPU");
    insta::assert_snapshot!(refuse(&["--greedy", "--top-k", "3"]), @"error: the argument '--greedy' cannot be used with '--top-k <K>'");
}
