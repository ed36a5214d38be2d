//! Conversations, by a template that the demo checkpoint gets for the tests.

use serde_json::{Value, json};
use tempfile::TempDir;

use super::Server;
use crate::{change, copy_of_demo};

pub(super) const CHAT: &str = "/v1/chat/completions";

fn with_template(template: &str) -> TempDir {
    let dir = copy_of_demo();
    change(&dir.path().join("tokenizer_config.json"), |config| {
        config["chat_template"] = template.into();
    });
    dir
}

pub(super) fn start(template: &str) -> (Server, TempDir) {
    start_with(template, &[])
}

pub(super) fn start_with(template: &str, flags: &[&str]) -> (Server, TempDir) {
    let dir = with_template(template);
    let server = Server::start_on(dir.path().to_str().unwrap(), flags, &[]);
    (server, dir)
}

const PLAIN: &str = "{{ bos_token }}{% for m in messages %}{{ m.role | upper }}.\n{{ m.content }}\n\n{% endfor %}{% if add_generation_prompt %}ASSISTANT.\n{% endif %}";

fn conversation() -> Value {
    json!([
        {"role": "system", "content": "Speak in verse."},
        {"role": "user", "content": [{"type": "text", "text": "Who is there?"}]},
    ])
}

/// The same tokens as those of the text that the template makes, so that its beginning-of-text token
/// comes once, and the same answer in both forms.
#[test]
fn a_conversation_is_the_text_that_its_template_makes() {
    let (server, _dir) = start(PLAIN);
    let text = "SYSTEM.\nSpeak in verse.\n\nUSER.\nWho is there?\n\nASSISTANT.\n";
    let expected = server.complete(&json!({"prompt": text, "max_tokens": 12, "temperature": 0}));
    let mut body = json!({"messages": conversation(), "max_completion_tokens": 12, "temperature": 0, "logprobs": true});
    let answer = server.post(CHAT, &body).json();
    let choice = &answer["choices"][0];
    assert_eq!(
        choice["message"]["content"], expected["choices"][0]["text"],
        "{answer}"
    );
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!(answer["usage"], expected["usage"]);
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(answer["object"], "chat.completion");
    let logprobs = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!(logprobs.len(), 12);
    let tokens: String = logprobs
        .iter()
        .map(|token| token["token"].as_str().unwrap())
        .collect();
    assert_eq!(tokens, choice["message"]["content"].as_str().unwrap());
    let bytes = logprobs[0]["bytes"].as_array().unwrap();
    assert_eq!(bytes.len(), logprobs[0]["token"].as_str().unwrap().len());

    body["stream"] = true.into();
    let chunks = server.post(CHAT, &body).chunks();
    assert_eq!(
        chunks[0]["choices"][0]["delta"],
        json!({"role": "assistant", "content": ""})
    );
    assert_eq!(chunks[0]["object"], "chat.completion.chunk");
    let last = &chunks.last().unwrap()["choices"][0];
    assert_eq!(
        (&last["finish_reason"], &last["delta"]),
        (&json!("length"), &json!({}))
    );
    let content = chunks[1..chunks.len() - 1].iter();
    let content: Vec<&str> = content
        .map(|chunk| chunk["choices"][0]["delta"]["content"].as_str().unwrap())
        .collect();
    assert_eq!(
        (content.len(), json!(content.concat())),
        (12, choice["message"]["content"].clone())
    );

    // A template that leaves the token out gets it all the same.
    let (without, _dir) = start(&PLAIN.replace("{{ bos_token }}", ""));
    body["stream"] = false.into();
    assert_eq!(without.post(CHAT, &body).json()["usage"], answer["usage"]);
}

#[test]
fn what_a_template_or_the_server_refuses_is_told() {
    let (server, _dir) = start(
        "{% if messages[0].role != 'user' %}{{ raise_exception('a user speaks first') }}{% endif %}{{ messages[0].content }}",
    );
    let user = json!([{"role": "user", "content": "a"}]);
    let ask = |body: Value| server.post(CHAT, &body).refusal();
    let refusals = [
        json!({"messages": conversation()}),
        json!({}),
        json!({"messages": "a"}),
        json!({"messages": user, "tools": [{"type": "function", "function": {"name": "f"}}]}),
        json!({"messages": user, "response_format": {"type": "json_object"}}),
        json!({"messages": user, "prompt": "a"}),
        json!({"messages": [{"role": "user", "content": "word ".repeat(5000)}]}),
        json!({"messages": user, "max_tokens": 4096}),
    ]
    .map(ask);
    insta::assert_snapshot!(refusals.join("\n"), @r#"
    400 invalid_request_error, -, messages: messages: refused by chat_template of tokenizer_config.json: a user speaks first
    400 invalid_request_error, -, messages: messages: expected 1 message or more, got none
    400 invalid_request_error, -, messages: messages: expected a list of messages, got "a"
    400 invalid_request_error, unsupported_parameter, tools: tools: not supported: expected [], or no such field, got [{"function":{"name":"f"},"type":"function"}]
    400 invalid_request_error, unsupported_parameter, response_format: response_format: not supported: expected {"type":"text"}, or no such field, got {"type":"json_object"}
    400 invalid_request_error, unknown_parameter, prompt: prompt: no field of this name is known
    400 invalid_request_error, context_length_exceeded, messages: messages: the prompt has 5003 tokens: expected at most 4096
    400 invalid_request_error, context_length_exceeded, max_tokens: max_tokens: expected at most 4094, as the prompt takes 2 of 4096 tokens, got 4096
    "#);
    let neutral = json!({"messages": user, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "top_logprobs": 0, "max_tokens": 1});
    assert_eq!(server.post(CHAT, &neutral).status, 200);

    let plain = Server::start(&[]);
    let refused = plain.post(CHAT, &json!({"messages": user}));
    insta::assert_snapshot!(refused.refusal(), @"400 invalid_request_error, -, messages: messages: the model has no chat template: expected chat_template.jinja, or a chat_template in tokenizer_config.json, beside its weights; /v1/completions needs none");
    let (broken, dir) = start("{% for %}");
    let refused = broken.post(CHAT, &json!({"messages": user})).refusal();
    assert!(!refused.contains(dir.path().to_str().unwrap()), "{refused}");
    insta::assert_snapshot!(refused, @"400 invalid_request_error, -, messages: messages: the model's chat template cannot be used: syntax error: unexpected end of block, expected in (in chat_template:1)");
}
