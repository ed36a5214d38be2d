//! Which model a cache's values are of.

use std::sync::atomic::{AtomicU64, Ordering};

/// A loaded model, told apart from every other in this process, also of the same files: they may be
/// loaded in another way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ModelId(u64);

impl ModelId {
    /// An id that no other model has.
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // Nothing but the number is shared, so no order with other memory is needed.
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}
