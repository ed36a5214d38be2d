//! A client that does what it is told, also what no decent client does.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};

use serde_json::Value;

use super::PATIENCE;

/// A connection, for one request.
pub(crate) struct Connection(TcpStream);

impl Connection {
    pub(crate) fn open(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self(stream)
    }

    /// Sends a request, after which the connection ends.
    pub(crate) fn send(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) {
        let headers = headers
            .iter()
            .map(|(name, value)| format!("{name}: {value}\r\n"));
        let (headers, length) = (headers.collect::<String>(), body.len());
        self.send_text(&format!(
            "{method} {path} HTTP/1.1\r\nhost: here\r\nconnection: close\r\n{headers}\
             content-length: {length}\r\n\r\n{body}"
        ));
    }

    pub(crate) fn send_text(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).unwrap();
    }

    /// Waits for so many bytes of the answer.
    pub(crate) fn read(&mut self, bytes: usize) -> Vec<u8> {
        let mut read = vec![0; bytes];
        self.0.read_exact(&mut read).unwrap();
        read
    }

    /// All of the answer that is still to come.
    pub(crate) fn rest(mut self) -> Vec<u8> {
        let mut read = Vec::new();
        self.0.read_to_end(&mut read).unwrap();
        read
    }

    pub(crate) fn answer(self) -> Response {
        Response::parse(&self.rest())
    }

    pub(crate) fn ask(
        mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Response {
        self.send(method, path, headers, body);
        self.answer()
    }

    /// Sends no more, and reads still.
    pub(crate) fn end_sending(&self) {
        self.0.shutdown(Shutdown::Write).unwrap();
    }

    /// Ends the connection in both directions.
    pub(crate) fn close(self) {
        self.0.shutdown(Shutdown::Both).unwrap();
    }
}

/// An answer that is complete.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    headers: String,
    pub(crate) body: String,
}

impl Response {
    #[track_caller]
    pub(crate) fn parse(bytes: &[u8]) -> Self {
        let mut text = std::str::from_utf8(bytes).unwrap();
        // Interim answers are no answers.
        while let Some(after) = text.strip_prefix("HTTP/1.1 100 Continue\r\n\r\n") {
            text = after;
        }
        let (head, body) = text
            .split_once("\r\n\r\n")
            .unwrap_or_else(|| panic!("{text:?}"));
        let (first, headers) = head.split_once("\r\n").unwrap();
        let headers = format!("\r\n{}\r\n", headers.to_ascii_lowercase());
        let chunked = headers.contains("\r\ntransfer-encoding: chunked\r\n");
        Self {
            status: first.split(' ').nth(1).unwrap().parse().unwrap(),
            body: if chunked {
                whole(body)
            } else {
                body.to_owned()
            },
            headers,
        }
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let (_, rest) = self.headers.split_once(&format!("\r\n{name}: "))?;
        rest.split("\r\n").next()
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// The data of a stream's events.
    #[track_caller]
    pub(crate) fn events(&self) -> Vec<&str> {
        assert_eq!(
            self.header("content-type"),
            Some("text/event-stream"),
            "{}",
            self.body
        );
        let events = self.body.split_terminator("\n\n");
        // Comments keep the connection alive.
        let events = events.filter(|event| !event.starts_with(':'));
        events
            .map(|event| event.strip_prefix("data: ").unwrap())
            .collect()
    }

    /// The chunks of a stream that came to its end.
    #[track_caller]
    pub(crate) fn chunks(&self) -> Vec<Value> {
        let mut events = self.events();
        assert_eq!(events.pop(), Some("[DONE]"), "{}", self.body);
        events
            .iter()
            .map(|event| serde_json::from_str(event).unwrap())
            .collect()
    }

    /// Status, and what the error says.
    #[track_caller]
    pub(crate) fn refusal(&self) -> String {
        let error = &self.json()["error"];
        let field = |name: &str| error[name].as_str().unwrap_or("-").to_owned();
        let [kind, code, param] = ["type", "code", "param"].map(field);
        format!(
            "{} {kind}, {code}, {param}: {}",
            self.status,
            field("message")
        )
    }
}

/// A body without its chunks' sizes.
fn whole(mut chunked: &str) -> String {
    let mut body = String::new();
    loop {
        let (size, rest) = chunked.split_once("\r\n").unwrap();
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            return body;
        }
        body += &rest[..size];
        chunked = &rest[size + 2..];
    }
}
