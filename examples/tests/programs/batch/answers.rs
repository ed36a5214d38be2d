//! What each request of a batch gets.

use std::num::NonZeroU32;

use clap::CommandFactory;
use deepseek_model::{
    CacheOptions, LogitRows, Model, ModelOptions, ReplayPolicy, SequenceOptions, StepRequest,
};
use replay_examples::generate::GenerateArgs;
use serde_json::{Value, json};

use super::{Batch, in_order, text};
use crate::{broken_demo, demo, generate, generate_on, records, without_first_token};

/// How many of the tokens that are chosen greedily are sure: where two are as likely, sums in another
/// order choose another.
fn sure(model: &Model, policy: ReplayPolicy, prompt: &[u32], ids: &[u32]) -> usize {
    const TIE: f32 = 1e-3;
    let options = CacheOptions {
        max_sequences: 1,
        max_tokens: prompt.len() + ids.len(),
        page_tokens: CacheOptions::PAGE_TOKENS,
        policy,
        sampled_rows: NonZeroU32::MIN,
    };
    let mut cache = model.new_cache(options).unwrap();
    let added = SequenceOptions {
        prompt_len: prompt.len(),
        keeps_rows: false,
    };
    let sequence = cache.add(added).unwrap();
    let mut tokens = prompt.to_vec();
    for (at, &id) in ids.iter().enumerate() {
        let request = StepRequest {
            sequence,
            tokens: &tokens,
            logits: LogitRows::Last,
        };
        let output = model.forward(&[request], &mut cache).unwrap();
        let row: Vec<f32> = output.logits.flatten_all().unwrap().to_vec1().unwrap();
        let most = row.iter().copied().fold(f32::MIN, f32::max);
        if row.iter().filter(|logit| most - **logit < TIE).count() > 1 {
            return at;
        }
        tokens = vec![id];
    }
    ids.len()
}

/// What a request gets is the text of `generate` with the same prompt and flags alone, whichever policies
/// are beside it and however it is chosen; a stop text cuts it.
#[test]
fn each_request_gets_what_it_gets_alone() {
    let policies = ["prompt-tail", "exact", "off"];
    let lines: Vec<Value> = (0..20)
        .map(|i| {
            let mut line = json!({
                "id": format!("request {i}"),
                "prompt": text(i * 997, 20 + (i * i * 13) % 900),
                "max_new_tokens": 3 + i % 9,
                "policy": policies[i % 3],
            });
            match i % 5 {
                1 => line["stop"] = json!(["\n", "the "]),
                2 => line["logprobs"] = true.into(),
                3 => (line["temperature"], line["seed"]) = (0.8.into(), i.into()),
                _ => {}
            }
            line
        })
        .collect();
    let fixed = ["--greedy", "--no-activation-rounding"];
    let flags = [&fixed[..], &["--no-prefix-cache", "--chunk", "300"]].concat();
    let batch = Batch::new(&lines, &[&flags[..], &["--max-running", "5"]].concat());
    let results = in_order(batch.results());
    assert_eq!(results.len(), 20);
    let options = ModelOptions {
        round_cache: false,
        ..ModelOptions::default()
    };
    let model = Model::load(demo().as_ref(), options, &|_| {}).unwrap();
    let mut stopped = 0;
    for (line, got) in lines.iter().zip(&results) {
        let value = |name: &str| match &line[name] {
            Value::String(text) => text.replace('\\', r"\\"),
            other => other.to_string(),
        };
        let [prompt, new, policy] = ["prompt", "max_new_tokens", "policy"].map(value);
        let mut flags = vec!["--json", "--prompt", &prompt, "--max-new-tokens", &new];
        flags.extend(["--replay", &policy, "--no-activation-rounding"]);
        let [temperature, seed] = ["temperature", "seed"].map(value);
        if line["seed"].is_number() {
            flags.extend(["--temperature", &temperature, "--seed", &seed]);
        } else {
            flags.push("--greedy");
        }
        if line["logprobs"] == true {
            flags.push("--logprobs");
        }
        let [want] = records(&generate(&flags).ok().0).try_into().unwrap();
        let ids = |ids: &Value| -> Vec<u32> { serde_json::from_value(ids.clone()).unwrap() };
        let (got_ids, want_ids) = (ids(&got["ids"]), ids(&want["ids"]));
        assert_eq!(got["id"], line["id"]);
        let prompt = ids(&want["prompt_ids"]);
        assert_eq!(got["prompt_tokens"], prompt.len());
        let drawn = line["seed"].is_number();
        let sure = if drawn {
            want_ids.len()
        } else {
            sure(&model, policy.parse().unwrap(), &prompt, &want_ids)
        };
        let sure = sure.min(got_ids.len());
        assert_eq!(got_ids[..sure], want_ids[..sure], "{line}");
        if got["finish"] == "stop_text" {
            stopped += 1;
            let (text, stop) = (got["text"].as_str().unwrap(), got["stop"].as_str().unwrap());
            if sure == got_ids.len() {
                let whole = want["text"].as_str().unwrap();
                assert!(whole.starts_with(&format!("{text}{stop}")), "{got} {want}");
            }
        } else {
            assert_eq!(
                (got["finish"].as_str(), got_ids.len()),
                (want["finish"].as_str(), want_ids.len())
            );
            if sure == got_ids.len() {
                assert_eq!(got["text"], want["text"]);
            }
        }
        let count = |record: &Value, field: &str| record[field].as_array().map(Vec::len);
        for field in ["prompt_logprobs_nats", "logprobs_nats"] {
            assert_eq!(count(got, field), count(&want, field), "{field}");
        }
    }
    assert!(stopped > 0, "no stop text appeared");
}

