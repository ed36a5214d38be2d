//! Where chat templates run: processes that `serve` starts, one for each conversation, and how long someone
//! waits for one.
//!
//! A process that is kept for the next conversation would save some milliseconds, and need to be watched while
//! it waits.

use std::borrow::Cow;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::error::{ApiError, Result};
use super::jinja::Message;
use super::renderer::{ARGUMENT, Answer, Bound, Question};
use super::template::Template;

/// Processes at a time.
pub(super) const AT_ONCE: usize = 2;

/// How long a client waits for one at most, and how long a template may take to be read at the start.
pub(super) const LONGEST: Duration = Duration::from_secs(10);

/// Bytes that a process may take beyond those that it starts with, and, for each byte of the longest
/// conversation, so many more.
pub(super) const MEMORY: u64 = 512 << 20;
pub(super) const PER_BYTE: u64 = 16;

/// Bytes of an answer.
pub(super) const MOST_TEXT: u64 = 64 << 20;

/// The places for renderings of one template.
#[derive(Debug, Clone)]
pub(super) struct Renders(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    places: Semaphore,
    template: Template,
    /// Bytes, as of [`Question::memory`].
    memory: u64,
}

/// Why there is no text.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    /// What the template says, or what is wrong with it.
    #[error("{0}")]
    Template(String),
    #[error(
        "{place} ends the process that runs it ({status}): expected it to nest values less deep{}",
        told(bound)
    )]
    Ended {
        place: String,
        status: ExitStatus,
        bound: Bound,
    },
    // As a process of Rust that panics ends.
    #[error(
        "{place} meets a fault of what runs it ({status}): look for what is unusual in it, such as a text without \
         an end or a number of many digits"
    )]
    Panicked { place: String, status: ExitStatus },
    #[error("{place}: expected a text of at most {} MiB, got more", MOST_TEXT >> 20)]
    TooLong { place: String },
    // Nothing that a template or a client does.
    #[error(
        "the process that ran the chat template was ended from outside ({0}), as where the machine lacks \
         memory: ask again"
    )]
    Killed(ExitStatus),
    #[error(
        "the process for the chat template did not come to run it ({0}): expected more memory than the limit on \
         it (ulimit -v) lets it have, or more open files (ulimit -n)"
    )]
    NotRun(ExitStatus),
    #[error(
        "cannot start a process for the chat template: {0}; limits on processes (ulimit -u) and open files \
         (ulimit -n) hold for it too"
    )]
    NotStarted(std::io::Error),
    #[error("cannot run the chat template in a process of its own: {0}")]
    Process(#[from] std::io::Error),
}

impl Fault {
    /// Whether the template, or what it makes of a conversation, is to blame.
    fn is_of_template(&self) -> bool {
        match self {
            Self::Template(_)
            | Self::Ended { .. }
            | Self::Panicked { .. }
            | Self::TooLong { .. } => true,
            Self::Killed(_) | Self::NotRun(_) | Self::NotStarted(_) | Self::Process(_) => false,
        }
    }
}

