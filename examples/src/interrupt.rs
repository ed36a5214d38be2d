//! Signals that ask a program to end, where half a result is worth something.

use std::fmt;
use std::io;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Within this time a second signal is the first: some programs that pass signals on send them to a
/// process and to its group.
const TWICE: Duration = Duration::from_millis(500);

/// What asked the process to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Signal {
    /// SIGINT, as from the keyboard.
    Interrupt,
    /// SIGTERM, as from a job's time limit.
    #[cfg(unix)]
    Terminate,
}

impl Signal {
    /// The exit status of a program that it ended, as shells have it.
    fn status(self) -> u8 {
        match self {
            Self::Interrupt => 130,
            #[cfg(unix)]
            Self::Terminate => 143,
        }
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Interrupt => "interrupted",
            #[cfg(unix)]
            Self::Terminate => "terminated",
        })
    }
}

/// Whether the process was asked to end, and how.
#[derive(Debug, Clone, Default)]
pub struct Interrupt(Arc<OnceLock<Signal>>);

impl Interrupt {
    /// From now on the first signal does not end the process, and is for the program to see; the second
    /// one ends it.
    ///
    /// # Errors
    /// The system does not let signals be watched, or gives no thread for it.
    pub(crate) fn watch(&self) -> io::Result<()> {
        let came = self.0.clone();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        // Here, not on the thread: a signal that comes before that runs counts, too.
        let mut signals = {
            let _context = runtime.enter();
            Signals::watch()?
        };
        let watch = async move {
            let first = signals.next().await;
            came.get_or_init(|| first);
            let deadline = tokio::time::Instant::now() + TWICE;
            while tokio::time::timeout_at(deadline, signals.next())
                .await
                .is_ok()
            {}
            std::process::exit(signals.next().await.status().into());
        };
        let thread = std::thread::Builder::new().name("interrupts".to_owned());
        thread.spawn(move || runtime.block_on(watch)).map(|_| ())
    }

    /// The signal that came, if one did.
    pub(crate) fn came(&self) -> Option<Signal> {
        self.0.get().copied()
    }
}

/// From now on a file that would grow beyond the process' limit (`ulimit -f`) is an error of the write, and no
/// signal that ends the program without a word.
///
/// # Errors
/// The system does not let signals be watched.
pub(crate) fn take_long_files_for_errors() -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()?;
        let _context = runtime.enter();
        // Once it is watched, the system no longer ends the process, also when nobody looks any more.
        let raw = rustix::process::Signal::XFSZ.as_raw();
        drop(signal(SignalKind::from_raw(raw))?);
    }
    Ok(())
}

/// The signals that are watched.
struct Signals {
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
    #[cfg(windows)]
    interrupt: tokio::signal::windows::CtrlC,
}

impl Signals {
    /// Those that come from now on, in the context of a runtime.
    fn watch() -> io::Result<Self> {
        #[cfg(unix)]
        {
            use tokio::signal::unix::{SignalKind, signal};
            Ok(Self {
                interrupt: signal(SignalKind::interrupt())?,
                terminate: signal(SignalKind::terminate())?,
            })
        }
        #[cfg(windows)]
        Ok(Self {
            interrupt: tokio::signal::windows::ctrl_c()?,
        })
    }

    /// Waits for the next one.
    async fn next(&mut self) -> Signal {
        #[cfg(unix)]
        tokio::select! {
            _ = self.interrupt.recv() => Signal::Interrupt,
            _ = self.terminate.recv() => Signal::Terminate,
        }
        #[cfg(windows)]
        {
            let _ = self.interrupt.recv().await;
            Signal::Interrupt
        }
    }
}

/// The program ended before its work, as it was told to.
#[derive(Debug)]
pub(crate) struct Interrupted {
    /// What told it.
    pub(crate) by: Signal,
    /// What is not done.
    pub(crate) left: String,
}

impl Interrupted {
    /// Says so to the shell.
    pub(crate) fn status(&self) -> ExitCode {
        ExitCode::from(self.by.status())
    }
}

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.by, self.left)
    }
}

impl std::error::Error for Interrupted {}