/// Prompts that begin alike are computed once, and under `exact` no text changes by that.
#[test]
fn beginnings_are_shared() {
    let lines: Vec<Value> = (0..6)
        .map(|i| json!({"prompt": text(0, 1500) + &text(4000 + 50 * i, 40)}))
        .collect();
    let flags = [
        "--greedy",
        "--replay",
        "exact",
        "--max-new-tokens",
        "2",
        "--max-running",
        "1",
    ];
    let results = in_order(Batch::new(&lines, &flags).results());
    let cached = |result: &Value| result["cached_tokens"].as_u64().unwrap();
    assert_eq!(cached(&results[0]), 0);
    assert!(
        results[1..].iter().all(|result| cached(result) > 0),
        "{results:?}"
    );
    let alone = Batch::new(&lines, &[&flags[..], &["--no-prefix-cache"]].concat());
    let alone = in_order(alone.results());
    assert!(alone.iter().all(|result| cached(result) == 0));
    let first = |results: &[Value]| -> Vec<Value> {
        results
            .iter()
            .map(|result| result["ids"][0].clone())
            .collect()
    };
    assert_eq!(first(&results), first(&alone));
}

/// What `--help` says of how long a beginning must be: the demo model has windows of 32 tokens and 12 layers,
/// 6 of them before the cut.
#[test]
fn beginnings_are_found_as_help_says() {
    let ids = |seed: usize, len: usize| (0..len).map(move |i| 3 + (seed + i * i) % 1999);
    let shared: Vec<usize> = ids(0, 640).collect();
    let mut lines = Vec::new();
    let mut expected = Vec::new();
    for policy in ["step-tail", "prompt-tail", "off", "exact"] {
        let mut add = |tokens: Vec<usize>, cached: usize| {
            expected.push((policy, cached));
            lines.push(json!({"tokens": tokens, "policy": policy, "max_new_tokens": 1}));
        };
        add(shared.clone(), 0);
        // The last is the whole prompt, of which the last token is not taken over.
        for (alike, own) in [(127, 40), (128, 40), (400, 40), (640, 40), (640, 0)] {
            let tokens = shared[..alike].iter().copied().chain(ids(7 + alike, own));
            let len = alike + own;
            let found = alike.min(len - 1) / 128 * 128;
            let spared = match policy {
                "off" => found.saturating_sub(12 * 31),
                "exact" => found
                    .saturating_sub(6 * 31)
                    .min(len.saturating_sub(12 * 31 + 1)),
                _ => found.saturating_sub(32),
            };
            add(tokens.collect(), spared);
        }
        // The cache has room for what this one may reach, and so for all pages of the others.
        expected.push((policy, 0));
        lines.push(json!({"prompt": "And", "policy": policy, "max_new_tokens": 3000, "stop": ["e", "a", "o", "t"]}));
    }
    let flags = ["--greedy", "--max-running", "1"];
    let results = in_order(Batch::new(&lines, &flags).results());
    for (result, (policy, cached)) in results.iter().zip(expected) {
        let case = format!("{policy}, line {}", result["line"]);
        assert_eq!(result["cached_tokens"], cached, "{case}");
    }
    let help = GenerateArgs::command().render_long_help().to_string();
    for rule in [
        "prompt-tail             W\n",
        "L (W - 1)\n",
        "C (W - 1), and at least the last L (W - 1) + 1",
    ] {
        assert!(help.contains(rule), "{rule}");
    }
}

