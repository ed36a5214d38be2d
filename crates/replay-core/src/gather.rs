//! Host buffers of a replay batch: what belongs to the rows of a set, gathered and padded to a graph.

use alloc::vec::Vec;

use crate::{RowCount, RowSet, Rows};

/// A place in a KV cache that a row writes to, with one value that means "write nothing".
///
/// The value is the all-ones pattern of each width, which is `-1` where the type has a sign.
pub trait Slot: Copy + PartialEq {
    /// The slot of a row that writes nothing.
    const PAD: Self;
}

impl Slot for i32 {
    const PAD: Self = -1;
}

impl Slot for i64 {
    const PAD: Self = -1;
}

impl Slot for u32 {
    const PAD: Self = Self::MAX;
}

impl Slot for u64 {
    const PAD: Self = Self::MAX;
}

/// Buffers that do not fit the batch or its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SlotError {
    /// A per-row buffer that is not the batch's.
    #[error("expected one entry for each of the {expected} rows of the batch, got {got}")]
    WrongLength {
        /// Rows of the batch.
        expected: usize,
        /// Entries of the buffer.
        got: usize,
    },
    /// A graph of fewer rows than are gathered.
    #[error("cannot pad {n_rows} rows to {padded_rows}")]
    PaddedBelowRows {
        /// Rows of the set.
        n_rows: u32,
        /// Rows of the graph.
        padded_rows: u32,
    },
    /// A graph of fewer requests than the batch has.
    #[error("cannot pad the offsets of {n_requests} requests to {padded_requests}")]
    PaddedBelowRequests {
        /// Requests of the batch.
        n_requests: usize,
        /// Requests of the graph.
        padded_requests: usize,
    },
    /// There is no memory for what is gathered, or for the padding.
    #[error("no memory for {entries} gathered entries")]
    NoMemory {
        /// Entries of the buffer that is filled.
        entries: usize,
    },
    /// A graph of more requests than a batch can have, whose rows are counted in 32 bits.
    #[error(
        "cannot pad offsets to {padded_requests} requests: expected at most {}",
        u32::MAX - 1
    )]
    TooManyRequests {
        /// Requests of the graph.
        padded_requests: usize,
    },
}

/// Gathers. Each replaces what `out` held, and allocates only when `out` must grow.
impl RowSet<'_> {
    /// What belongs to the rows of the set, of a buffer with one entry per row of the batch. Every
    /// such buffer must follow the same rows: top-k choices, token ids, mixing weights.
    ///
    /// ```
    /// # use core::num::NonZeroU32;
    /// # use replay_core::{LayerSchedule, Planner, PlannerConfig, ReplayLayers, ReplayPolicy, Request, Window};
    /// # let layers = ReplayLayers::from_schedule(&LayerSchedule {
    /// #     num_layers: 6, kv_sources: &[3], compress_ratios: &[], engram_layers: &[],
    /// # })?;
    /// # let planner = Planner::new(PlannerConfig {
    /// #     window: Window::new(2)?, layers, policy: ReplayPolicy::PromptTail, sampled_rows: NonZeroU32::MIN,
    /// # });
    /// let plan = planner.plan(&[Request::prefill(5, 0..5)])?;
    /// let mut ids = Vec::new();
    /// plan.layer(0).running.gather_into(&["a", "b", "c", "d", "e"], &mut ids)?;
    /// assert_eq!(ids, ["d", "e"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`SlotError::WrongLength`] when `per_row` has not one entry per row of the batch, and
    /// [`SlotError::NoMemory`].
    pub fn gather_into<T: Clone>(&self, per_row: &[T], out: &mut Vec<T>) -> Result<(), SlotError> {
        self.check_len(per_row.len())?;
        refill(out, self.n_rows().as_usize())?;
        match self.rows() {
            Rows::Whole => out.extend_from_slice(per_row),
            Rows::Listed(_) => {
                for range in self.ranges() {
                    out.extend_from_slice(&per_row[range.start as usize..range.end as usize]);
                }
            }
        }
        Ok(())
    }

    /// [`gather_into`](Self::gather_into) in place: a kept row only ever moves towards the front, so
    /// none is overwritten before it has moved.
    ///
    /// # Errors
    ///
    /// [`SlotError::WrongLength`] when `per_row` has not one entry per row of the batch; it is left
    /// alone then.
    pub fn compact<T>(&self, per_row: &mut Vec<T>) -> Result<(), SlotError> {
        self.check_len(per_row.len())?;
        let mut kept = 0;
        for from in self.ranges().flatten() {
            per_row.swap(kept, from as usize);
            kept += 1;
        }
        per_row.truncate(kept);
        Ok(())
    }

    /// The slots of the rows of the set, filled up with the pad slot to the `padded_rows` of a graph:
    /// padding writes nowhere.
    ///
    /// # Errors
    ///
    /// [`SlotError`] when `batch` has not one slot per row of the batch, or the graph holds fewer rows
    /// than the set or more than there is memory for.
    pub fn gather_slots<S: Slot>(
        &self,
        batch: &[S],
        padded_rows: RowCount,
        out: &mut Vec<S>,
    ) -> Result<(), SlotError> {
        let (n_rows, padded_rows) = (self.n_rows().get(), padded_rows.get());
        if padded_rows < n_rows {
            return Err(SlotError::PaddedBelowRows {
                n_rows,
                padded_rows,
            });
        }
        self.check_len(batch.len())?;
        refill(out, padded_rows as usize)?;
        self.gather_into(batch, out)?;
        out.resize(padded_rows as usize, S::PAD);
        Ok(())
    }

    /// The offsets of the requests within the set for a graph captured with `padded_requests` of
    /// them: those past the batch's have no row.
    ///
    /// # Errors
    ///
    /// [`SlotError::PaddedBelowRequests`] when the batch has more requests,
    /// [`SlotError::TooManyRequests`] when no batch can have as many, and [`SlotError::NoMemory`].
    pub fn pad_query_start_loc(
        &self,
        padded_requests: usize,
        out: &mut Vec<u32>,
    ) -> Result<(), SlotError> {
        let n_requests = self.n_requests();
        if padded_requests < n_requests {
            return Err(SlotError::PaddedBelowRequests {
                n_requests,
                padded_requests,
            });
        }
        // One offset more is a number in 32 bits still.
        if padded_requests >= u32::MAX as usize {
            return Err(SlotError::TooManyRequests { padded_requests });
        }
        refill(out, padded_requests + 1)?;
        out.extend_from_slice(self.query_start_loc());
        out.resize(padded_requests + 1, self.n_rows().get());
        Ok(())
    }

    fn check_len(&self, got: usize) -> Result<(), SlotError> {
        let expected = self.n_batch_rows().as_usize();
        if got == expected {
            Ok(())
        } else {
            Err(SlotError::WrongLength { expected, got })
        }
    }
}

/// Empties a buffer that `entries` are about to go to.
fn refill<T>(out: &mut Vec<T>, entries: usize) -> Result<(), SlotError> {
    out.clear();
    let room = out.try_reserve(entries);
    room.map_err(|_| SlotError::NoMemory { entries })
}
