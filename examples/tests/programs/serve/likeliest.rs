//! The likeliest tokens beside those that were chosen, against logits that a model gives alone.

use std::collections::HashMap;
use std::num::NonZeroU32;

use deepseek_model::tokenizer::Tokenizer;
use deepseek_model::{
    CacheOptions, LogitRows, Model, ModelOptions, ReplayPolicy, SequenceOptions, StepRequest,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::Server;
use super::chat::{CHAT, start_with};
use crate::demo;

const FLAGS: [&str; 4] = [
    "--replay",
    "off",
    "--no-activation-rounding",
    "--no-prefix-cache",
];
const NEW: usize = 6;

/// What a place of a text must be told with: the tokens' log-probabilities by their spelling, the likeliest
/// first.
struct Place {
    /// The token that stands there.
    there: (String, f64),
    sorted: Vec<f64>,
    by_text: HashMap<String, f64>,
}

/// A prompt of text with its greedy continuation, computed step by step without an engine.
fn alone(text: &str) -> (usize, Vec<Place>) {
    let options = ModelOptions {
        round_cache: false,
        ..ModelOptions::default()
    };
    let model = Model::load(demo().as_ref(), options, &|_| {}).unwrap();
    let tokenizer = Tokenizer::load(demo()).unwrap();
    let mut ids = vec![model.config().bos_token_id.unwrap()];
    ids.extend(tokenizer.encode(text).unwrap());
    let prompt_len = ids.len();
    let options = CacheOptions {
        max_sequences: 1,
        max_tokens: prompt_len + NEW,
        page_tokens: CacheOptions::PAGE_TOKENS,
        policy: ReplayPolicy::Off,
        sampled_rows: NonZeroU32::MIN,
    };
    let mut cache = model.new_cache(options).unwrap();
    let added = SequenceOptions {
        prompt_len,
        keeps_rows: true,
    };
    let sequence = cache.add(added).unwrap();
    let (mut rows, mut done) = (Vec::<Vec<f32>>::new(), 0);
    while ids.len() < prompt_len + NEW {
        let request = StepRequest {
            sequence,
            tokens: &ids[done..],
            logits: LogitRows::All,
        };
        let output = model.forward(&[request], &mut cache).unwrap();
        rows.extend(output.logits.to_vec2::<f32>().unwrap());
        done = ids.len();
        let last = rows.last().unwrap().iter().enumerate();
        let best = last.max_by(|a, b| a.1.total_cmp(b.1)).unwrap();
        ids.push(best.0 as u32);
    }
    let spelled = |id: u32| {
        let text = tokenizer.decode(&[id]).unwrap();
        match tokenizer.bytes(id) {
            Some(bytes) if std::str::from_utf8(&bytes).is_err() => {
                let spelled: Vec<String> = bytes.iter().map(|b| format!("\\x{b:02x}")).collect();
                format!("bytes:{}", spelled.concat())
            }
            _ => text,
        }
    };
    let texts: Vec<String> = (0..rows[0].len() as u32).map(spelled).collect();
    let place = |(row, id): (&Vec<f32>, &u32)| {
        let sum: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum();
        let logprobs: Vec<f64> = row.iter().map(|l| f64::from(*l) - sum.ln()).collect();
        let id = *id as usize;
        let mut sorted = logprobs.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        Place {
            there: (texts[id].clone(), logprobs[id]),
            sorted,
            by_text: texts.iter().cloned().zip(logprobs).collect(),
        }
    };
    (prompt_len, rows.iter().zip(&ids[1..]).map(place).collect())
}

impl Place {
    /// Checks what was told of this place, in the order in which it was told.
    #[track_caller]
    fn check<'t>(&self, most: usize, told: impl Iterator<Item = (&'t str, f64)>) {
        let told: Vec<_> = told.collect();
        assert_eq!(told.len(), most, "{told:?}");
        // Where two all but tie, either may come first.
        let close = |a: f64, b: f64| (a - b).abs() < 1e-3;
        for (&(text, logprob), want) in told.iter().zip(&self.sorted) {
            let own = self.by_text[text];
            assert!(close(logprob, *want) && close(logprob, own), "{told:?}");
        }
        let mut texts: Vec<_> = told.iter().map(|(text, _)| text).collect();
        texts.sort();
        texts.dedup();
        assert_eq!(texts.len(), most, "each once: {told:?}");
    }
}

