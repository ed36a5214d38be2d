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

fn start(template: &str) -> (Server, TempDir) {
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

/// A step of a template may take long, and its client chooses for how many messages: that client alone
/// waits, and not for longer than was said.
#[test]
fn a_template_that_takes_long_holds_up_nobody_else() {
    // Each list is twice as long as the one before, and the last is counted item by item.
    let doubles = "{% set n = namespace(l=[1, 2]) %}{% if messages[0].content == 'slow' %}{% for i in range(60) %}{% set n.l = n.l + n.l %}{% endfor %}{% endif %}{{ messages[0].content }}{{ n.l | length }}";
    let (mut server, _dir) = start_with(doubles, &["--request-timeout", "1", "--grace", "1"]);
    let chat = |content: &str| json!({"messages": [{"role": "user", "content": content}], "max_tokens": 1});
    let slow: Vec<_> = (0..4).map(|_| server.begin(CHAT, &chat("slow"))).collect();
    let quick = json!({"prompt": "a", "max_tokens": 1});
    assert_eq!(server.complete(&quick)["usage"]["completion_tokens"], 1);
    insta::allow_duplicates! {
        for slow in slow {
            insta::assert_snapshot!(slow.answer().refusal(), @"504 server_error, deadline_exceeded, messages: messages: expected the chat template to take at most 1 s, waiting for others of its kind included, got more: mend the template, or shorten the messages");
        }
    }
    // Whoever was given up has left its place.
    let answered = server.post(CHAT, &chat("a")).json();
    assert_eq!(answered["usage"]["completion_tokens"], 1, "{answered}");
    let many: Vec<_> = (0..4097)
        .map(|_| json!({"role": "user", "content": ""}))
        .collect();
    let refused = server.post(CHAT, &json!({"messages": many})).refusal();
    insta::assert_snapshot!(refused, @"400 invalid_request_error, context_length_exceeded, messages: messages: expected at most 4096 messages, as many as the tokens that there is room for, got 4097");
    server.signal("TERM");
    assert_eq!(
        server.ended().0,
        Some(0),
        "what nobody waits for is no request"
    );
}

/// What a template does when its message says so.
const HOSTILE: &str = "{% set c = messages[0].content %}{% set n = namespace(l=[1]) %}\
    {% if c == 'itself' %}{% set n.l = n %}{{ n }}\
    {% elif c == 'deep' %}{% for i in range(99999) %}{% set n.l = [n.l] %}{% endfor %}\
    {% elif c == 'compared' %}{% for i in range(99999) %}{% set n.l = {'a': n.l} %}{% endfor %}{{ n.l == n.l }}\
    {% elif c == 'grows' %}{% for i in range(10) %}{% set n.l = n.l + ['a' * 80000000] %}{% endfor %}\
    {% elif c == 'long' %}{{ 'a' * 100000000 }}\
    {% elif c == 'endless' %}{% for i in range(60) %}{% set n.l = n.l + n.l %}{% endfor %}{{ n.l | length }}\
    {% endif %}{{ c }}";

/// A template can end the process that runs it, or fill its memory. That is no more than one request's
/// misfortune: the server goes on, also for other conversations.
#[test]
fn a_template_that_ends_its_process_ends_no_more() {
    let (mut server, _dir) = start_with(HOSTILE, &["--request-timeout", "4"]);
    let chat = |content: &str| json!({"messages": [{"role": "user", "content": content}], "max_tokens": 1});
    let told = ["itself", "deep", "compared", "grows", "long", "endless"].map(|content| {
        let refused = server.post(CHAT, &chat(content)).refusal();
        let answered = server.post(CHAT, &chat("a")).json();
        assert_eq!(
            answered["usage"]["completion_tokens"], 1,
            "{content}: {answered}"
        );
        format!("{content}: {refused}")
    });
    insta::assert_snapshot!(told.join("\n"), @r"
    itself: 400 invalid_request_error, -, messages: messages: chat_template of tokenizer_config.json ends the process that runs it (signal: 6 (SIGABRT)): expected it to nest values less deep, and to take at most 576 MiB
    deep: 400 invalid_request_error, -, messages: messages: chat_template of tokenizer_config.json ends the process that runs it (signal: 6 (SIGABRT)): expected it to nest values less deep, and to take at most 576 MiB
    compared: 400 invalid_request_error, -, messages: messages: chat_template of tokenizer_config.json ends the process that runs it (signal: 6 (SIGABRT)): expected it to nest values less deep, and to take at most 576 MiB
    grows: 400 invalid_request_error, -, messages: messages: chat_template of tokenizer_config.json ends the process that runs it (signal: 6 (SIGABRT)): expected it to nest values less deep, and to take at most 576 MiB
    long: 400 invalid_request_error, -, messages: messages: chat_template of tokenizer_config.json: expected a text of at most 64 MiB, got more
    endless: 504 server_error, deadline_exceeded, messages: messages: expected the chat template to take at most 4 s, waiting for others of its kind included, got more: mend the template, or shorten the messages
    ");
    server.signal("TERM");
    assert_eq!(server.ended().0, Some(0));
}

/// A template that cannot even be read costs its model the chat, and nobody the server.
#[test]
fn a_template_that_ends_its_process_when_it_is_read_is_no_template() {
    let long = format!("{{{{ 1{} }}}}", " + 1".repeat(50_000));
    let nested = format!("{{{{ {}1{} }}}}", "[".repeat(50_000), "]".repeat(50_000));
    for template in [long, nested] {
        let (server, _dir) = start(&template);
        let body = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1});
        let refused = server.post(CHAT, &body).refusal();
        assert!(
            refused.contains("the model's chat template cannot be used"),
            "{refused}"
        );
        let quick = json!({"prompt": "a", "max_tokens": 1});
        assert_eq!(server.complete(&quick)["usage"]["completion_tokens"], 1);
    }
}

