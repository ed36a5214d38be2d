//! The engine with its thread: requests from anywhere, one thread that drives the device.

use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread::JoinHandle,
};

use super::{
    EngineCore, EngineError, EngineOptions, EngineStats,
    request::{EndReason, EngineRequest, RequestId, Update},
};
use crate::{CaptureReport, Error, Model, Result};

/// Where the updates of a request go; `false` when nobody wants more of them.
type Sink = Box<dyn FnMut(Update) -> bool + Send>;

/// A request on its way to the thread.
struct Order {
    request: EngineRequest,
    sink: Sink,
    cancelled: Arc<AtomicBool>,
}

/// What the thread and its clients share.
#[derive(Debug, Default)]
struct Shared {
    /// Requests that were taken in and have not ended.
    held: AtomicUsize,
    /// Those of them that have not begun to run.
    waiting: AtomicUsize,
    /// No step runs any more.
    abandoned: AtomicBool,
    stats: Mutex<EngineStats>,
}

// Only the numbers matter, so no order with other memory is needed.
impl Shared {
    /// Counts so many more requests, if there are places for all; else how many there are already.
    fn enter(&self, more: usize, places: usize) -> Result<(), usize> {
        let all = |held: usize| held.checked_add(more).filter(|held| *held <= places);
        let held = &self.held;
        held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, all)?;
        self.waiting.fetch_add(more, Ordering::Relaxed);
        Ok(())
    }

    /// A request begins to run, or never will.
    fn begin(&self) {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    /// A request has ended.
    fn leave(&self) {
        self.held.fetch_sub(1, Ordering::Relaxed);
    }
}

/// An [`EngineCore`] on a thread of its own. Requests can come from many threads.
///
/// Dropped, it gives up what runs: each request that has not ended gets [`Update::Failed`].
/// [`Self::finish`] lets them end.
#[derive(Debug)]
pub struct Engine {
    model: Arc<Model>,
    options: EngineOptions,
    fits: usize,
    captured: CaptureReport,
    capture_failure: Option<Error>,
    shared: Arc<Shared>,
    /// `None` once no more are taken.
    orders: Option<mpsc::Sender<Order>>,
    thread: Option<JoinHandle<()>>,
}

/// The updates of a request, as they come; the last is [`Update::Finished`] or [`Update::Failed`].
/// Dropped, the request is cancelled.
#[derive(Debug)]
pub struct Updates {
    receiver: mpsc::Receiver<Update>,
    cancelled: Arc<AtomicBool>,
    ended: bool,
}

impl Engine {
    /// Starts the thread, which makes the cache and captures the graphs; `progress` is told of the
    /// latter how many are done, of how many. Graphs save time, and texts come without them, too: where
    /// they cannot be captured, [`Self::capture_failure`] says why.
    ///
    /// # Errors
    /// As [`EngineCore::new`], or if there is no thread to be had.
    pub fn start(
        model: impl Into<Arc<Model>>,
        options: EngineOptions,
        progress: impl FnMut(usize, usize) + Send + 'static,
    ) -> Result<Self> {
        let model = model.into();
        let (orders, taken) = mpsc::channel();
        let (ready, started) = mpsc::sync_channel(1);
        let shared = Arc::new(Shared::default());
        let of_thread = (model.clone(), options.clone(), shared.clone());
        let run = move || {
            let (model, options, shared) = of_thread;
            match EngineCore::new(model, options) {
                Ok(mut core) => {
                    let failure = core.capture(progress).err();
                    let (fits, captured) = (core.fits(), core.captured());
                    let worker = Worker::new(core, shared);
                    // Nobody waits if the starting thread is gone.
                    let _ = ready.send(Ok((fits, captured, failure)));
                    worker.run(&taken);
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                }
            }
        };
        let thread = std::thread::Builder::new().name("engine".into()).spawn(run);
        let thread = thread.map_err(Error::NoThread)?;
        let (fits, captured, capture_failure) =
            started.recv().map_err(|_| Error::EngineStopped)??;
        Ok(Self {
            model,
            options,
            fits,
            captured,
            capture_failure,
            shared,
            orders: Some(orders),
            thread: Some(thread),
        })
    }

