//! How the server ends: no new requests, those that run to their end, and when that is given up.

use std::convert::Infallible;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc;

/// The gate that requests pass. Once it is closed, it can be known when those that had passed are done.
#[derive(Debug)]
pub(super) struct Gate {
    /// `None` once closed.
    passes: Mutex<Option<mpsc::Sender<Infallible>>>,
}

/// Held by a request until all of its answer is on its way.
#[derive(Debug, Clone)]
pub(super) struct Pass {
    /// Never sends: that all are dropped is the message.
    _alive: mpsc::Sender<Infallible>,
}

/// Comes to its end when nobody holds a pass any more.
#[derive(Debug)]
pub(super) struct Passed(mpsc::Receiver<Infallible>);

impl Gate {
    pub(super) fn new() -> (Self, Passed) {
        let (sender, receiver) = mpsc::channel(1);
        let passes = Mutex::new(Some(sender));
        (Self { passes }, Passed(receiver))
    }

    /// A pass; none if the gate is closed.
    pub(super) fn pass(&self) -> Option<Pass> {
        let passes = self.passes.lock().unwrap_or_else(PoisonError::into_inner);
        passes.clone().map(|alive| Pass { _alive: alive })
    }

    pub(super) fn is_open(&self) -> bool {
        let passes = self.passes.lock().unwrap_or_else(PoisonError::into_inner);
        passes.is_some()
    }

    /// Lets nobody pass any more: how many passes are held.
    pub(super) fn close(&self) -> usize {
        let mut passes = self.passes.lock().unwrap_or_else(PoisonError::into_inner);
        // One of the senders is the gate's own.
        passes.take().map_or(0, |own| own.strong_count() - 1)
    }
}

impl Passed {
    /// Waits until the gate is closed and no pass is held.
    pub(super) async fn done(&mut self) {
        let _ = self.0.recv().await;
    }
}

/// The signals that end the server.
pub(super) struct Signals {
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    /// Signals that come from now on are seen.
    ///
    /// # Errors
    /// The system does not let them be watched.
    pub(super) fn watch() -> io::Result<Self> {
        #[cfg(unix)]
        {
            use tokio::signal::unix::{SignalKind, signal};
            Ok(Self {
                terminate: signal(SignalKind::terminate())?,
                interrupt: signal(SignalKind::interrupt())?,
            })
        }
        #[cfg(not(unix))]
        Ok(Self {})
    }

    /// Waits for the next one.
    pub(super) async fn next(&mut self) {
        #[cfg(unix)]
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
        #[cfg(not(unix))]
        let _ = tokio::signal::ctrl_c().await;
    }
}

/// Waits for `work`, but no longer than `grace`, nor than to the next signal; whether it came to its end.
pub(super) async fn within(
    grace: Duration,
    signals: &mut Signals,
    work: impl Future<Output = ()>,
) -> bool {
    tokio::select! {
        // Work that is done is done, also where there is no time for any.
        biased;
        () = work => true,
        () = signals.next() => false,
        () = tokio::time::sleep(grace) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request that begins while the server counts those that run must not be missed.
    #[tokio::test(flavor = "current_thread")]
    async fn a_closed_gate_waits_for_those_that_passed_and_lets_no_other_pass() {
        let (gate, mut passed) = Gate::new();
        let (first, second) = (gate.pass().unwrap(), gate.pass().unwrap());
        let short = Duration::from_millis(20);
        drop(first);
        assert_eq!(gate.close(), 1);
        assert!(gate.pass().is_none() && !gate.is_open());
        assert!(
            tokio::time::timeout(short, passed.done()).await.is_err(),
            "one runs still"
        );
        drop(second);
        passed.done().await;
    }
}
