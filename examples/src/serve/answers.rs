//! Updates on their way from the engine's thread to a request's task.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use deepseek_model::engine::Update;
use tokio::sync::mpsc;

use super::metrics::Stopwatch;
use super::shutdown::Pass;

/// Updates that wait for a client that does not read, for each of its texts. Behind those that the
/// connection holds, they are what a slow reader may take of the memory.
pub(super) const QUEUE: usize = 512;

type Sender = mpsc::Sender<(usize, Update)>;

/// Texts of one request while they are ordered.
pub(super) struct Orders {
    sender: Sender,
    answers: Answers,
}

/// What comes of them. Dropped, it cancels those that have not ended.
pub(super) struct Answers {
    receiver: mpsc::Receiver<(usize, Update)>,
    cancelled: Vec<Arc<AtomicBool>>,
    _pass: Pass,
}

impl Orders {
    /// For so many texts.
    pub(super) fn new(texts: usize, pass: Pass) -> Self {
        let (sender, receiver) = mpsc::channel(QUEUE * texts.max(1));
        let answers = Answers {
            receiver,
            cancelled: Vec::with_capacity(texts),
            _pass: pass,
        };
        Self { sender, answers }
    }

    /// Where the updates of the next text go.
    pub(super) fn sink(&self, mut watch: Stopwatch) -> impl FnMut(Update) -> bool + Send + use<> {
        let mut send = sink(self.answers.cancelled.len(), self.sender.clone());
        move |update| {
            watch.see(&update);
            send(update)
        }
    }

    /// Adds the text that was ordered, by the flag that cancels it.
    pub(super) fn add(&mut self, cancelled: Arc<AtomicBool>) {
        self.answers.cancelled.push(cancelled);
    }

    /// All that there are.
    pub(super) fn answers(self) -> Answers {
        self.answers
    }
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
