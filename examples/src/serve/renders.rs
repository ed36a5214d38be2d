//! Where chat templates run: processes that `serve` starts, each for one conversation at a time, and how long
//! someone waits for one.

use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::http::StatusCode;
use serde::Serialize;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::error::{ApiError, Result};
use super::jinja::Message;
use super::renderer::{ARGUMENT, Answer, Setup};
use super::template::Template;

/// Processes at a time. One without work is kept for the next conversation.
pub(super) const AT_ONCE: usize = 2;

/// How long a client waits for one at most, and how long a template may take to be read at the start.
pub(super) const LONGEST: Duration = Duration::from_secs(10);

/// Bytes that a process may take beyond those that it starts with, and, for each byte of the longest
/// conversation, so many more.
pub(super) const MEMORY: u64 = 512 << 20;
pub(super) const PER_BYTE: u64 = 16;

/// Bytes of an answer.
const MOST_TEXT: u64 = 64 << 20;

/// The places for renderings of one template, and processes that wait for work.
#[derive(Debug, Clone)]
pub(super) struct Renders(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    places: Semaphore,
    idle: Mutex<Vec<Renderer>>,
    setup: Setup,
}

/// Why there is no text.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    /// What the template says, or what is wrong with it.
    #[error("{0}")]
    Template(String),
    #[error(
        "{place} ends the process that runs it ({status}): expected it to nest values less deep, and to take at \
         most {} MiB",
        memory >> 20
    )]
    Ended {
        place: String,
        status: ExitStatus,
        memory: u64,
    },
    #[error("{place}: expected a text of at most {} MiB, got more", MOST_TEXT >> 20)]
    TooLong { place: String },
    /// Nothing that a template or a client does.
    #[error("cannot run the chat template in a process of its own: {0}")]
    Process(#[from] std::io::Error),
}

impl Renders {
    /// Reads a template, in a process, and ends that. Bodies of requests have at most `body` bytes.
    ///
    /// # Errors
    /// It is no template, cannot be read in time, or processes cannot be started.
    pub(super) fn new(template: Template, body: usize) -> anyhow::Result<Self> {
        let setup = Setup {
            template,
            memory: MEMORY.saturating_add(PER_BYTE.saturating_mul(body as u64)),
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let read = async {
            let renderer = Renderer::start(&setup).await?;
            // It belongs to this runtime.
            renderer.end().await;
            Ok::<_, Fault>(())
        };
        let read = runtime.block_on(async { timeout(LONGEST, read).await });
        let Ok(read) = read else {
            anyhow::bail!(
                "expected a template that is read in {} s, got one that takes longer",
                LONGEST.as_secs()
            );
        };
        read?;
        Ok(Self(Arc::new(Shared {
            places: Semaphore::new(AT_ONCE),
            idle: Mutex::new(Vec::new()),
            setup,
        })))
    }

    /// The text of a conversation, up to where the assistant is to go on.
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
        let Ok(rendered) = timeout(limit, self.0.render(messages)).await else {
            return Err(too_slow(limit));
        };
        rendered.map_err(|fault| match fault {
            Fault::Process(_) => ApiError::failed(&fault.to_string()),
            _ => ApiError::field("messages", fault.to_string()),
        })
    }
}

impl Shared {
    async fn render(&self, messages: &[Message]) -> std::result::Result<String, Fault> {
        // Nobody closes it.
        let _place = self.places.acquire().await;
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = idle().pop();
        let waiting = waiting.and_then(|mut renderer| renderer.runs().then_some(renderer));
        let mut renderer = match waiting {
            Some(renderer) => renderer,
            None => Renderer::start(&self.setup).await?,
        };
        // Dropped in between, for lack of time or a client that has gone, the process ends.
        let answer = renderer.ask(&self.setup, messages).await?;
        idle().push(renderer);
        answer.map_err(Fault::Template)
    }
}

/// A process that has read the template. It ends when this is dropped.
#[derive(Debug)]
struct Renderer {
    process: Child,
    input: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Renderer {
    async fn start(setup: &Setup) -> std::result::Result<Self, Fault> {
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
        let mut process = command.spawn()?;
        let (input, answers) = (process.stdin.take(), process.stdout.take());
        let mut renderer = Self {
            process,
            input: input.ok_or_else(no_pipe)?,
            answers: BufReader::new(answers.ok_or_else(no_pipe)?),
        };
        let answer = renderer.ask(setup, setup).await?;
        answer.map_err(Fault::Template)?;
        Ok(renderer)
    }

    /// Whether it is there still: the system may have ended it while it waited.
    fn runs(&mut self) -> bool {
        matches!(self.process.try_wait(), Ok(None))
    }

    /// Lets it end, and waits for that.
    async fn end(self) {
        let Self {
            mut process, input, ..
        } = self;
        drop(input);
        // One that does not end is killed with the future that this is.
        let _ = process.wait().await;
    }

    async fn ask(
        &mut self,
        setup: &Setup,
        question: &(impl Serialize + ?Sized),
    ) -> std::result::Result<Answer, Fault> {
        let place = || setup.template.place.clone();
        let mut line = serde_json::to_vec(question).map_err(std::io::Error::from)?;
        line.push(b'\n');
        // Where the process has ended, reading tells of it.
        let _ = self.input.write_all(&line).await;
        let mut answer = Vec::new();
        let mut limited = (&mut self.answers).take(MOST_TEXT);
        limited.read_until(b'\n', &mut answer).await?;
        if answer.ends_with(b"\n") {
            return Ok(serde_json::from_slice(&answer).map_err(std::io::Error::from)?);
        }
        if answer.len() as u64 == MOST_TEXT {
            return Err(Fault::TooLong { place: place() });
        }
        Err(Fault::Ended {
            place: place(),
            status: self.process.wait().await?,
            memory: setup.memory,
        })
    }
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
