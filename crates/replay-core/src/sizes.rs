//! The sizes for which graphs are captured.

use alloc::vec::Vec;

use crate::{RowCount, Window};

/// The row counts for which graphs, of whole steps or of the replay layers, exist: not empty, ascending, without repeats
/// or zero.
///
/// A batch runs in the smallest graph that holds it, and eagerly when none does.
///
/// ```
/// use replay_core::{CaptureSizes, RowCount};
///
/// let sizes = CaptureSizes::new(&[32, 8, 16, 8], 32)?; // order and repeats carry no meaning
/// assert_eq!(sizes.as_slice(), [8, 16, 32]);
/// assert_eq!(sizes.fit(RowCount::new(9)), Some(RowCount::new(16)));
/// assert_eq!(sizes.fit(RowCount::new(33)), None);
/// # Ok::<(), replay_core::CaptureSizesError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CaptureSizes(Vec<u32>);

impl CaptureSizes {
    /// The given sizes, each at most `max_rows`, which is what the runner's buffers hold.
    ///
    /// # Errors
    ///
    /// [`CaptureSizesError`] when there is no size, or one is zero or above `max_rows`.
    pub fn new(sizes: &[u32], max_rows: u32) -> Result<Self, CaptureSizesError> {
        if let Some(&size) = sizes.iter().find(|&&size| size > max_rows) {
            return Err(CaptureSizesError::AboveBuffers { size, max_rows });
        }
        let mut sizes = sizes.to_vec();
        sizes.sort_unstable();
        sizes.dedup();
        match sizes.first() {
            None => Err(CaptureSizesError::Empty),
            Some(0) => Err(CaptureSizesError::Zero),
            Some(_) => Ok(Self(sizes)),
        }
    }

    /// The default sizes: from the window up to `bound`, which is always the last.
    ///
    /// A trimmed request keeps a window of rows, so smaller steps would go unused; from eight windows
    /// on a step is an eighth of the power-of-two interval that it starts in (256 in 2048..4096),
    /// which bounds the padding to an eighth and the number of graphs to eight per doubling.
    ///
    /// ```
    /// use replay_core::{CaptureSizes, Window};
    ///
    /// let sizes = CaptureSizes::ladder(Window::new(8)?, 100)?;
    /// assert_eq!(sizes.as_slice(), [8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 100]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CaptureSizesError::Empty`] when `bound` is zero.
    pub fn ladder(window: Window, bound: u32) -> Result<Self, CaptureSizesError> {
        if bound == 0 {
            return Err(CaptureSizesError::Empty);
        }
        let window = window.get();
        let mut sizes = Vec::new();
        let mut size = window;
        while size < bound {
            sizes.push(size);
            let eighth = (1 << size.ilog2()) / 8;
            size = size.saturating_add(window.max(eighth));
        }
        sizes.push(bound);
        Ok(Self(sizes))
    }

    /// The bound of the default sizes: no replay batch is larger than a window per sequence, and none
    /// is captured above the largest model graph.
    pub fn bound(window: Window, max_captured: u32, max_seqs: u32) -> u32 {
        window.get().saturating_mul(max_seqs).min(max_captured)
    }

    /// The smallest size that holds `n_rows`; `None` above the largest.
    pub fn fit(&self, n_rows: RowCount) -> Option<RowCount> {
        let at = self.0.partition_point(|&size| size < n_rows.get());
        self.0.get(at).copied().map(RowCount::new)
    }

    /// The largest size; graphs of it are captured first, and fixed buffers are made for it.
    pub fn largest(&self) -> RowCount {
        RowCount::new(self.0[self.0.len() - 1])
    }

    /// All sizes, ascending.
    pub fn as_slice(&self) -> &[u32] {
        &self.0
    }
}

/// A list of sizes that no runner could capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CaptureSizesError {
    /// No size at all.
    #[error("no size to capture graphs for")]
    Empty,
    /// A graph without rows.
    #[error("a graph must hold at least one row, got size 0")]
    Zero,
    /// The runner's buffers are smaller.
    #[error("graph size {size} is above {max_rows}, the most rows that a graph may have")]
    AboveBuffers {
        /// The refused size, in rows.
        size: u32,
        /// Rows that a graph may have.
        max_rows: u32,
    },
}
