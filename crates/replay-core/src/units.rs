//! Units: the sliding window, token positions, row indices and row counts.
//!
//! Single values cross the API as these types, so a position is never taken for a count. Bulk data
//! (row lists, offsets, KV bounds) stays `&[u32]`, the form in which a device takes it.

use core::fmt;

/// Length of the sliding window, in tokens: a row attends to itself and the `W - 1` rows before it.
///
/// From the model's configuration (`sliding_window`; 128 in the released DeepSeek-V4.1). Never zero.
///
/// ```
/// use replay_core::Window;
///
/// let window = Window::new(128)?;
/// assert_eq!(window.get(), 128);
/// assert!(Window::new(0).is_err());
/// # Ok::<(), replay_core::WindowError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "u32", into = "u32"))]
pub struct Window(u32);

impl Window {
    /// The longest window that is accepted, in tokens: far above any model's, and small enough that
    /// the multiples of a window taken in this crate stay within `u32`.
    pub const MAX: u32 = 1 << 24;

    /// A window of `tokens` tokens.
    ///
    /// # Errors
    ///
    /// [`WindowError`] when `tokens` is zero or above [`Window::MAX`].
    pub const fn new(tokens: u32) -> Result<Self, WindowError> {
        if tokens == 0 || tokens > Self::MAX {
            return Err(WindowError { tokens });
        }
        Ok(Self(tokens))
    }

    /// The window in tokens.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The positions whose window KV the row at `position` reads in a layer that holds window KV
    /// from `kv_start` on: `max(kv_start, position - W + 1) ..= position`, as a half-open range.
    ///
    /// Never empty at a position of a sequence: a row always reads its own key, even below `kv_start`. Such rows occur when a
    /// graph keeps the whole batch although the policy would have dropped some of it. No row that
    /// counts reads their result, but an empty softmax there would put a NaN into the cache.
    ///
    /// No sequence whose length is a `u32` has the position `u32::MAX`; there the range ends before the
    /// row itself.
    ///
    /// ```
    /// use replay_core::{Position, Window};
    ///
    /// let window = Window::new(8)?;
    /// let keys = |x, kv_start| window.keys(Position::new(x), Position::new(kv_start));
    /// assert_eq!(keys(20, 0), 13..21); // a full window
    /// assert_eq!(keys(20, 18), 18..21); // clipped below
    /// assert_eq!(keys(3, 0), 0..4); // the sequence's start
    /// assert_eq!(keys(3, 12), 3..4); // below the bound: itself alone
    /// # Ok::<(), replay_core::WindowError>(())
    /// ```
    pub fn keys(self, position: Position, kv_start: Position) -> core::ops::Range<u32> {
        let x = position.get();
        let end = x.saturating_add(1);
        let oldest = end.saturating_sub(self.0).max(kv_start.get());
        oldest.min(x)..end
    }
}

impl TryFrom<u32> for Window {
    type Error = WindowError;

    fn try_from(tokens: u32) -> Result<Self, WindowError> {
        Self::new(tokens)
    }
}

impl From<Window> for u32 {
    fn from(window: Window) -> u32 {
        window.0
    }
}

/// The sliding window is zero or absurdly long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the sliding window must be 1 to {} tokens, got {tokens}", Window::MAX)]
pub struct WindowError {
    /// The refused length, in tokens.
    pub tokens: u32,
}

/// A newtype over `u32` with a name for its unit.
macro_rules! unit {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[cfg_attr(feature = "serde", serde(transparent))]
        pub struct $name(u32);

        impl $name {
            /// Wraps a plain number.
            pub const fn new(value: u32) -> Self {
                Self(value)
            }

            /// The plain number.
            pub const fn get(self) -> u32 {
                self.0
            }

            /// The plain number as an index or a length.
            pub const fn as_usize(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

unit! {
    /// A token's place in its sequence; the first token is at 0.
    Position
}

unit! {
    /// A row's place in the packed batch of a step; the first row is 0.
    RowIdx
}

unit! {
    /// A number of rows.
    RowCount
}
