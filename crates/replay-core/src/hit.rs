//! Prefix-cache hits: compressed KV is found again, window KV is not and must be rebuilt.

use crate::{Request, Slot, SlotError, Window};

/// A prefix-cache hit that is worth adopting.
///
/// The cache holds compressed KV and index keys, but no window KV. After a hit that ends at position
/// `H` the rows at `H - W .. H` are therefore computed again, for their window KV alone: what they
/// would write to the cacheable groups is there already and stays as it is.
///
/// ```
/// use replay_core::{PrefixHit, Request, Window};
///
/// let window = Window::new(8)?;
/// assert_eq!(PrefixHit::adopt(8, window), None); // all of it would be computed again
///
/// let hit = PrefixHit::adopt(16, window).expect("longer than the window");
/// assert_eq!(hit.replay_start(), 8);
/// // The first step after the hit, on a prompt of 20 tokens: 8 rows to rebuild and 4 new ones.
/// let request = Request { replay_start: 8, ..Request::prefill(20, 8..20) };
/// assert_eq!(request.rebuilt_rows(window), 8);
/// # Ok::<(), replay_core::WindowError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PrefixHit {
    end: u32,
    replay_start: u32,
}

impl PrefixHit {
    /// A hit on the first `end` tokens; `None` when it is not above the window, since then every row
    /// of it would be computed again, and rewinding could write to shared entries.
    pub const fn adopt(end: u32, window: Window) -> Option<Self> {
        if end <= window.get() {
            return None;
        }
        Some(Self {
            end,
            replay_start: end - window.get(),
        })
    }

    /// `H`: the position after the last token of the hit, which is the first whose cacheable entries
    /// are new.
    pub const fn end(self) -> u32 {
        self.end
    }

    /// `H - W`: where the request's first step starts, and the first position for which it will hold
    /// window KV. At least 1, which is how a hit is told from a cold request.
    pub const fn replay_start(self) -> u32 {
        self.replay_start
    }
}

impl Request {
    /// How many of the step's rows, from its first on, only rebuild window KV after a prefix hit.
    pub const fn rebuilt_rows(&self, window: Window) -> u32 {
        if self.replay_start == 0 {
            return 0;
        }
        let hit_end = self.replay_start.saturating_add(window.get());
        let rebuilt = hit_end.saturating_sub(self.start());
        if rebuilt < self.query_len {
            rebuilt
        } else {
            self.query_len
        }
    }
}

/// Pads, in a batch's slots of a cacheable group (compressed KV, index keys), those of the rows that
/// only rebuild window KV: cached entries stay as they are. Slots of the window group are left alone
/// by not calling this on them.
///
/// ```
/// use replay_core::{Request, Slot, Window, pad_rebuilt_slots};
///
/// let requests = [
///     Request::decode(4, 5),
///     Request { replay_start: 2, ..Request::prefill(8, 2..8) }, // the hit ended at 6
/// ];
/// let mut slots = [50_i64, 92, 93, 94, 95, 96, 97];
/// pad_rebuilt_slots(&requests, Window::new(4)?, &mut slots)?;
/// let pad = i64::PAD;
/// assert_eq!(slots, [50, pad, pad, pad, pad, 96, 97]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// [`SlotError::WrongLength`] when there is not one slot per row of the batch; no slot is padded then.
pub fn pad_rebuilt_slots<S: Slot>(
    requests: &[Request],
    window: Window,
    slots: &mut [S],
) -> Result<(), SlotError> {
    let rows = requests.iter().map(|request| request.query_len as usize);
    // More rows than a machine can address are not the slots' number either.
    let expected = rows.fold(0, usize::saturating_add);
    if slots.len() != expected {
        return Err(SlotError::WrongLength {
            expected,
            got: slots.len(),
        });
    }
    let mut rest = slots;
    for request in requests {
        let (rows, after) = rest.split_at_mut(request.query_len as usize);
        rows[..request.rebuilt_rows(window) as usize].fill(S::PAD);
        rest = after;
    }
    Ok(())
}
