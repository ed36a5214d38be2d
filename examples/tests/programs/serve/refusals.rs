//! Every status that a client can get, and what it is told.

use serde_json::{Value, json};

use super::{Server, long};
use crate::{broken_demo, demo, without_first_token};

const PATH: &str = "/v1/completions";

#[test]
fn bad_requests_are_refused_by_their_field() {
    let server = Server::start(&[]);
    let ask = |body: &str| server.post_text(PATH, body).refusal();
    let bodies = [
        "",
        "{\"prompt\": ",
        "[]",
        "{}",
        r#"{"prompt": 5}"#,
        r#"{"prompt": []}"#,
        r#"{"prompt": [5, "a"]}"#,
        r#"{"prompt": [2048]}"#,
        r#"{"prompt": ["a", [1]]}"#,
        r#"{"prompt": "a", "model": "gpt-4"}"#,
        r#"{"prompt": "a", "model": 4}"#,
        r#"{"prompt": "a", "max_tokens": "5"}"#,
        r#"{"prompt": "a", "max_tokens": 4096}"#,
        r#"{"prompt": "a", "n": 200}"#,
        r#"{"prompt": "a", "logprobs": true}"#,
        r#"{"prompt": "a", "best_of": 2}"#,
        r#"{"prompt": "a", "suffix": "b"}"#,
        r#"{"prompt": "a", "presence_penalty": 1}"#,
        r#"{"prompt": "a", "temprature": 1}"#,
    ];
    insta::assert_snapshot!(bodies.map(ask).join("\n"), @r#"
    400 invalid_request_error, invalid_json, -: the body is not valid JSON: EOF while parsing a value at line 1 column 0
    400 invalid_request_error, invalid_json, -: the body is not valid JSON: EOF while parsing a value at line 1 column 11
    400 invalid_request_error, -, -: the body is a list: expected an object
    400 invalid_request_error, -, prompt: prompt: expected a text, got none
    400 invalid_request_error, -, prompt: prompt: expected a text, a list of texts, a list of token ids, or a list of lists of token ids, got 5
    400 invalid_request_error, -, prompt: prompt: expected 1 prompt or more, got an empty list
    400 invalid_request_error, -, prompt[1]: prompt[1]: expected a whole number, 0 or above, got "a"
    400 invalid_request_error, -, prompt: prompt: token id 2048 at index 0 is outside the vocabulary: expected less than 2048
    400 invalid_request_error, -, prompt: prompt: expected a text, a list of texts, a list of token ids, or a list of lists of token ids, got ["a",[1]]
    404 invalid_request_error, model_not_found, model: no model is called "gpt-4": expected "v41-demo"
    400 invalid_request_error, -, model: model: expected a text, got 4
    400 invalid_request_error, -, max_tokens: max_tokens: expected a whole number, 0 or above, got "5"
    400 invalid_request_error, context_length_exceeded, max_tokens: max_tokens: expected at most 4094, as the prompt takes 2 of 4096 tokens, got 4096
    400 invalid_request_error, -, n: n: expected a whole number from 1 to 128, got 200
    400 invalid_request_error, -, logprobs: logprobs: expected a whole number from 0 to 5, got true
    400 invalid_request_error, unsupported_parameter, best_of: best_of: not supported: expected 1, or no such field, got 2
    400 invalid_request_error, unsupported_parameter, suffix: suffix: not supported: expected "", or no such field, got "b"
    400 invalid_request_error, unsupported_parameter, presence_penalty: presence_penalty: not supported: expected 0, or no such field, got 1
    400 invalid_request_error, unknown_parameter, temprature: temprature: no field of this name is known
    "#);
    let long = json!({"prompt": "word ".repeat(5000)}).to_string();
    insta::assert_snapshot!(ask(&long), @"400 invalid_request_error, context_length_exceeded, prompt: prompt: the prompt has 5003 tokens: expected at most 4096");
    let far = json!({"prompt": "word ".repeat(500_000)}).to_string();
    insta::assert_snapshot!(ask(&far), @"400 invalid_request_error, context_length_exceeded, prompt: prompt: expected a text of at most 4096 tokens of 29 bytes or less, so 118784 bytes, got 2500000 bytes");
    let several = json!({"prompt": ["a", "word ".repeat(5000)]}).to_string();
    insta::assert_snapshot!(ask(&several), @"400 invalid_request_error, context_length_exceeded, prompt[1]: prompt[1]: the prompt has 5003 tokens: expected at most 4096");
    // All positions, so that none is left for what is asked for.
    for more in [
        json!({}),
        json!({"max_tokens": 1}),
        json!({"max_tokens": 5000}),
    ] {
        let mut body = json!({"prompt": vec![5; 4096]});
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        insta::allow_duplicates! {
            insta::assert_snapshot!(ask(&body.to_string()), @"400 invalid_request_error, context_length_exceeded, prompt: prompt: the prompt has 4096 tokens, and 1 or more are to follow: expected at most 4096 in all");
        }
    }
    let many = json!({"prompt": vec!["a"; 129]}).to_string();
    insta::assert_snapshot!(ask(&many), @"400 invalid_request_error, -, prompt: prompt: the request asks for 129 texts: expected at most 128");
    // None of them left anything behind.
    assert_eq!(server.metric("replay_requests_running"), 0.0);
    assert_eq!(
        server.complete(&json!({"prompt": "", "max_tokens": 1}))["usage"]["prompt_tokens"],
        1
    );
    // Nothing need follow a prompt that takes all positions.
    let whole = json!({"prompt": vec![5; 4096], "max_tokens": 0});
    assert_eq!(server.complete(&whole)["usage"]["completion_tokens"], 0);
}

/// What a batch takes (`batch::answers`).
#[test]
fn an_empty_prompt_is_its_first_token() {
    let server = Server::start(&[]);
    let text = |prompt: Value| {
        let body = json!({"prompt": prompt, "max_tokens": 8, "temperature": 0});
        server.complete(&body)["choices"][0]["text"].clone()
    };
    assert_eq!(text(json!("")), text(json!([0])));
    let dir = without_first_token();
    let without = Server::start_on(dir.path().to_str().unwrap(), &[], &[]);
    let refused = without.post(PATH, &json!({"prompt": ""}));
    insta::assert_snapshot!(refused.refusal(), @"400 invalid_request_error, -, prompt: prompt: expected 1 token or more, got none");
}

#[test]
fn paths_methods_and_types_have_their_statuses() {
    let server = Server::start(&["--max-body", "1000"]);
    let ask = |method: &str, path: &str, kind: &str, body: &str| {
        let headers = [("content-type", kind)];
        server.connect().ask(method, path, &headers, body)
    };
    let json = "application/json";
    let refusals = [
        ask("GET", "/", json, ""),
        ask("POST", "/v1/embeddings", json, "{}"),
        ask("GET", "/v1/models/gpt-4", json, ""),
        ask("GET", PATH, json, ""),
        ask("POST", "/health", json, ""),
        ask("POST", PATH, "text/plain", r#"{"prompt": "a"}"#),
        ask("POST", PATH, json, &"x".repeat(1001)),
        ask("POST", PATH, json, &"x".repeat(1_000_000)),
    ]
    .map(|response| response.refusal());
    insta::assert_snapshot!(refusals.join("\n"), @r#"
    404 invalid_request_error, unknown_url, -: nothing is at "/"
    404 invalid_request_error, unknown_url, -: nothing is at "/v1/embeddings"
    404 invalid_request_error, model_not_found, -: no model is called "gpt-4": expected "v41-demo"
    405 invalid_request_error, method_not_allowed, -: the path does not take GET
    405 invalid_request_error, method_not_allowed, -: the path does not take POST
    415 invalid_request_error, unsupported_media_type, -: content-type: expected application/json, got "text/plain"
    413 invalid_request_error, body_too_large, -: the body is too long: expected at most 1000 B
    413 invalid_request_error, body_too_large, -: the body is too long: expected at most 1000 B
    "#);
    assert_eq!(ask("GET", PATH, json, "").header("allow"), Some("post"));
    let coded = |coding: &str| {
        let headers = [("content-type", json), ("content-encoding", coding)];
        server.connect().ask(
            "POST",
            PATH,
            &headers,
            r#"{"prompt": "a", "max_tokens": 1}"#,
        )
    };
    insta::assert_snapshot!(coded("gzip").refusal(), @r#"415 invalid_request_error, unsupported_media_type, -: content-encoding: expected identity, or no such header, got "gzip""#);
    assert_eq!(coded("identity").status, 200);
    let body = r#"{"prompt": "a", "max_tokens": 1}"#;
    assert_eq!(
        ask("POST", PATH, "application/json; charset=utf-8", body).status,
        200
    );
    let mut untyped = server.connect();
    untyped.send("POST", PATH, &[], body);
    assert_eq!(untyped.answer().status, 415);

    let mut garbage = server.connect();
    garbage.send_text("what is this\r\n\r\n");
    assert!(garbage.rest().starts_with(b"HTTP/1.1 400 "));
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn a_key_is_asked_for_under_v1() {
    let of_flag = Server::start(&["--api-key", "sesame"]);
    let of_variable = Server::start_on(&demo(), &[], &[("REPLAY_API_KEY", "sesame")]);
    for server in [of_flag, of_variable] {
        let ask = |path: &str, key: &[(&str, &str)]| server.connect().ask("GET", path, key, "");
        let none = ask("/v1/models", &[]);
        assert_eq!(none.header("www-authenticate"), Some("bearer"));
        let wrong = |key: &str| ask("/v1/models", &[("authorization", key)]).refusal();
        let beginning = "401 invalid_request_error, invalid_api_key, -: ";
        let expected = "expected a key, in a header `authorization: Bearer KEY`";
        for refusal in [none.refusal(), wrong("sesame"), wrong("Basic sesame")] {
            assert_eq!(refusal, format!("{beginning}{expected}"));
        }
        for key in ["Bearer sesam", "Bearer sesamE", "Bearer  sesame", "Bearer "] {
            assert!(wrong(key).starts_with(beginning), "{key:?}");
        }
        assert_eq!(ask("/v1/nothing", &[]).status, 401);
        // A body that nobody reads is more than the system holds for a connection.
        let body = "x".repeat(16 << 20);
        let refused = server.connect().ask("POST", "/v1/completions", &[], &body);
        assert_eq!(refused.status, 401);
        for key in ["Bearer sesame", "bearer sesame"] {
            assert_eq!(ask("/v1/models", &[("authorization", key)]).status, 200);
        }
        for open in ["/health", "/metrics"] {
            assert_eq!(ask(open, &[]).status, 200);
        }
    }
}

/// In a stream, where the status is out already, it is the last event, and the end is not told.
#[test]
fn a_step_that_fails_is_the_server_s_fault() {
    let model = broken_demo();
    let mut server = Server::start_on(model.path().to_str().unwrap(), &[], &[]);
    let mut body = json!({"prompt": "a", "max_tokens": 4, "temperature": 0});
    let failed = server.post(PATH, &body);
    // Which of the two logits it is hangs on a sign.
    let failed = failed.refusal().replace("token 1", "token 0");
    insta::assert_snapshot!(failed, @"500 server_error, step_failed, -: the logit of token 0 is inf: expected a number below infinity");
    body["stream"] = true.into();
    let response = server.post(PATH, &body);
    let events = response.events();
    assert_eq!((response.status, events.len()), (200, 1), "{events:?}");
    let event: Value = serde_json::from_str(events[0]).unwrap();
    assert_eq!(event["error"]["type"], "server_error");
    server.wait_for("replay_texts_total", 2.0);
    assert_eq!(server.get("/health").status, 200, "others are served");
    // Who runs the server learns of it as well.
    let told = server.killed();
    assert_eq!(
        told.matches("error: the logit of token ").count(),
        2,
        "{told}"
    );
}

#[test]
fn a_request_that_takes_too_long_fails() {
    let server = Server::start(&["--request-timeout", "1"]);
    insta::assert_snapshot!(server.post(PATH, &long()).refusal(), @"504 server_error, deadline_exceeded, -: the request took longer than the server allows (--request-timeout)");
    server.wait_for("replay_kv_pages_used", 0.0);
}

/// A server that others can reach, and nobody meant it to.
#[test]
fn an_address_without_a_key_is_noted() {
    let told = |flags: &[&str]| Server::start(flags).killed();
    insta::assert_snapshot!(told(&["--host", "0.0.0.0"]), @"note: --host 0.0.0.0: whoever reaches it can ask; --api-key asks for a key");
    assert_eq!(told(&["--host", "0.0.0.0", "--api-key", "sesame"]), "");
    assert_eq!(told(&["--host", "localhost"]), "");
}

/// Before the weights are read.
#[test]
fn flags_that_cannot_be_are_refused() {
    let with_key = |variable: Option<&str>, flags: &[&str]| {
        let key = variable.map(|key| ("REPLAY_API_KEY", key));
        let output = crate::process::program("serve")
            .args(["--model", &demo()])
            .args(flags)
            .envs(key)
            .output()
            .unwrap();
        assert_ne!(output.status.code(), Some(0));
        let err = String::from_utf8(output.stderr).unwrap();
        err.lines().next().unwrap().to_owned()
    };
    let refuse = |flags: &[&str]| with_key(None, flags);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let text = refuse(&["--port", &port]).replace(&port, "PORT");
    insta::assert_snapshot!(text, @"error: --host 127.0.0.1, --port PORT: cannot listen at 127.0.0.1:PORT: Address already in use (os error 98)");
    for (host, port) in [
        ("127.0.0.1:80", "0"),
        ("[::1]:80", "0"),
        ("localhost:80", "0"),
    ] {
        let text = refuse(&["--port", port, "--host", host]);
        assert_eq!(
            text,
            format!("error: --host {host}: expected an address without a port, which --port says")
        );
    }
    let too_many = refuse(&["--port", "0", "--max-running", "9999999999"]);
    // Of which the last number depends on the machine.
    let (too_many, fits) = too_many.split_once(" (lower --max-running to ").unwrap();
    assert!(
        fits.trim_end_matches(')').parse::<u64>().unwrap() > 0,
        "{fits}"
    );
    insta::assert_snapshot!(too_many, @"error: --max-running 9999999999, --cache-tokens 40959999995904: a KV cache of 40959999995904 tokens in 9,999,999,999 sequences needs more rows or bytes than can be addressed; with 9,999,999,999 sequences none could be");
    insta::assert_snapshot!(refuse(&["--host", ""]), @"error: invalid value '' for '--host <ADDRESS>': expected a text that is not empty");
    insta::assert_snapshot!(refuse(&["--max-body", "0"]), @"error: invalid value '0' for '--max-body <BYTES>': expected 1 byte or more");
    insta::assert_snapshot!(refuse(&["--api-key", "a b"]), @"error: invalid value 'a b' for '--api-key <KEY>': expected letters, digits and signs of ASCII, 1 or more; left out, no key is asked for");
    // It names what is wrong, and does not show what may be all but the key.
    insta::assert_snapshot!(with_key(Some(""), &[]), @"error: invalid value '' for 'REPLAY_API_KEY': expected letters, digits and signs of ASCII, 1 or more; left out, no key is asked for");
    insta::assert_snapshot!(with_key(Some("open sesame"), &[]), @"error: invalid value '(hidden)' for 'REPLAY_API_KEY': expected letters, digits and signs of ASCII, 1 or more; left out, no key is asked for");
    insta::assert_snapshot!(with_key(Some("x"), &["--api-key", ""]), @"error: invalid value '' for '--api-key <KEY>': expected letters, digits and signs of ASCII, 1 or more; left out, no key is asked for");
    insta::assert_snapshot!(refuse(&["--port", "0", "--cache-tokens", "99999999999"]), @"error: --max-running 16, --cache-tokens 99999999999: a KV cache of 99999999999 tokens in 16 sequences needs more rows or bytes than can be addressed; 4294965248 tokens could be");
    insta::assert_snapshot!(refuse(&["--port", "65536"]), @"error: invalid value '65536' for '--port <N>': expected at most 65535");
    insta::assert_snapshot!(refuse(&["--max-connections", "65536"]), @"error: invalid value '65536' for '--max-connections <N>': expected at most 65535");
    insta::assert_snapshot!(refuse(&["--port", "0", "--memory-limit", "37MiB"]), @"error: --memory-limit 37 MiB: a KV cache of 65536 tokens in 16 sequences takes 50.9 MiB, expected at most the 1 MiB that weights (36 MiB) leave of 37 MiB: 49.9 MiB too much; none would fit (lower --cache-tokens or --max-running)");
}
