//! How far a load has come.

use std::sync::{Mutex, PoisonError};

/// How far a load has come. A tensor counts when it is dequantised, its scales with it.
///
/// N-gram tables stay in the file and count nowhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LoadProgress {
    /// Checkpoint tensors dequantised so far.
    pub tensors_done: usize,
    /// Checkpoint tensors to dequantise.
    pub tensors_total: usize,
    /// Bytes of the file decoded so far.
    pub bytes_done: usize,
    /// Bytes of the file to decode.
    pub bytes_total: usize,
}

/// Counts up and tells the caller, one call at a time, so that what it sees only grows.
pub(super) struct Meter<'a> {
    state: Mutex<LoadProgress>,
    tell: &'a (dyn Fn(LoadProgress) + Sync),
}

impl<'a> Meter<'a> {
    pub(super) fn new(total: LoadProgress, tell: &'a (dyn Fn(LoadProgress) + Sync)) -> Self {
        Self {
            state: Mutex::new(total),
            tell,
        }
    }

    pub(super) fn add_tensor(&self, bytes: usize) {
        // Counters are whole even if the caller's function panicked in another thread.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.tensors_done += 1;
        state.bytes_done += bytes;
        (self.tell)(*state);
    }
}
