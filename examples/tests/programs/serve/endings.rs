//! How the server ends.

#![cfg(unix)]

use std::time::{Duration, Instant};

use serde_json::json;

use super::{Server, client::Response, long, long_stream};

const PATH: &str = "/v1/completions";

/// Those who watch the server, and those who ask for more, are told.
#[test]
fn requests_that_run_come_to_their_ends() {
    for signal in ["TERM", "INT"] {
        let mut server = Server::start(&[]);
        let body = json!({"prompt": "a", "max_tokens": 300, "temperature": 0});
        let expected = server.complete(&body);
        let whole = server.begin(PATH, &body);
        let mut body = body.clone();
        body["stream"] = true.into();
        let mut stream = server.begin(PATH, &body);
        let mut begun = stream.read(500);
        server.wait_for("replay_requests_running", 2.0);
        // Opened before, asked afterwards.
        let idle = server.connect();
        server.signal(signal);
        let refused = loop {
            let refused = server.post(PATH, &json!({"prompt": "a", "max_tokens": 1}));
            if refused.status != 200 {
                break refused;
            }
        };
        let message = "503 server_error, shutting_down, -: the server is shutting down";
        assert_eq!(refused.refusal(), message);
        assert_eq!(refused.header("connection"), Some("close"));
        assert_eq!(idle.ask("GET", "/health", &[], "").status, 503);

        assert_eq!(whole.answer().json()["choices"], expected["choices"]);
        begun.extend(stream.rest());
        let chunks = Response::parse(&begun).chunks();
        let texts = chunks
            .iter()
            .map(|chunk| chunk["choices"][0]["text"].as_str().unwrap());
        assert_eq!(texts.collect::<String>(), expected["choices"][0]["text"]);
        let (code, told) = server.ended();
        assert_eq!(code, Some(0), "{told}");
        // One more may have been let in before the signal was seen.
        let all = [2, 3].map(|run| format!("ending: {run} requests have 30 s to come to an end\n"));
        assert!(all.contains(&told), "{told}");
    }
}

#[test]
fn a_second_signal_or_the_end_of_the_grace_period_ends_at_once() {
    for (flags, second) in [(&["--grace", "60"][..], true), (&["--grace", "1"], false)] {
        let mut server = Server::start(flags);
        let whole = server.begin(PATH, &long());
        let mut stream = server.begin(PATH, &long_stream());
        stream.read(500);
        server.wait_for("replay_requests_running", 2.0);
        server.signal("TERM");
        if second {
            while server.get("/health").status == 200 {}
            server.signal("TERM");
        }
        let (code, told) = server.ended();
        assert_eq!(code, Some(1), "somebody did not get an answer");
        assert!(told.starts_with("ending: 2 requests have "), "{told}");
        assert!(
            told.ends_with("\nerror: ended with requests that had not come to their ends\n"),
            "{told}"
        );
        assert!(!String::from_utf8(stream.rest()).unwrap().contains("[DONE]"));
        drop(whole);
    }
}

/// Half a request is none that runs, and does not hold up the end for longer than all have.
#[test]
fn half_a_request_is_not_waited_for_beyond_the_grace_period() {
    let mut server = Server::start(&["--grace", "1"]);
    let mut half = server.connect();
    half.send_text(&format!(
        "POST {PATH} HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n\
         content-length: 100\r\n\r\n{{"
    ));
    server.wait_for("replay_connections", 2.0);
    let begun = Instant::now();
    server.signal("TERM");
    let (code, told) = server.ended();
    // What else ends takes a second at most; without a bound it were 5 s.
    assert!(begun.elapsed() < Duration::from_secs(4), "{told}");
    assert_eq!(code, Some(0), "nothing that ran was cut off: {told}");
    assert!(
        told.ends_with("\nended with connections that were open\n"),
        "{told}"
    );
}

/// An idle server has nothing to wait for, nor has one with connections that ask nothing.
#[test]
fn an_idle_server_ends() {
    for grace in ["30", "0"] {
        let mut server = Server::start(&["--grace", grace]);
        let _idle = server.connect();
        assert_eq!(server.get("/health").status, 200);
        let begun = Instant::now();
        server.signal("TERM");
        let (code, told) = server.ended();
        assert_eq!(code, Some(0), "{told}");
        let (first, rest) = told.split_at("ending: no request runs\n".len());
        assert_eq!(first, "ending: no request runs\n");
        // Without any grace a connection may not get to close itself.
        let open = ["", "ended with connections that were open\n"];
        assert!(open[..=usize::from(grace == "0")].contains(&rest), "{told}");
        assert!(
            begun.elapsed() < Duration::from_secs(4),
            "it waited for nobody"
        );
    }
}