    /// Why graphs could not be captured, the first time that it is asked; steps run without them.
    pub fn capture_failure(&mut self) -> Option<Error> {
        self.capture_failure.take()
    }

    /// The graphs that were captured.
    pub fn captured(&self) -> &CaptureReport {
        &self.captured
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Tokens that prompt and output of one request can have at most.
    pub fn max_tokens(&self) -> usize {
        self.fits.min(self.model.config().max_positions)
    }

    /// Takes a request in. Does not wait for the device.
    ///
    /// # Errors
    /// As [`EngineCore::submit`], or if the engine has stopped.
    pub fn submit(&self, request: EngineRequest) -> Result<Updates, EngineError> {
        let (sender, receiver) = mpsc::channel();
        let cancelled = self.submit_to(request, move |update| sender.send(update).is_ok())?;
        Ok(Updates {
            receiver,
            cancelled,
            ended: false,
        })
    }

    /// The same; `sink` gets the updates, on the engine's thread, and must not block. The request is
    /// cancelled when it gives `false`, when it panics, or when the flag that this function gives is set.
    /// It must not drop the engine, whose end waits for the thread.
    ///
    /// # Errors
    /// As [`Self::submit`].
    pub fn submit_to(
        &self,
        request: EngineRequest,
        sink: impl FnMut(Update) -> bool + Send + 'static,
    ) -> Result<Arc<AtomicBool>, EngineError> {
        let mut flags = self.submit_all(vec![(request, sink)])?;
        // There is one for each request.
        Ok(flags.pop().unwrap_or_default())
    }

    /// The same for several requests, of which all are taken in or none: none that is refused ever holds
    /// a place. Gives a flag for each.
    ///
    /// # Errors
    /// As [`Self::submit`], of any of them.
    pub fn submit_all<S>(
        &self,
        requests: Vec<(EngineRequest, S)>,
    ) -> Result<Vec<Arc<AtomicBool>>, EngineError>
    where
        S: FnMut(Update) -> bool + Send + 'static,
    {
        for (request, _) in &requests {
            super::core::check(&self.model, &self.options, request, self.fits)?;
        }
        let orders = self.orders.as_ref().ok_or(Error::EngineStopped)?;
        let asked = requests.len();
        let entered = self.shared.enter(asked, self.options.holds());
        entered.map_err(|held| self.options.full(held, asked))?;
        let mut flags = Vec::with_capacity(asked);
        for (request, sink) in requests {
            let cancelled = Arc::new(AtomicBool::new(false));
            let order = Order {
                request,
                sink: Box::new(sink),
                cancelled: cancelled.clone(),
            };
            // Those before it have been told by the thread that it has ended.
            if orders.send(order).is_err() {
                for _ in flags.len()..asked {
                    self.shared.begin();
                    self.shared.leave();
                }
                return Err(Error::EngineStopped.into());
            }
            flags.push(cancelled);
        }
        Ok(flags)
    }

    /// Whether it can still run steps. It cannot after a panic in one.
    pub fn is_running(&self) -> bool {
        let thread = self.thread.as_ref();
        thread.is_some_and(|thread| !thread.is_finished())
    }

    /// What it has done, and what is in it.
    pub fn stats(&self) -> EngineStats {
        let stats = self.shared.stats.lock();
        let mut stats = *stats.unwrap_or_else(PoisonError::into_inner);
        // Some may not have come to the thread yet.
        stats.waiting = stats
            .waiting
            .max(self.shared.waiting.load(Ordering::Relaxed));
        stats
    }

    /// Takes no more requests, and waits until those that it has are done.
    pub fn finish(mut self) {
        self.stop();
    }

    fn stop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            // A panic there has been told to every request.
            let _ = thread.join();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shared.abandoned.store(true, Ordering::Relaxed);
        self.stop();
    }
}

impl Iterator for Updates {
    type Item = Update;

    fn next(&mut self) -> Option<Update> {
        if self.ended {
            return None;
        }
        let update = self.receiver.recv();
        let update = update.unwrap_or_else(|_| Update::Failed(Arc::new(Error::EngineStopped)));
        self.ended = update.is_last();
        Some(update)
    }
}