impl Renders {
    /// Reads a template, in a process. Bodies of requests have at most `body` bytes.
    ///
    /// # Errors
    /// It is no template, or cannot be read in time.
    pub(super) fn new(template: Template, body: usize) -> anyhow::Result<Self> {
        let shared = Shared {
            places: Semaphore::new(AT_ONCE),
            template,
            memory: MEMORY.saturating_add(PER_BYTE.saturating_mul(body as u64)),
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let read = runtime.block_on(async { timeout(LONGEST, shared.ask(None)).await });
        let Ok(read) = read else {
            anyhow::bail!(
                "expected a template that is read in {} s, got one that takes longer",
                LONGEST.as_secs()
            );
        };
        match read {
            Err(fault) if fault.is_of_template() => Err(fault.into()),
            // A process that came to nothing says nothing of the template; who asks for a chat is told if
            // that goes on.
            _ => Ok(Self(Arc::new(shared))),
        }
    }

    /// The text of a conversation, up to where the assistant is to go on. Dropped before, it leaves no
    /// process, and gives its place back.
    ///
    /// # Errors
    /// What the template raises, or what it cannot do with these messages; or it takes longer than someone
    /// waits: `limit` if that is shorter.
    pub(super) async fn render(
        &self,
        limit: Option<Duration>,
        messages: &[Message],
    ) -> Result<String> {
        let limit = limit.map_or(LONGEST, |limit| limit.min(LONGEST));
        let render = async {
            // Nobody closes it.
            let _place = self.0.places.acquire().await;
            self.0.ask(Some(messages)).await
        };
        let Ok(rendered) = timeout(limit, render).await else {
            return Err(too_slow(limit));
        };
        rendered.map_err(|fault| {
            let text = fault.to_string();
            if fault.is_of_template() {
                ApiError::field("messages", text)
            } else {
                ApiError::failed(&text)
            }
        })
    }
}

impl Shared {
    /// Asks a process, which ends with its answer, or when this is dropped.
    async fn ask(&self, messages: Option<&[Message]>) -> std::result::Result<String, Fault> {
        let question = Question {
            template: Cow::Borrowed(&self.template),
            memory: self.memory,
            messages: messages.map(Cow::Borrowed),
        };
        let question = serde_json::to_vec(&question).map_err(std::io::Error::from)?;
        let mut process = Process(Some(start().map_err(Fault::NotStarted)?));
        let child = process.child();
        let (input, out) = (child.stdin.take(), child.stdout.take());
        let (mut input, out) = (input.ok_or_else(no_pipe)?, out.ok_or_else(no_pipe)?);
        // Where the process has ended, its status tells of it.
        let _ = input.write_all(&question).await;
        drop(input);
        let mut said = Vec::new();
        out.take(MOST_TEXT).read_to_end(&mut said).await?;
        if said.len() as u64 == MOST_TEXT {
            let place = self.template.place.clone();
            return Err(Fault::TooLong { place });
        }
        let status = process.child().wait().await?;
        self.understand(&said, status)
    }

