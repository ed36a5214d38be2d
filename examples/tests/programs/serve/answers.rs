//! What `/v1/completions` answers: texts, whole and streamed, and what is said of them.

use serde_json::{Value, json};

use super::{Response, Server};
use crate::{generate, records};

const PROMPTS: [&str; 3] = [
    "MACBETH.\nTo-morrow, and to-morrow, and",
    "And God said, Let there be light",
    "é ü 漢",
];

/// Text, finish reason, and usage of a stream of one text; a token is a chunk.
fn streamed(response: &Response) -> (String, String, Value) {
    let mut chunks = response.chunks();
    let usage = chunks.pop().unwrap();
    assert_eq!(usage["choices"], json!([]));
    let last = chunks.pop().unwrap();
    let finish = last["choices"][0]["finish_reason"]
        .as_str()
        .unwrap()
        .to_owned();
    let mut text = String::new();
    for chunk in &chunks {
        assert!(chunk["choices"][0]["finish_reason"].is_null() && chunk["usage"].is_null());
        text += chunk["choices"][0]["text"].as_str().unwrap();
    }
    text += last["choices"][0]["text"].as_str().unwrap();
    assert_eq!(
        usage["usage"]["completion_tokens"],
        chunks.len(),
        "{chunks:?}"
    );
    (text, finish, usage["usage"].clone())
}

fn stream_of(server: &Server, mut body: Value) -> Response {
    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true});
    let response = server.post("/v1/completions", &body);
    assert_eq!(response.status, 200, "{}", response.body);
    response
}

#[test]
fn streamed_and_whole_texts_are_those_of_generate() {
    let server = Server::start(&[]);
    let mut arguments = vec!["--greedy", "--max-new-tokens", "24", "--json"];
    for prompt in PROMPTS {
        arguments.extend(["--prompt", prompt]);
    }
    let expected = records(&generate(&arguments).ok().0);
    for (prompt, expected) in PROMPTS.iter().zip(&expected) {
        let finish = expected["finish"].as_str().unwrap();
        for prompt in [json!(prompt), expected["prompt_ids"].clone()] {
            let body = json!({"prompt": prompt, "max_tokens": 24, "temperature": 0});
            let answer = server.complete(&body);
            let choice = &answer["choices"][0];
            assert_eq!(choice["text"], expected["text"], "{body}");
            assert_eq!(choice["finish_reason"], finish);
            let ids = [&expected["prompt_ids"], &expected["ids"]]
                .map(|ids| ids.as_array().unwrap().len());
            let usage = &answer["usage"];
            let counts = ["prompt_tokens", "completion_tokens", "total_tokens"]
                .map(|name| usage[name].as_u64().unwrap() as usize);
            assert_eq!(counts, [ids[0], ids[1], ids[0] + ids[1]]);
            let (text, reason, of_stream) = streamed(&stream_of(&server, body));
            assert_eq!(
                (json!(text), reason.as_str()),
                (expected["text"].clone(), finish)
            );
            assert_eq!(&of_stream, usage);
        }
    }
}