/// A request that fails has a result that says so; it is the only one that does not come, and it counts at
/// the end.
#[test]
fn requests_that_fail_are_results() {
    let broken = broken_demo();
    let model = broken.path().to_str().unwrap();
    let lines = [
        json!({"prompt": "a"}),
        json!({"prompt": "b", "max_new_tokens": 0}),
    ];
    let batch = Batch::new(&lines, &["--greedy"]);
    let run = batch.run_on(model, true, &["--order", "input"]);
    let failed = run.result.unwrap_err().to_string();
    insta::assert_snapshot!(failed, @"1 of 2 requests failed: their results say why");
    let results = records(&batch.read("out.jsonl"));
    assert_eq!(results[1]["finish"], "length");
    insta::assert_snapshot!(results[0]["error"].as_str().unwrap(), @"the logit of token 0 is inf: expected a number below infinity");
    documents_every_field(&results[0]);
    // It is not tried again.
    let (_, said) = batch.run_on(model, true, &[]).ok();
    insta::assert_snapshot!(said, @"batch    2 requests: 0 answered, 2 had results before, 1 of them errors");
}

/// `--help` says what each field of a result is.
#[track_caller]
fn documents_every_field(result: &Value) {
    let help = GenerateArgs::command().render_long_help().to_string();
    let of_batch = &help[help.find("The fields of a result of --batch").unwrap()..];
    for field in result.as_object().unwrap().keys() {
        assert!(of_batch.contains(field), "--help does not name {field}");
    }
}

#[test]
fn every_field_is_documented() {
    let line = json!({"prompt": text(0, 40), "logprobs": true, "stop": ["e", "a"]});
    let [result] = Batch::new(&[line], &["--greedy"])
        .results()
        .try_into()
        .unwrap();
    assert!(result["stop"].is_string());
    documents_every_field(&result);
}

/// Lines from standard input, with ids that stand for themselves: the demo's beginning-of-text id is theirs
/// to give.
#[test]
fn requests_come_from_standard_input() {
    let lines =
        "{\"tokens\": [0, 69, 284], \"max_new_tokens\": 2}\n{\"prompt\": \"a\", \"id\": null}";
    let flags = ["--batch", "-", "--greedy", "--max-new-tokens", "1"];
    let results = in_order(records(&generate_on(&demo(), &flags, lines).ok().0));
    let fields = |result: &Value| (result["id"].clone(), result["prompt_tokens"].clone());
    assert_eq!(fields(&results[0]), (1.into(), 3.into()));
    assert_eq!(fields(&results[1]), (2.into(), 2.into()));
}

/// The model goes on from the beginning-of-text token alone. Without one there is nothing to go on from, and
/// the server says the same (`serve::refusals`).
#[test]
fn an_empty_prompt_is_its_first_token() {
    let lines = [json!({"prompt": ""}), json!({"tokens": [0]})];
    let batch = Batch::new(&lines, &["--greedy", "--max-new-tokens", "8"]);
    let results = batch.results();
    assert_eq!(results[0]["text"], results[1]["text"]);
    assert_eq!(results[0]["prompt_tokens"], 1);
    let dir = without_first_token();
    let refused = batch.run_on(dir.path().to_str().unwrap(), false, &[]);
    insta::assert_snapshot!(batch.shown(&refused.refused()), @"--batch DIR/in.jsonl line 1: prompt: expected 1 token or more, got none");
}
