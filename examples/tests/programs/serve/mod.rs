//! The server as a process, asked over raw connections: clients that behave, and clients that do not.

mod answers;
mod chat;
mod client;
mod endings;
mod likeliest;
mod limits;
mod metrics;
mod refusals;
mod templates;

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::{demo, process::program};
use client::{Connection, Response};

/// Nothing here takes so long, on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// A server on a free port. Dropped, it is killed.
pub(super) struct Server {
    child: Child,
    address: SocketAddr,
    /// Reads what is on standard error.
    told: Option<JoinHandle<String>>,
}

impl Server {
    /// One of the demo checkpoint.
    pub(super) fn start(flags: &[&str]) -> Self {
        Self::start_on(&demo(), flags, &[])
    }

    pub(super) fn start_on(model: &str, flags: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut child = program("serve")
            .args(["--model", model, "--port", "0"])
            .args(flags)
            .envs(variables.iter().copied())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stderr = child.stderr.take().unwrap();
        let told = std::thread::spawn(move || {
            let mut told = String::new();
            stderr.read_to_string(&mut told).unwrap();
            told
        });
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        out.read_line(&mut line).unwrap();
        let Some(address) = line.trim().strip_prefix("listening on http://") else {
            child.kill().unwrap();
            panic!("{line:?}: {}", told.join().unwrap());
        };
        Self {
            child,
            address: address.parse().unwrap(),
            told: Some(told),
        }
    }

    pub(super) fn connect(&self) -> Connection {
        Connection::open(self.address)
    }

    pub(super) fn get(&self, path: &str) -> Response {
        self.connect().ask("GET", path, &[], "")
    }

    pub(super) fn post(&self, path: &str, body: &Value) -> Response {
        self.post_text(path, &body.to_string())
    }

    pub(super) fn post_text(&self, path: &str, body: &str) -> Response {
        let json = [("content-type", "application/json")];
        self.connect().ask("POST", path, &json, body)
    }

    /// A request that is on its way, of which nothing has been read.
    pub(super) fn begin(&self, path: &str, body: &Value) -> Connection {
        let mut connection = self.connect();
        let json = [("content-type", "application/json")];
        connection.send("POST", path, &json, &body.to_string());
        connection
    }

    /// The answer to a completion that is fine.
    #[track_caller]
    pub(super) fn complete(&self, body: &Value) -> Value {
        let response = self.post("/v1/completions", body);
        assert_eq!(response.status, 200, "{}", response.body);
        response.json()
    }

    /// The value of a metric; of several with labels, their sum.
    #[track_caller]
    pub(super) fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").body;
        let values: Vec<f64> = text
            .lines()
            .filter(|line| line.split(['{', ' ']).next() == Some(name))
            .map(|line| line.rsplit(' ').next().unwrap().parse().unwrap())
            .collect();
        assert!(!values.is_empty(), "no {name} in {text}");
        values.iter().sum()
    }

    /// Waits until a metric has a value.
    #[track_caller]
    pub(super) fn wait_for(&self, name: &str, value: f64) {
        let started = Instant::now();
        while self.metric(name) != value {
            let waited = started.elapsed();
            assert!(
                waited < PATIENCE,
                "{name} is {}, not {value}",
                self.metric(name)
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Its process.
    #[cfg(target_os = "linux")]
    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal by its name.
    #[cfg(unix)]
    pub(super) fn signal(&self, name: &str) {
        let sent = std::process::Command::new("kill")
            .args(["-s", name, &self.child.id().to_string()])
            .status();
        assert!(sent.unwrap().success());
    }

    /// Ends it by force: what was on standard error.
    pub(super) fn killed(&mut self) -> String {
        self.child.kill().unwrap();
        self.ended().1
    }

    /// Waits for the end: its exit code, and what was on standard error.
    pub(super) fn ended(&mut self) -> (Option<i32>, String) {
        let code = self.child.wait().unwrap().code();
        (code, self.told.take().unwrap().join().unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A request for a text that is long on any machine: the positions of the model, greedily.
fn long() -> Value {
    json!({"prompt": "a", "max_tokens": 4000, "temperature": 0})
}

/// The same as a stream.
fn long_stream() -> Value {
    let mut body = long();
    body["stream"] = true.into();
    body
}