/// The processes below a server that run its templates.
#[cfg(target_os = "linux")]
fn renderers(server: u32) -> Vec<u32> {
    let stat = |process: &str| std::fs::read_to_string(format!("/proc/{process}/stat")).ok();
    let below = std::fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let process = entry.unwrap().file_name().into_string().unwrap();
        let id: u32 = process.parse().ok()?;
        let stat = stat(&process)?;
        // Behind the name in brackets: state, parent.
        let fields = stat.rsplit_once(") ")?.1;
        (fields.split(' ').nth(1)?.parse() == Ok(server)).then_some(id)
    });
    below.collect()
}

/// What the system ends while it waits is started anew, and none is left behind by a server that ends, however.
#[cfg(target_os = "linux")]
#[test]
fn processes_of_templates_come_and_go_with_their_server() {
    let (server, _dir) = start(PLAIN);
    let body = json!({"messages": conversation(), "max_tokens": 1});
    assert_eq!(renderers(server.id()), [0; 0], "none before there is work");
    assert_eq!(server.post(CHAT, &body).status, 200);
    let [first] = renderers(server.id())[..] else {
        panic!("{:?}", renderers(server.id()));
    };
    assert_eq!(server.post(CHAT, &body).status, 200);
    assert_eq!(renderers(server.id()), [first], "it serves again");
    let kill = |process: u32| {
        let status = std::process::Command::new("kill")
            .args(["-9", &process.to_string()])
            .status();
        assert!(status.unwrap().success());
    };
    kill(first);
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert_eq!(server.post(CHAT, &body).status, 200);
    let [second] = renderers(server.id())[..] else {
        panic!("{:?}", renderers(server.id()));
    };
    assert_ne!(first, second);
    kill(server.id());
    let gone = |process: u32| {
        let path = format!("/proc/{process}/stat");
        std::fs::read_to_string(path).map_or(true, |stat| stat.contains(") Z "))
    };
    let ended = (0..100).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(50));
        gone(second)
    });
    assert!(ended, "process {second} outlives its server");
}
