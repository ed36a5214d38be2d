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
    insta::assert_snapshot!(refused.refusal(), @"429 rate_limit_error, queue_full, -: expected at most 2 texts that run or wait, got 1 more than the 2 that do: ask again later");
    assert_eq!(refused.header("retry-after"), Some("1"));
    // More than there are ever places for is no matter of time.
    let refused = server.post(PATH, &json!({"prompt": "a", "n": 3}));
    insta::assert_snapshot!(refused.refusal(), @"400 invalid_request_error, -, n: n: expected a whole number from 1 to 2, got 3");
    // Also where as many are allowed elsewhere.
    let refused = server.post(PATH, &json!({"prompt": "a", "n": 200}));
    insta::assert_snapshot!(refused.refusal(), @"400 invalid_request_error, -, n: n: expected a whole number from 1 to 2, got 200");
    let refused = server.post(PATH, &json!({"prompt": ["a", "b", "c"]}));
    insta::assert_snapshot!(refused.refusal(), @"400 invalid_request_error, -, prompt: prompt: the request asks for 3 texts: expected at most 2");
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
    // Nor may they hold places for a moment, which others find taken.
    for _ in 0..20 {
        assert_eq!(server.post(PATH, &two).status, 429);
        assert_eq!(server.metric("replay_requests_waiting"), 1.0);
    }
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
    // Also behind bytes that belong to no request yet.
    let mut connection = server.begin(PATH, &long());
    connection.send_text("\r\n");
    server.wait_for("replay_requests_running", 1.0);
    connection.close();
    server.wait_for("replay_requests_running", 0.0);
    let cancelled = server.get("/metrics").body;
    assert!(
        cancelled.contains("replay_texts_total{reason=\"cancelled\"} 3\n"),
        "{cancelled}"
    );
}

/// A place in the queue is not held for somebody who is gone, though nothing is sent that could fail.
#[test]
fn a_client_that_goes_away_leaves_the_queue() {
    let server = Server::start(&["--max-running", "1"]);
    let _runs = server.begin(PATH, &long());
    server.wait_for("replay_requests_running", 1.0);
    for body in [long(), long_stream()] {
        let waits = server.begin(PATH, &body);
        server.wait_for("replay_requests_waiting", 1.0);
        waits.close();
        server.wait_for("replay_requests_waiting", 0.0);
    }
    assert_eq!(
        server.metric("replay_requests_running"),
        1.0,
        "the first runs still"
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
    // It was not waited for. The gauge follows the answer by a moment.
    server.wait_for("replay_requests_running", 3.0);
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
    let models = |server: &Server| server.get("/v1/models").status;
    let (first, _second) = (server.connect(), server.connect());
    let refused = server.get("/v1/models");
    insta::assert_snapshot!(refused.refusal(), @"503 server_error, too_many_connections, -: expected at most 2 connections at a time: close some, or come again later");
    assert_eq!(refused.header("retry-after"), Some("1"));
    // A body too, whatever its length, does not keep it from being read.
    let body = json!({"prompt": "a ".repeat(1 << 20)});
    assert_eq!(server.post(PATH, &body).status, 503);
    first.close();
    let started = std::time::Instant::now();
    while models(&server) != 200 {
        assert!(started.elapsed() < super::PATIENCE);
    }
}

/// Who watches the server would take it for dead, and start it anew.
#[test]
fn health_and_metrics_answer_while_others_hold_all_connections() {
    let server = Server::start(&["--max-connections", "2"]);
    let mut held = [server.connect(), server.connect()];
    for connection in &mut held {
        let head = "content-type: application/json\r\ncontent-length: 100\r\n\r\n{";
        connection.send_text(&format!("POST {PATH} HTTP/1.1\r\nhost: here\r\n{head}"));
    }
    server.wait_for("replay_connections", 2.0);
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.get("/v1/models").status, 503);
    // One that says nothing does not stay.
    let silent: Vec<_> = (0..70).map(|_| server.connect()).collect();
    for connection in silent {
        assert_eq!(connection.rest(), b"");
    }
    assert_eq!(server.get("/health").status, 200);
    // Of 70 some had one of the 64 spare places, and those that had none left no other trace.
    let counted = server.get("/metrics").body;
    let of = |place: &str| -> u64 {
        let sample = format!("replay_connections_turned_away_total{{place=\"{place}\"}} ");
        let value = counted.lines().find_map(|line| line.strip_prefix(&sample));
        value
            .unwrap_or_else(|| panic!("{counted}"))
            .parse()
            .unwrap()
    };
    assert!(of("none") >= 6, "{counted}");
    assert!(of("spare") >= 64, "{counted}");
}