/// A stop text may begin in one token and end in another, and nothing of it may be told before it is
/// known not to be one.
#[test]
fn a_stop_text_is_not_part_of_the_text() {
    let server = Server::start(&[]);
    let body = json!({"prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0});
    let text = server.complete(&body)["choices"][0]["text"]
        .as_str()
        .unwrap()
        .to_owned();
    let chars: Vec<char> = text.chars().collect();
    for start in [0, 3, chars.len() / 2] {
        let stop: String = chars[start..start + 5].iter().collect();
        let expected = &text[..text.find(&stop).unwrap()];
        let mut body = body.clone();
        body["stop"] = json!(["no such text", stop]);
        let answer = server.complete(&body);
        assert_eq!(answer["choices"][0]["text"], expected, "{stop:?}");
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
        let (streamed, finish, usage) = streamed(&stream_of(&server, body));
        assert_eq!((streamed.as_str(), finish.as_str()), (expected, "stop"));
        assert_eq!(usage, answer["usage"]);
    }
}

/// Several texts of one request share a connection, not their numbers or their chance.
#[test]
fn texts_of_one_request_are_those_of_several() {
    let server = Server::start(&[]);
    let text = |prompt: &str, seed: u64| {
        let body = json!({"prompt": prompt, "max_tokens": 8, "temperature": 1, "seed": seed});
        server.complete(&body)["choices"][0]["text"].clone()
    };
    let prompts = &PROMPTS[..2];
    let body = json!({"prompt": prompts, "n": 2, "max_tokens": 8, "temperature": 1, "seed": 5});
    let expected =
        [(0, 5), (0, 6), (1, 5), (1, 6)].map(|(prompt, seed)| text(prompts[prompt], seed));
    let answer = server.complete(&body);
    let choices = answer["choices"].as_array().unwrap();
    for (index, (choice, expected)) in choices.iter().zip(&expected).enumerate() {
        assert_eq!(
            (&choice["index"], &choice["text"]),
            (&json!(index), expected)
        );
    }
    assert_eq!(choices.len(), 4);
    let lone = prompts.iter().map(|prompt| {
        server.complete(&json!({"prompt": prompt, "max_tokens": 0}))["usage"]["prompt_tokens"]
            .as_u64()
            .unwrap()
    });
    assert_eq!(
        answer["usage"]["prompt_tokens"],
        lone.sum::<u64>(),
        "each prompt once"
    );

    let mut texts = vec![String::new(); 4];
    for chunk in stream_of(&server, body).chunks() {
        for choice in chunk["choices"].as_array().unwrap() {
            let index = choice["index"].as_u64().unwrap() as usize;
            texts[index] += choice["text"].as_str().unwrap();
        }
    }
    assert_eq!(json!(texts), json!(expected));
}

/// The numbers of `generate --logprobs`, and places that are those of the tokens' texts.
#[test]
fn log_probabilities_and_prompts_are_told_if_asked_for() {
    let server = Server::start(&[]);
    let arguments = [
        "--greedy",
        "--max-new-tokens",
        "6",
        "--json",
        "--logprobs",
        "--prompt",
        PROMPTS[0],
    ];
    let expected = &records(&generate(&arguments).ok().0)[0];
    let numbers = |value: &Value| -> Vec<f64> {
        let list = value.as_array().into_iter().flatten();
        list.filter_map(Value::as_f64).collect()
    };
    let expected_logprobs = [
        numbers(&expected["prompt_logprobs_nats"]),
        numbers(&expected["logprobs_nats"]),
    ]
    .concat();

    let body = json!({"prompt": PROMPTS[0], "max_tokens": 6, "temperature": 0, "echo": true, "logprobs": 0});
    let answer = server.complete(&body);
    let (choice, logprobs) = (&answer["choices"][0], &answer["choices"][0]["logprobs"]);
    let text = choice["text"].as_str().unwrap();
    assert_eq!(
        text,
        format!("{}{}", PROMPTS[0], expected["text"].as_str().unwrap())
    );
    let got = numbers(&logprobs["token_logprobs"]);
    assert_eq!(
        got.len(),
        expected_logprobs.len(),
        "every token but the first has one, which is the server's"
    );
    for (got, expected) in got.iter().zip(&expected_logprobs) {
        assert!((got - expected).abs() < 1e-3, "{got}, {expected}");
    }
    let chars: Vec<char> = text.chars().collect();
    let tokens = logprobs["tokens"].as_array().unwrap();
    for (token, offset) in tokens
        .iter()
        .zip(logprobs["text_offset"].as_array().unwrap())
    {
        let (token, offset) = (token.as_str().unwrap(), offset.as_u64().unwrap() as usize);
        let there: String = chars[offset..].iter().take(token.chars().count()).collect();
        assert_eq!(there, token);
    }
    // Ids have no token before them.
    let mut ids = body.clone();
    ids["prompt"] = expected["prompt_ids"].clone();
    let of_ids = &server.complete(&ids)["choices"][0]["logprobs"]["token_logprobs"];
    assert!(
        of_ids[0].is_null() && numbers(of_ids).len() == got.len(),
        "{of_ids}"
    );
    // Part of a character is told by its bytes.
    let mut parts = body.clone();
    parts["prompt"] = json!("漢");
    let tokens = &server.complete(&parts)["choices"][0]["logprobs"]["tokens"];
    assert_eq!(tokens[0], r"bytes:\xe6", "{tokens}");

    let mut all = Vec::new();
    for chunk in stream_of(&server, body.clone()).chunks() {
        all.extend(numbers(&chunk["choices"][0]["logprobs"]["token_logprobs"]));
    }
    assert_eq!(all, got, "in chunks");
    // Only the prompt.
    let mut scored = body;
    scored["max_tokens"] = 0.into();
    let answer = server.complete(&scored);
    assert_eq!(answer["choices"][0]["text"], PROMPTS[0]);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}

/// What the second prompt finds is said in its usage and counted in the metrics.
#[test]
fn a_prompt_that_began_before_is_found() {
    let prompt = "To be, or not to be. ".repeat(60);
    let body = json!({"prompt": prompt, "max_tokens": 2, "temperature": 0});
    let cached = |answer: &Value| {
        answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap()
    };
    let server = Server::start(&[]);
    let (first, second) = (server.complete(&body), server.complete(&body));
    assert_eq!(cached(&first), 0);
    assert!(cached(&second) >= 128, "{second}");
    server.wait_for("replay_cached_tokens_total", cached(&second) as f64);
    let prompt_tokens = first["usage"]["prompt_tokens"].as_f64().unwrap();
    server.wait_for("replay_prompt_tokens_total", 2.0 * prompt_tokens);
    // Said a little later.
    server.wait_for("replay_kv_pages_used", 0.0);
    // Replay spared something, and ran something.
    assert!(
        server.metric("replay_row_layers_trimmed_total")
            > server.metric("replay_row_layers_run_total") / 10.0
    );

    let server = Server::start(&["--no-prefix-cache"]);
    server.complete(&body);
    assert_eq!(cached(&server.complete(&body)), 0);
}

#[test]
fn a_model_is_called_as_it_is_told() {
    let server = Server::start(&[]);
    let models = server.get("/v1/models").json();
    assert_eq!(models["data"][0]["id"], "v41-demo");
    let server = Server::start(&["--served-model-name", "a/b"]);
    assert_eq!(server.get("/v1/models").json()["data"][0]["id"], "a/b");
    assert_eq!(server.get("/v1/models/a%2Fb").json()["id"], "a/b");
    let body = json!({"model": "a/b", "prompt": "a", "max_tokens": 1});
    assert_eq!(server.complete(&body)["model"], "a/b");
}