/// Of a completion they are an object for each place, in which the token that stands there is always: one
/// that is none of the likeliest is one more.
#[test]
fn a_completion_tells_the_likeliest_tokens_and_the_chosen_one() {
    const MOST: usize = 5;
    let text = "MACBETH.\nTo-morrow, and 漢";
    let (prompt_len, places) = alone(text);
    let server = Server::start(&FLAGS);
    // What is chosen is greedy all the same.
    let mut body = json!({"prompt": text, "max_tokens": NEW, "temperature": 3, "top_k": 1, "echo": true, "logprobs": MOST});
    let whole = server.complete(&body)["choices"][0]["logprobs"].clone();
    let list = |field: &str| whole[field].as_array().unwrap();
    let (tokens, top) = (list("tokens"), list("top_logprobs"));
    assert_eq!(tokens.len(), prompt_len - 1 + NEW);
    let mut unlikely = 0;
    for ((place, token), top) in places.iter().zip(tokens).zip(top) {
        assert_eq!(*token, place.there.0);
        let mut told: Vec<(&str, f64)> = top
            .as_object()
            .unwrap()
            .iter()
            .map(|(text, logprob)| (text.as_str(), logprob.as_f64().unwrap()))
            .collect();
        told.sort_by(|a, b| b.1.total_cmp(&a.1));
        let there = told.iter().find(|(text, _)| *text == place.there.0);
        assert!((there.unwrap().1 - place.there.1).abs() < 1e-3, "{told:?}");
        if told.len() > MOST {
            assert_eq!(told.pop().unwrap().0, place.there.0);
            unlikely += 1;
        }
        place.check(MOST, told.into_iter());
    }
    assert!(unlikely > 0, "a prompt has unlikely tokens");

    body["stream"] = true.into();
    let mut streamed =
        json!({"tokens": [], "token_logprobs": [], "text_offset": [], "top_logprobs": []});
    for chunk in server.post("/v1/completions", &body).chunks() {
        for (field, all) in streamed.as_object_mut().unwrap() {
            let part = &chunk["choices"][0]["logprobs"][field];
            let part = part.as_array().into_iter().flatten().cloned();
            all.as_array_mut().unwrap().extend(part);
        }
    }
    assert_eq!(streamed, whole);
    // Token ids begin with one that nothing is before.
    let ids = json!({"prompt": [5, 6], "max_tokens": 0, "echo": true, "logprobs": 1});
    let answer = server.complete(&ids);
    let of_first = &answer["choices"][0]["logprobs"]["top_logprobs"][0];
    assert!(of_first.is_null(), "{answer}");
    // None are asked for.
    body["stream"] = false.into();
    body["logprobs"] = 0.into();
    let of_none = &server.complete(&body)["choices"][0]["logprobs"];
    assert!(of_none["top_logprobs"].is_null(), "{of_none}");
}

/// Of a chat they are a list, the likeliest first.
#[test]
fn a_chat_tells_the_likeliest_tokens_in_order() {
    const MOST: usize = 20;
    let (server, _dir): (Server, TempDir) = start_with("{{ messages[0].content }}", &FLAGS);
    let text = "MACBETH.\nTo-morrow, and";
    let (prompt_len, places) = alone(text);
    let messages = json!([{"role": "user", "content": text}]);
    let mut body = json!({"messages": messages, "max_tokens": NEW, "temperature": 0, "logprobs": true, "top_logprobs": MOST});
    let answer = server.post(CHAT, &body).json();
    let whole = answer["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap();
    assert_eq!(whole.len(), NEW);
    for (place, token) in places[prompt_len - 1..].iter().zip(whole) {
        assert_eq!(token["token"], place.there.0);
        let told = token["top_logprobs"].as_array().unwrap();
        // What is chosen greedily is the likeliest, and told with the same fields.
        let first = &told[0];
        for field in ["token", "logprob", "bytes"] {
            assert_eq!(first[field], token[field]);
        }
        let told = told.iter().map(|one| {
            (
                one["token"].as_str().unwrap(),
                one["logprob"].as_f64().unwrap(),
            )
        });
        place.check(MOST, told);
    }
    body["stream"] = true.into();
    let mut streamed = Vec::new();
    for chunk in server.post(CHAT, &body).chunks() {
        let part = &chunk["choices"][0]["logprobs"]["content"];
        streamed.extend(part.as_array().into_iter().flatten().cloned());
    }
    assert_eq!(&streamed, whole);
}

/// The bounds of OpenAI's interface, and a number without what it belongs to.
#[test]
fn how_many_can_be_asked_for() {
    let (server, _dir) = start_with("{{ messages[0].content }}", &[]);
    let chat = |logprobs: Value, most: i32| {
        let messages = json!([{"role": "user", "content": "a"}]);
        let body = json!({"messages": messages, "max_tokens": 1, "logprobs": logprobs, "top_logprobs": most});
        server.post(CHAT, &body)
    };
    let completion = json!({"prompt": "a", "max_tokens": 1, "logprobs": 6});
    let refusals = [
        server.post("/v1/completions", &completion).refusal(),
        chat(true.into(), 21).refusal(),
        chat(true.into(), -1).refusal(),
        chat(false.into(), 1).refusal(),
        chat(Value::Null, 20).refusal(),
    ];
    insta::assert_snapshot!(refusals.join("\n"), @r"
    400 invalid_request_error, -, logprobs: logprobs: expected a whole number from 0 to 5, got 6
    400 invalid_request_error, -, top_logprobs: top_logprobs: expected a whole number from 0 to 20, got 21
    400 invalid_request_error, -, top_logprobs: top_logprobs: expected a whole number from 0 to 20, got -1
    400 invalid_request_error, -, top_logprobs: top_logprobs: expected logprobs to be true beside it, or 0, got 1
    400 invalid_request_error, -, top_logprobs: top_logprobs: expected logprobs to be true beside it, or 0, got 20
    ");
    assert_eq!(chat(Value::Null, 0).status, 200);
}
