//! A set of batch rows: of each request a suffix of its rows in the step.

use core::ops::Range;

use crate::{Position, RowCount, RowIdx};

/// Some of a batch's rows, in batch order.
///
/// Of every request the set holds a suffix of the request's rows in the step, perhaps none and
/// perhaps all, so the rows of request `r` sit at the last positions before its `seq_len`. Sets are
/// made by planning alone; their rows are ascending and within the batch by construction.
#[derive(Clone, Copy, Debug)]
pub struct RowSet<'a> {
    pub(crate) rows: Rows<'a>,
    /// Offsets of the requests within the set; one more than there are requests.
    pub(crate) query_start_loc: &'a [u32],
    /// Offsets of the requests within the batch.
    pub(crate) batch_start_loc: &'a [u32],
    /// Length of each sequence after the step.
    pub(crate) seq_lens: &'a [u32],
}

/// The row indices of a [`RowSet`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows<'a> {
    /// Every row of the batch, in order: nothing to gather, and no list is kept.
    Whole,
    /// These rows of the batch, ascending.
    Listed(&'a [u32]),
}

impl<'a> RowSet<'a> {
    /// The batch indices of the rows, ascending.
    pub const fn rows(&self) -> Rows<'a> {
        self.rows
    }

    /// Whether the set is the whole batch.
    pub const fn is_whole(&self) -> bool {
        matches!(self.rows, Rows::Whole)
    }

    /// Whether the set holds no row.
    pub fn is_empty(&self) -> bool {
        self.n_rows().get() == 0
    }

    /// Rows in the set.
    pub fn n_rows(&self) -> RowCount {
        RowCount::new(last(self.query_start_loc))
    }

    /// Rows in the batch that the set is part of.
    pub fn n_batch_rows(&self) -> RowCount {
        RowCount::new(last(self.batch_start_loc))
    }

    /// Requests in the batch, those without a row in the set among them.
    pub const fn n_requests(&self) -> usize {
        self.seq_lens.len()
    }

    /// Offsets of the requests within the set: request `r` has the rows
    /// `query_start_loc[r]..query_start_loc[r + 1]` of it. One more than there are requests.
    pub const fn query_start_loc(&self) -> &'a [u32] {
        self.query_start_loc
    }

    /// How many rows of request `r` are in the set.
    ///
    /// # Panics
    ///
    /// If the batch has no request `r`.
    pub fn n_rows_of(&self, r: usize) -> RowCount {
        RowCount::new(self.query_start_loc[r + 1] - self.query_start_loc[r])
    }

    /// How many rows of the batch before request `r` are not in the set; for `r` the number of
    /// requests, how many at all.
    ///
    /// # Panics
    ///
    /// If `r` is above the number of requests.
    pub fn dropped_before(&self, r: usize) -> RowCount {
        RowCount::new(self.batch_start_loc[r] - self.query_start_loc[r])
    }

    /// Of each request the contiguous batch rows in the set, an empty range where it has none.
    pub fn ranges(&self) -> impl ExactSizeIterator<Item = Range<u32>> + 'a {
        let set = *self;
        (0..set.n_requests()).map(move |r| {
            let end = set.batch_start_loc[r + 1];
            end - set.n_rows_of(r).get()..end
        })
    }

    /// The batch indices of the rows, whether listed or not.
    pub fn indices(&self) -> impl Iterator<Item = RowIdx> + 'a {
        self.ranges().flatten().map(RowIdx::new)
    }

    /// The position of every row in its sequence.
    pub fn positions(&self) -> impl Iterator<Item = Position> + 'a {
        let set = *self;
        (0..set.n_requests()).flat_map(move |r| {
            let seq_len = set.seq_lens[r];
            (seq_len - set.n_rows_of(r).get()..seq_len).map(Position::new)
        })
    }

    /// Of each request, where its rows of this set lie in `outer`, which holds them all.
    pub(crate) fn ranges_within(
        &self,
        outer: &Self,
    ) -> impl ExactSizeIterator<Item = Range<u32>> + 'a {
        let (inner, outer) = (*self, *outer);
        (0..inner.n_requests()).map(move |r| {
            let end = outer.query_start_loc[r + 1];
            end - inner.n_rows_of(r).get()..end
        })
    }
}

/// Two sets are equal when they hold the same rows of batches of the same shape.
impl PartialEq for RowSet<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.query_start_loc == other.query_start_loc
            && self.batch_start_loc == other.batch_start_loc
            && self.seq_lens == other.seq_lens
    }
}

impl Eq for RowSet<'_> {}

/// The total at the end of a list of offsets.
fn last(offsets: &[u32]) -> u32 {
    offsets.last().copied().unwrap_or(0)
}
