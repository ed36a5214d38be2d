//! Processes that run chat templates: what ends one, and what comes of it.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::chat::{CHAT, start, start_with};
use super::client::Connection;
use super::{PATIENCE, Server};

/// A conversation of one message.
fn chat(content: &str) -> Value {
    json!({"messages": [{"role": "user", "content": content}], "max_tokens": 1})
}

/// A step of a template may take long, and its client chooses for how many messages: that client alone
/// waits, and not for longer than was said.
#[test]
fn a_template_that_takes_long_holds_up_nobody_else() {
    // Each list is twice as long as the one before, and the last is counted item by item.
    let doubles = "{% set n = namespace(l=[1, 2]) %}{% if messages[0].content == 'slow' %}{% for i in range(60) %}{% set n.l = n.l + n.l %}{% endfor %}{% endif %}{{ messages[0].content }}{{ n.l | length }}";
    let (mut server, _dir) = start_with(doubles, &["--request-timeout", "1", "--grace", "1"]);
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
    let (mut server, _dir) = start_with(HOSTILE, &["--request-timeout", "8"]);
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
    endless: 504 server_error, deadline_exceeded, messages: messages: expected the chat template to take at most 8 s, waiting for others of its kind included, got more: mend the template, or shorten the messages
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

/// Waits until so many run below a server.
#[cfg(target_os = "linux")]
#[track_caller]
fn wait_for_renderers(server: &Server, count: usize) -> Vec<u32> {
    let started = Instant::now();
    loop {
        let found = renderers(server.id());
        if found.len() == count {
            return found;
        }
        assert!(started.elapsed() < PATIENCE, "{found:?}, not {count}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[cfg(target_os = "linux")]
fn kill(process: u32) {
    let status = std::process::Command::new("kill")
        .args(["-9", &process.to_string()])
        .status();
    assert!(status.unwrap().success());
}

/// None is left behind by a conversation, nor by a server that ends, however.
#[cfg(target_os = "linux")]
#[test]
fn processes_of_templates_come_and_go_with_their_work() {
    let (server, _dir) = start(HOSTILE);
    assert_eq!(renderers(server.id()), [0; 0], "none before there is work");
    assert_eq!(server.post(CHAT, &chat("a")).status, 200);
    assert_eq!(renderers(server.id()), [0; 0], "none behind it");
    let _waits = server.begin(CHAT, &chat("endless"));
    let process = wait_for_renderers(&server, 1)[0];
    kill(server.id());
    let gone = |process: u32| {
        let path = format!("/proc/{process}/stat");
        std::fs::read_to_string(path).map_or(true, |stat| stat.contains(") Z "))
    };
    let ended = (0..100).any(|_| {
        std::thread::sleep(Duration::from_millis(50));
        gone(process)
    });
    assert!(ended, "process {process} outlives its server");
}

/// The system does that where the machine lacks memory, of which neither the template nor the client is guilty.
#[cfg(target_os = "linux")]
#[test]
fn a_process_that_is_ended_from_outside_is_no_fault_of_the_client() {
    let (server, _dir) = start(HOSTILE);
    let asked = server.begin(CHAT, &chat("endless"));
    kill(wait_for_renderers(&server, 1)[0]);
    insta::assert_snapshot!(asked.answer().refusal(), @"500 server_error, step_failed, -: the process that ran the chat template was ended from outside (signal: 9 (SIGKILL)), as where the machine lacks memory: ask again");
    assert_eq!(server.post(CHAT, &chat("a")).status, 200);
}

/// Those that run hold both places, and the others wait for one: all of that ends with their clients, long
/// before the time of a rendering does.
#[cfg(target_os = "linux")]
#[test]
fn a_client_that_goes_away_frees_its_place_at_the_template() {
    let (server, _dir) = start(HOSTILE);
    for stream in [false, true] {
        let mut endless = chat("endless");
        endless["stream"] = stream.into();
        let asked: Vec<_> = (0..20).map(|_| server.begin(CHAT, &endless)).collect();
        wait_for_renderers(&server, 2);
        server.wait_for("replay_connections", 21.0);
        let started = Instant::now();
        asked.into_iter().for_each(Connection::close);
        assert_eq!(server.post(CHAT, &chat("a")).status, 200);
        let taken = started.elapsed();
        assert!(taken < Duration::from_secs(5), "{taken:?}");
        assert_eq!(renderers(server.id()), [0; 0]);
    }
    let counted = server.get("/metrics").body;
    assert!(counted.contains("status=\"499\"} 40\n"), "{counted}");
}

/// Nothing else may happen on the server afterwards that would look after its processes.
#[cfg(target_os = "linux")]
#[test]
fn a_client_that_leaves_at_once_leaves_no_dead_process() {
    let (server, _dir) = start(HOSTILE);
    for _ in 0..5 {
        let asked = server.begin(CHAT, &chat("endless"));
        while renderers(server.id()).is_empty() {}
        asked.close();
        wait_for_renderers(&server, 0);
    }
}