impl Drop for Updates {
    fn drop(&mut self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }
}

/// A request that the thread has.
struct Client {
    sink: Sink,
    cancelled: Arc<AtomicBool>,
    started: bool,
}

/// The thread's side.
struct Worker {
    core: EngineCore,
    shared: Arc<Shared>,
    clients: HashMap<RequestId, Client>,
}

impl Worker {
    fn new(core: EngineCore, shared: Arc<Shared>) -> Self {
        let worker = Self {
            core,
            shared,
            clients: HashMap::new(),
        };
        worker.publish();
        worker
    }

    /// Serves, and tells those who still wait at the end that there is one.
    fn run(mut self, orders: &mpsc::Receiver<Order>) {
        self.serve(orders);
        let stopped = || Update::Failed(Arc::new(Error::EngineStopped));
        for client in self.clients.values_mut() {
            tell(&mut client.sink, stopped());
        }
        for mut order in orders.try_iter() {
            tell(&mut order.sink, stopped());
        }
    }

    /// Runs until nobody can order any more and all that was ordered is done, or all is given up.
    fn serve(&mut self, orders: &mpsc::Receiver<Order>) {
        let mut open = true;
        loop {
            if self.core.is_idle() {
                if !open {
                    return;
                }
                match orders.recv() {
                    Ok(order) => self.take(order),
                    Err(_) => return,
                }
            }
            loop {
                match orders.try_recv() {
                    Ok(order) => self.take(order),
                    Err(mpsc::TryRecvError::Empty) => break,
                    Err(mpsc::TryRecvError::Disconnected) => {
                        open = false;
                        break;
                    }
                }
            }
            if self.shared.abandoned.load(Ordering::Relaxed) {
                return;
            }
            self.cancel();
            // After a panic nothing is known of the cache.
            let Ok(updates) = catch_unwind(AssertUnwindSafe(|| self.core.step())) else {
                return;
            };
            for (id, update) in updates {
                self.deliver(id, update);
            }
            self.publish();
        }
    }

    fn take(&mut self, order: Order) {
        let Order {
            request,
            sink,
            cancelled,
        } = order;
        let mut client = Client {
            sink,
            cancelled,
            started: false,
        };
        match self.core.submit(request) {
            Ok(id) => {
                self.clients.insert(id, client);
            }
            // It was checked when it was ordered.
            Err(error) => {
                self.shared.begin();
                self.shared.leave();
                let error = Error::from(error);
                tell(&mut client.sink, Update::Failed(Arc::new(error)));
            }
        }
    }

    /// Ends the requests that nobody wants any more.
    fn cancel(&mut self) {
        let gone = |client: &Client| client.cancelled.load(Ordering::Relaxed);
        let clients = self.clients.iter();
        let ids: Vec<_> = clients
            .filter(|(_, c)| gone(c))
            .map(|(id, _)| *id)
            .collect();
        for id in ids {
            self.core.cancel(id);
            let end = Update::Finished {
                reason: EndReason::Cancelled,
                text: String::new(),
            };
            self.deliver(id, end);
        }
    }

    fn deliver(&mut self, id: RequestId, update: Update) {
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        let is_last = update.is_last();
        if !client.started && (is_last || matches!(update, Update::Started { .. })) {
            client.started = true;
            self.shared.begin();
        }
        if is_last {
            self.shared.leave();
        }
        let wanted = tell(&mut client.sink, update);
        if is_last {
            self.clients.remove(&id);
        } else if !wanted {
            client.cancelled.store(true, Ordering::Relaxed);
        }
    }

    fn publish(&self) {
        let stats = self.shared.stats.lock();
        *stats.unwrap_or_else(PoisonError::into_inner) = self.core.stats();
    }
}

/// Whether a client wants more. One that panics wants no more, and is no harm to others.
fn tell(sink: &mut Sink, update: Update) -> bool {
    catch_unwind(AssertUnwindSafe(|| sink(update))).unwrap_or(false)
}

#[cfg(test)]
mod tests;
