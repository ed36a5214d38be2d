//! Where a capture stands, and which moves are legal from there. No driver call is made here.

use std::fmt;

/// Where a capture stands.
///
/// ```
/// use replay_graph::{CaptureMove, CaptureState};
///
/// let state = CaptureState::Idle.after(CaptureMove::Begin)?;
/// assert_eq!(state, CaptureState::Capturing { segment: 0 });
/// let state = state.after(CaptureMove::Break)?;
/// assert_eq!(state, CaptureState::InBreak { index: 0 });
/// assert!(state.after(CaptureMove::Finish).is_err()); // a break ends in a segment
/// # Ok::<(), replay_graph::IllegalMove>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CaptureState {
    /// Nothing has been captured. Warm-up happens here.
    Idle,
    /// The stream is captured into this segment.
    Capturing {
        /// Counted from 0.
        segment: u32,
    },
    /// The stream is not captured: the break after segment `index` runs eagerly.
    InBreak {
        /// Counted from 0; the break follows the segment of the same number.
        index: u32,
    },
    /// All segments are captured.
    Done {
        /// How many there are: one more than breaks.
        segments: u32,
    },
    /// The capture was given up. Nothing follows.
    Failed,
}

/// A move from one state to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CaptureMove {
    /// The first segment begins.
    Begin,
    /// The segment ends for a break.
    Break,
    /// The break ends and the next segment begins.
    Resume,
    /// The last segment ends.
    Finish,
    /// The capture is given up.
    Fail,
}

impl CaptureState {
    /// Every move there is.
    pub const MOVES: [CaptureMove; 5] = [
        CaptureMove::Begin,
        CaptureMove::Break,
        CaptureMove::Resume,
        CaptureMove::Finish,
        CaptureMove::Fail,
    ];

    /// The state after a move.
    ///
    /// # Errors
    ///
    /// [`IllegalMove`] if the move cannot be made from this state, or leads to more segments than
    /// u32 counts.
    pub const fn after(self, step: CaptureMove) -> Result<Self, IllegalMove> {
        Ok(match (self, step) {
            (Self::Idle, CaptureMove::Begin) => Self::Capturing { segment: 0 },
            (Self::Capturing { segment }, CaptureMove::Break) => Self::InBreak { index: segment },
            (Self::InBreak { index }, CaptureMove::Resume) if index < u32::MAX => {
                Self::Capturing { segment: index + 1 }
            }
            (Self::Capturing { segment }, CaptureMove::Finish) if segment < u32::MAX => {
                Self::Done {
                    segments: segment + 1,
                }
            }
            (
                Self::Idle | Self::Capturing { .. } | Self::InBreak { .. } | Self::Failed,
                CaptureMove::Fail,
            ) => Self::Failed,
            (from, step) => return Err(IllegalMove { from, step }),
        })
    }

    /// The segment that is captured or was captured last; 0 before the first.
    pub const fn segment(self) -> u32 {
        match self {
            Self::Capturing { segment } => segment,
            Self::InBreak { index } => index,
            Self::Done { segments } => segments.saturating_sub(1),
            Self::Idle | Self::Failed => 0,
        }
    }
}

impl fmt::Display for CaptureState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Idle => f.write_str("idle"),
            Self::Capturing { segment } => write!(f, "capturing segment {segment}"),
            Self::InBreak { index } => write!(f, "in break {index}"),
            Self::Done { segments } => write!(f, "done with {segments} segments"),
            Self::Failed => f.write_str("failed"),
        }
    }
}

impl fmt::Display for CaptureMove {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Begin => "begin",
            Self::Break => "break",
            Self::Resume => "resume",
            Self::Finish => "finish",
            Self::Fail => "fail",
        })
    }
}

/// A move that the state does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot {step} a capture that is {from}")]
pub struct IllegalMove {
    /// Where the capture stood.
    pub from: CaptureState,
    /// What was tried.
    pub step: CaptureMove,
}
