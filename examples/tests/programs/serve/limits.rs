//! Clients that are too many, go away, or do not read.

use serde_json::json;

use super::{Server, long, long_stream};

const PATH: &str = "/v1/completions";

#[test]
fn a_full_queue_is_told() {
    let server = Server::start(&["--max-running", "1", "--max-waiting", "1"]);
    let _runs = server.begin(PATH, &long());
    server.wait_for("replay_requests_running", 1.0);
    let _waits = server.begin(PATH, &long());
    server.wait_for("replay_requests_waiting", 1.0);
    let refused = server.post(PATH, &json!({"prompt": "a", "max_tokens": 1}));
    insta::assert_snapshot!(refused.refusal(), @"429 rate_limit_error, queue_full, -: 2 texts run or wait already: ask again later");
    assert_eq!(refused.header("retry-after"), Some("1"));
    // More than there are ever places for is no matter of time.
    let refused = server.post(PATH, &json!({"prompt": "a", "n": 3}));
    insta::assert_snapshot!(refused.refusal(), @"400 invalid_request_error, -, n: n: the request asks for 3 texts: expected at most 2");
}

/// A request's texts come one after the other, faster than any can begin to run: those that find a
/// place at once do not count as waiting.
#[test]
fn texts_that_can_run_at_once_do_not_wait() {
    let server = Server::start(&["--max-running", "4", "--max-waiting", "1"]);
    let five = json!({"prompt": "a", "n": 5, "max_tokens": 2});
    assert_eq!(server.post(PATH, &five).status, 200);
}

/// Some texts of a request may find a place and others none: then none of them may go on.
#[test]
fn a_request_of_which_a_part_finds_no_place_leaves_nothing_behind() {
    let server = Server::start(&["--max-running", "1", "--max-waiting", "2"]);
    let runs = server.begin(PATH, &long());
    server.wait_for("replay_requests_running", 1.0);
    let waits = server.begin(PATH, &long());
    server.wait_for("replay_requests_waiting", 1.0);
    let mut two = long();
    two["n"] = 2.into();
    assert_eq!(server.post(PATH, &two).status, 429);
    server.wait_for("replay_requests_waiting", 1.0);
    runs.close();
    waits.close();
    server.wait_for("replay_requests_waiting", 0.0);
    server.wait_for("replay_requests_running", 0.0);
    server.wait_for("replay_kv_pages_used", 0.0);
}

/// More than can run, of both kinds, among others that go away.
#[test]
fn clients_at_the_same_time_get_their_own_answers() {
    // What is found in the cache, and how values are rounded there, may not decide between tokens.
    let flags = [
        "--max-running",
        "4",
        "--replay",
        "exact",
        "--no-activation-rounding",
    ];
    let server = Server::start(&flags);
    let body = |number: usize| {
        let prompt = format!("{}{number}", "To be, or not. ".repeat(number));
        json!({"prompt": prompt, "max_tokens": 3 + number, "temperature": 0})
    };
    let expected: Vec<_> = (0..8)
        .map(|number| server.complete(&body(number)))
        .collect();
    std::thread::scope(|scope| {
        for client in 0..16 {
            let (server, expected) = (&server, &expected);
            scope.spawn(move || {
                for number in (0..8).map(|turn| (turn + client) % 8) {
                    let mut body = body(number);
                    let choice = &expected[number]["choices"][0];
                    if client % 4 == 0 {
                        server.begin(PATH, &long_stream()).close();
                    } else if client % 2 == 0 {
                        assert_eq!(&server.complete(&body)["choices"][0], choice);
                    } else {
                        body["stream"] = true.into();
                        let chunks = server.post(PATH, &body).chunks();
                        let texts = chunks.iter().map(|chunk| &chunk["choices"][0]["text"]);
                        let text: String = texts.map(|text| text.as_str().unwrap()).collect();
                        assert_eq!(text, choice["text"]);
                        // One for each token, and one for the end.
                        assert_eq!(chunks.len(), 3 + number + 1);
                    }
                }
            });
        }
    });
    server.wait_for("replay_requests_running", 0.0);
    server.wait_for("replay_requests_waiting", 0.0);
    server.wait_for("replay_kv_pages_used", 0.0);
}

/// Also one that waits for an answer in one piece, of which nothing is sent that could fail.
#[test]
fn a_client_that_goes_away_cancels_its_request() {
    let server = Server::start(&[]);
    for body in [long(), long_stream()] {
        let mut connection = server.begin(PATH, &body);
        if body["stream"] == true {
            connection.read(1000);
        }
        server.wait_for("replay_requests_running", 1.0);
        connection.close();
        server.wait_for("replay_requests_running", 0.0);
        server.wait_for("replay_kv_pages_used", 0.0);
    }
    let cancelled = server.get("/metrics").body;
    assert!(
        cancelled.contains("replay_texts_total{reason=\"cancelled\"} 2\n"),
        "{cancelled}"
    );
}

/// The engine does not wait for it, and what it does not read is bounded.
#[test]
fn a_client_that_does_not_read_is_given_up_and_others_are_served() {
    let server = Server::start(&["--max-running", "4"]);
    let mut body = long_stream();
    body["n"] = 3.into();
    // Chunks of more bytes, so that fewer tokens fill what systems hold for a connection.
    body["logprobs"] = 0.into();
    let connection = server.begin(PATH, &body);
    server.wait_for("replay_requests_running", 3.0);
    server.complete(&json!({"prompt": "b", "max_tokens": 4}));
    assert_eq!(
        server.metric("replay_requests_running"),
        3.0,
        "it was not waited for"
    );
    server.wait_for("replay_requests_running", 0.0);
    assert!(server.metric("replay_generated_tokens_total") < 3.0 * 4000.0);
    // What was held for it is all that it gets.
    let read = String::from_utf8(connection.rest()).unwrap();
    assert!(
        read.contains("reader_too_slow") && !read.contains("[DONE]"),
        "{}",
        read.len()
    );
    server.wait_for("replay_connections", 1.0);
}

#[test]
fn connections_beyond_the_limit_are_told_and_closed() {
    let server = Server::start(&["--max-connections", "2"]);
    let health = |server: &Server| server.get("/health").status;
    let (first, _second) = (server.connect(), server.connect());
    let refused = server.get("/health");
    insta::assert_snapshot!(refused.refusal(), @"503 server_error, too_many_connections, -: expected at most 2 connections at a time: close some, or come again later");
    assert_eq!(refused.header("retry-after"), Some("1"));
    first.close();
    let started = std::time::Instant::now();
    while health(&server) != 200 {
        assert!(started.elapsed() < super::PATIENCE);
    }
}