    /// What a process that ended has said.
    fn understand(&self, said: &[u8], status: ExitStatus) -> std::result::Result<String, Fault> {
        let mut lines = said.split_inclusive(|byte| *byte == b'\n');
        let mut line = || lines.next().filter(|line| line.ends_with(b"\n"));
        let (bound, answer) = (line(), line());
        if let (Some(answer), true) = (answer, status.success()) {
            let answer: Answer = serde_json::from_slice(answer).map_err(std::io::Error::from)?;
            return answer.map_err(Fault::Template);
        }
        let bound = match bound {
            _ if from_outside(status) => return Err(Fault::Killed(status)),
            None => return Err(Fault::NotRun(status)),
            Some(bound) => serde_json::from_slice(bound).map_err(std::io::Error::from)?,
        };
        let place = self.template.place.clone();
        Err(match status.code() {
            Some(PANIC) => Fault::Panicked { place, status },
            _ => Fault::Ended {
                place,
                status,
                bound,
            },
        })
    }
}

/// A process that is ended where nobody waits for it any more, and then asked for its status: until someone
/// has, the system keeps its entry.
struct Process(Option<Child>);

impl Process {
    fn child(&mut self) -> &mut Child {
        self.0.as_mut().expect("there until it is dropped")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let Some(mut child) = self.0.take() else {
            return;
        };
        // One that has ended, and was asked, is not there to be killed.
        let killed = child.start_kill();
        if let (Ok(()), Ok(runtime)) = (killed, tokio::runtime::Handle::try_current()) {
            runtime.spawn(async move { child.wait().await });
        }
    }
}

/// The status of a process of Rust that panicked.
const PANIC: i32 = 101;

/// Starts a process that takes a question.
fn start() -> std::io::Result<Child> {
    let mut command = Command::new(program()?);
    command
        .arg(ARGUMENT)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    // A signal from the terminal is for the server, which lets conversations come to their ends.
    #[cfg(unix)]
    command.process_group(0).arg0("serve");
    command.spawn()
}

/// This program, also where its file has been deleted or replaced.
fn program() -> std::io::Result<PathBuf> {
    let this = PathBuf::from("/proc/self/exe");
    if this.exists() {
        return Ok(this);
    }
    std::env::current_exe()
}

fn no_pipe() -> std::io::Error {
    std::io::Error::other("a process without pipes")
}

/// Whether a process got a signal that it does not bring upon itself, as it does for lack of stack or memory.
#[cfg(unix)]
fn from_outside(status: ExitStatus) -> bool {
    use std::os::unix::process::ExitStatusExt;
    use tokio::signal::unix::SignalKind;
    let outside = [
        SignalKind::hangup(),
        SignalKind::interrupt(),
        SignalKind::quit(),
        SignalKind::from_raw(KILL),
        SignalKind::terminate(),
    ];
    status
        .signal()
        .is_some_and(|signal| outside.contains(&SignalKind::from_raw(signal)))
}

/// SIGKILL, by POSIX.
#[cfg(unix)]
const KILL: i32 = 9;

#[cfg(not(unix))]
fn from_outside(_: ExitStatus) -> bool {
    false
}

/// The limit on memory, as messages end with it.
fn told(bound: &Bound) -> String {
    let Some(memory) = bound.memory else {
        return String::new();
    };
    let of_system = if bound.inherited { " (ulimit -v)" } else { "" };
    format!(", and to take at most {} MiB{of_system}", memory >> 20)
}

fn too_slow(limit: Duration) -> ApiError {
    let message = format!(
        "messages: expected the chat template to take at most {} s, waiting for others of its kind included, got \
         more: mend the template, or shorten the messages",
        limit.as_secs()
    );
    ApiError {
        param: Some("messages".to_owned()),
        ..ApiError::new(StatusCode::GATEWAY_TIMEOUT, "deadline_exceeded", message)
    }
}

#[cfg(all(test, unix))]
mod tests {
    use std::fmt::Write;
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    /// A template is to blame for what it does, and for nothing that is done to its process; a fault of the
    /// engine is not told as one of depth or memory.
    #[test]
    fn ends_of_processes_are_told_apart() {
        let shared = Shared {
            places: Semaphore::new(AT_ONCE),
            template: Template {
                source: String::new(),
                place: "FILE".to_owned(),
                bos_token: None,
                eos_token: None,
            },
            memory: MEMORY,
        };
        let (memory, inherited) = (Some(64 << 20), true);
        let bound = Bound { memory, inherited };
        let mut began = serde_json::to_vec(&bound).unwrap();
        began.push(b'\n');
        let mut texts = String::new();
        for (said, status) in [
            (&began[..], 6),
            (&began, 101 << 8),
            (&began, KILL),
            (b"", 1 << 8),
        ] {
            let fault = shared
                .understand(said, ExitStatus::from_raw(status))
                .unwrap_err();
            writeln!(texts, "{} {fault}", fault.is_of_template()).unwrap();
        }
        insta::assert_snapshot!(texts, @"
        true FILE ends the process that runs it (signal: 6 (SIGABRT)): expected it to nest values less deep, and to take at most 64 MiB (ulimit -v)
        true FILE meets a fault of what runs it (exit status: 101): look for what is unusual in it, such as a text without an end or a number of many digits
        false the process that ran the chat template was ended from outside (signal: 9 (SIGKILL)), as where the machine lacks memory: ask again
        false the process for the chat template did not come to run it (exit status: 1): expected more memory than the limit on it (ulimit -v) lets it have, or more open files (ulimit -n)
        ");
    }
}
