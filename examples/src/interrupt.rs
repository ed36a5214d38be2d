//! Interrupts from the keyboard, where half a result is worth something.

use std::io;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::signal::ctrl_c;

/// The exit status of a program that was interrupted, as shells have it for one that SIGINT ended.
const STATUS: u8 = 130;

/// Within this time a second interrupt is the first: some programs that pass signals on send them to a
/// process and to its group.
const TWICE: Duration = Duration::from_millis(500);

/// Whether the process was interrupted.
#[derive(Debug, Clone, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// From now on the first interrupt does not end the process, and is for the program to see; the second
    /// one ends it.
    ///
    /// # Errors
    /// The system gives no thread for it.
    pub(crate) fn watch(&self) -> io::Result<()> {
        let came = self.0.clone();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let watch = async move {
            // Where signals cannot be watched, they end the process, as ever.
            if ctrl_c().await.is_ok() {
                came.store(true, Ordering::Relaxed);
            }
            tokio::time::sleep(TWICE).await;
            if ctrl_c().await.is_ok() {
                std::process::exit(STATUS.into());
            }
        };
        let thread = std::thread::Builder::new().name("interrupts".to_owned());
        thread.spawn(move || runtime.block_on(watch)).map(|_| ())
    }

    /// Whether one came.
    pub(crate) fn came(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The program ended before its work, as it was told to.
#[derive(Debug)]
pub(crate) struct Interrupted {
    /// What is not done.
    pub(crate) left: String,
}

impl Interrupted {
    /// Says so to the shell.
    pub(crate) fn status() -> ExitCode {
        ExitCode::from(STATUS)
    }
}

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "interrupted: {}", self.left)
    }
}

impl std::error::Error for Interrupted {}
