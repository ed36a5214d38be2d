//! How a step's graph and the replay go together.

use crate::{RowCount, Window};

/// The graph that the layers of a step run in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum GraphMode {
    /// No graph: the step runs eagerly.
    #[default]
    None,
    /// One graph around the whole forward, as for uniform decode batches. It cannot break, so the
    /// replay layers stay in it on the whole batch.
    Full {
        /// Rows that the graph was captured for.
        padded_rows: RowCount,
    },
    /// A graph that can break between layers.
    Piecewise {
        /// Rows that the graph was captured for.
        padded_rows: RowCount,
    },
}

impl GraphMode {
    /// Rows that the graph was captured for.
    pub const fn padded_rows(self) -> Option<RowCount> {
        match self {
            Self::None => None,
            Self::Full { padded_rows } | Self::Piecewise { padded_rows } => Some(padded_rows),
        }
    }
}

/// The size from which a piecewise graph breaks at the cut, in padded rows. Always above the window:
/// a smaller graph has next to nothing to drop.
///
/// ```
/// use replay_core::{TrimThreshold, Window};
///
/// let window = Window::new(128)?;
/// assert_eq!(TrimThreshold::for_window(window).get(), 768);
/// assert!(TrimThreshold::new(128, window).is_err());
/// # Ok::<(), replay_core::WindowError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TrimThreshold(u32);

impl TrimThreshold {
    /// Windows in the default threshold.
    const WINDOWS: u32 = 6;

    /// A threshold of `rows` padded rows.
    ///
    /// # Errors
    ///
    /// [`ThresholdError`] when it is not above the window.
    pub const fn new(rows: u32, window: Window) -> Result<Self, ThresholdError> {
        if rows <= window.get() {
            return Err(ThresholdError {
                rows,
                window: window.get(),
            });
        }
        Ok(Self(rows))
    }

    /// The default: six windows, which is 768 for the released window of 128.
    pub const fn for_window(window: Window) -> Self {
        Self(window.get() * Self::WINDOWS)
    }

    /// The threshold in padded rows.
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// A trim threshold within the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the trim threshold must exceed the sliding window of {window} rows, got {rows}")]
pub struct ThresholdError {
    /// The refused threshold, in padded rows.
    pub rows: u32,
    /// The window, in rows.
    pub window: u32,
}