/// Some clients, and proxies, end their side of the connection behind a request.
#[test]
fn a_client_that_sends_no_more_gets_its_answer() {
    let server = Server::start(&[]);
    // Long enough that the end of the other side is seen before the answer is there.
    let mut body = json!({"prompt": "a", "max_tokens": 400, "temperature": 0});
    let expected = server.complete(&body);
    let ask = |body: &serde_json::Value| {
        let connection = server.begin(PATH, body);
        connection.end_sending();
        connection.rest()
    };
    let whole = ask(&body);
    assert!(whole.starts_with(b"HTTP/1.1 100 Continue\r\n\r\n"));
    let whole = super::Response::parse(&whole).json();
    assert_eq!(whole["choices"], expected["choices"]);
    body["stream"] = true.into();
    let chunks = super::Response::parse(&ask(&body)).chunks();
    let texts = chunks.iter().map(|chunk| &chunk["choices"][0]["text"]);
    let text: String = texts.map(|text| text.as_str().unwrap()).collect();
    assert_eq!(text, expected["choices"][0]["text"]);
    // Half a request is none.
    let mut half = server.connect();
    half.send_text(&format!("POST {PATH} HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{{"));
    half.end_sending();
    insta::assert_snapshot!(half.answer().refusal(), @"400 invalid_request_error, incomplete_body, -: the body broke off: end of file before message length reached");
}

/// HTTP/1.0 has no interim answers by which a client that is gone is told from one that waits.
#[test]
fn a_client_of_http_1_0_gets_no_interim_answer() {
    let server = Server::start(&[]);
    let body = json!({"prompt": "a", "max_tokens": 400, "temperature": 0}).to_string();
    let mut connection = server.connect();
    let length = body.len();
    connection.send_text(&format!("POST {PATH} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"));
    connection.end_sending();
    assert!(connection.rest().starts_with(b"HTTP/1.0 200 OK\r\n"));
}

/// A body that is too long by its header is neither waited for nor asked for; and an answer that comes
/// before a body is read is there for who sends it all first.
#[test]
fn a_body_is_refused_before_it_is_read() {
    let server = Server::start(&["--max-body", "1000", "--api-key", "sesame"]);
    let begin = |length: usize, more: &str| {
        let mut connection = server.connect();
        connection.send_text(&format!(
            "POST {PATH} HTTP/1.1\r\nhost: here\r\nauthorization: Bearer sesame\r\n\
             content-type: application/json\r\ncontent-length: {length}\r\n{more}\r\n"
        ));
        connection
    };
    let expect = "expect: 100-continue\r\n";
    for more in ["", expect] {
        let mut refused = begin(1001, more);
        assert_eq!(refused.read(13), b"HTTP/1.1 413 ", "{more}");
    }
    let body = r#"{"prompt": "a", "max_tokens": 1}"#;
    let mut asked = begin(body.len(), &format!("connection: close\r\n{expect}"));
    assert_eq!(asked.read(25), b"HTTP/1.1 100 Continue\r\n\r\n");
    asked.send_text(body);
    assert_eq!(asked.answer().status, 200);
    // What the system does not hold for a connection.
    let long = "x".repeat(12_000);
    let chunk = format!("{:x}\r\n{long}\r\n", long.len());
    let mut chunked = server.connect();
    chunked.send_text(&format!(
        "POST {PATH} HTTP/1.1\r\nhost: here\r\nauthorization: Bearer sesame\r\nconnection: close\r\n\
         content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n{chunk}0\r\n\r\n"
    ));
    assert_eq!(chunked.answer().status, 413);
}
