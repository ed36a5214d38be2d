//! Updates on their way from the engine's thread to a request's task.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use deepseek_model::engine::Update;
use tokio::sync::mpsc;

use super::shutdown::Pass;

/// Updates that wait for a client that does not read, for each of its texts. Behind those that the
/// connection holds, they are what a slow reader may take of the memory.
pub(super) const QUEUE: usize = 512;

type Sender = mpsc::Sender<(usize, Update)>;
pub(super) type Receiver = mpsc::Receiver<(usize, Update)>;

/// What comes of the texts of one request. Dropped, it cancels those that have not ended.
pub(super) struct Answers {
    receiver: Receiver,
    cancelled: Vec<Arc<AtomicBool>>,
    _pass: Pass,
}

/// Where the updates of so many texts go, and where they come out.
pub(super) fn channel(
    texts: usize,
) -> (
    impl Iterator<Item = impl FnMut(Update) -> bool + Send>,
    Receiver,
) {
    let (sender, receiver) = mpsc::channel(QUEUE * texts.max(1));
    let sinks = (0..texts).map(move |index| sink(index, sender.clone()));
    (sinks, receiver)
}

/// Hands updates over without waiting. Once there is no room for one, the text is given up: the engine
/// does not wait for a reader, and no update may be missing.
fn sink(index: usize, sender: Sender) -> impl FnMut(Update) -> bool + Send {
    let mut sender = Some(sender);
    move |update| {
        let sent = sender
            .as_ref()
            .is_some_and(|sender| sender.try_send((index, update)).is_ok());
        if !sent {
            sender = None;
        }
        sent
    }
}

impl Answers {
    /// Of texts that were ordered, each with the flag that cancels it.
    pub(super) fn new(receiver: Receiver, cancelled: Vec<Arc<AtomicBool>>, pass: Pass) -> Self {
        Self {
            receiver,
            cancelled,
            _pass: pass,
        }
    }

    /// The next update, with the index of its text; `None` once no other comes: if a text has not ended
    /// then, it was given up.
    pub(super) async fn next(&mut self) -> Option<(usize, Update)> {
        self.receiver.recv().await
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        for cancelled in &self.cancelled {
            cancelled.store(true, Ordering::Relaxed);
        }
    }
}
