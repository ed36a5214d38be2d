//! The rule: where the running rows of a request begin in each replay layer, and from which position
//! on that layer holds window KV.
//!
//! # Derivation of the exact halo
//!
//! Number the replay layers `0` (the cut) to `D`. The output of the row at position `x` in layer `i`
//! depends on the layer's window KV at `x - W + 1 ..= x`, and window KV at `y` depends on what layer
//! `i - 1` put out at `y`. (Compressed KV is complete before the first replay layer and depends on
//! no row of theirs.) Let the outputs of the prompt's last `R` rows be read, so that layer `D` must
//! be right from position `p - R` on. If layer `i` must be right from `p - n`, then its window KV
//! must be from `p - n - (W - 1)`, and so must layer `i - 1`. Hence layer `i` runs the prompt's last
//!
//! ```text
//! n(i) = R + (D - i) * (W - 1)
//! ```
//!
//! rows, and for `i >= 1` holds right window KV from `p - n(i - 1)` on; the cut holds it from the
//! start, since it writes the KV of every row. Positions are counted from the end of the *prompt*,
//! so which rows run does not depend on how the prompt was cut into chunks.
//!
//! # Why decode rows may read from `replay_start`
//!
//! A decode row sits at `x >= p` and reads nothing below `x - W + 1`. In the cut everything above
//! `replay_start` is written. In a later layer:
//!
//! - `PromptTail` wrote from `p - W` on, and `x - W + 1 > p - W`.
//! - `Exact` wrote from `p - n(i - 1)` on, at the least `p - R - (W - 1) <= p - W` in layer `D`.
//! - `StepTail` keeps the invariant that after a step ending at `e` the last `W` positions before `e`
//!   (or all since `replay_start`) are written: a chunk longer than its tail writes them itself, and any
//!   other writes all its rows and inherits the rest. A step after it starts at `e` and reads from
//!   `e - W + 1` on at the lowest. The same holds for prefill chunks that are no longer than their
//!   tail, so these need no bound either.
//!
//! The window's own lower end is therefore the tighter bound, and `replay_start` suffices.

use core::num::NonZeroU32;

use crate::{ReplayPolicy, Request};

/// A policy on a model: which tail runs in each layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tails {
    pub(crate) policy: ReplayPolicy,
    /// `W`.
    pub(crate) window: u32,
    /// `R`.
    pub(crate) sampled_rows: u32,
    /// `D`.
    pub(crate) depth: u32,
}

/// Which rows run, or have run, of a request that may drop some; of any other, all do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tail {
    /// All rows.
    All,
    /// The last rows of the prompt.
    OfPrompt { len: u32 },
    /// The last rows of the step, and the prompt's sampled rows if the step goes past it.
    OfStep { len: u32, sampled_rows: u32 },
}

impl Tails {
    /// What runs in replay layer `layer`. The bounded policies keep `W` rows, or `R` for a caller that
    /// reads more than a window of outputs.
    pub(crate) fn running(&self, layer: u32) -> Tail {
        let &Self {
            window,
            sampled_rows,
            ..
        } = self;
        match self.policy {
            ReplayPolicy::Off => Tail::All,
            ReplayPolicy::StepTail => Tail::OfStep {
                len: window.max(sampled_rows),
                sampled_rows,
            },
            ReplayPolicy::PromptTail => Tail::OfPrompt {
                len: window.max(sampled_rows),
            },
            ReplayPolicy::Exact => {
                let halo = (self.depth - layer).saturating_mul(window - 1);
                Tail::OfPrompt {
                    len: halo.saturating_add(sampled_rows),
                }
            }
        }
    }

    /// What has written the window KV that replay layer `layer` may read, this step's rows among it.
    ///
    /// Not asked of the step's graph: one that keeps the whole batch writes more, of rows that an eager
    /// step drops, and nothing reads it. So what a request is answered depends on its policy and, under
    /// `StepTail`, on its chunks, and never on whether a chunk ran in a graph.
    pub(crate) fn written(&self, layer: u32) -> Tail {
        match layer.checked_sub(1) {
            None => Tail::All,
            Some(before) => self.running(before),
        }
    }
}

impl Tail {
    /// Rows in the tail; `None` for all.
    pub(crate) const fn len(self) -> Option<u32> {
        match self {
            Self::All => None,
            Self::OfPrompt { len } | Self::OfStep { len, .. } => Some(len),
        }
    }

    /// The same tail on prompts of at most `longest` rows: `All` when it holds the whole of each.
    pub(crate) fn within(self, longest: u32) -> Self {
        match self {
            Self::OfPrompt { len } if len >= longest => Self::All,
            tail => tail,
        }
    }

    /// The position of the first row of the step that runs: within the step, or its end.
    #[inline]
    pub(crate) fn first_row(self, request: &Request) -> u32 {
        let start = request.start();
        if !request.may_drop() {
            return start;
        }
        let first = match self {
            Self::All => start,
            Self::OfPrompt { len } => request.prompt_len.saturating_sub(len),
            Self::OfStep { len, sampled_rows } => {
                let sampled = request.prompt_len.saturating_sub(sampled_rows);
                request.seq_len.saturating_sub(len).min(sampled)
            }
        };
        first.clamp(start, request.seq_len)
    }

    /// The first position that has window KV, when this tail has written it.
    ///
    /// At most `seq_len`, so that `seq_len - kv_start` is never negative; and at most the position of
    /// the first running row, so that every one has a key to read.
    #[inline]
    pub(crate) fn kv_start(self, request: &Request) -> u32 {
        let replay_start = request.replay_start;
        if !request.may_drop() {
            return replay_start;
        }
        match self {
            Self::All => replay_start,
            Self::OfPrompt { len } => {
                let first = request.prompt_len.saturating_sub(len);
                first.max(replay_start).min(request.seq_len)
            }
            Self::OfStep { .. } => {
                let first = self.first_row(request);
                if first > request.start() {
                    first
                } else {
                    replay_start
                }
            }
        }
    }

    /// Rows below the position `x` that run in a cold prompt's prefill, over all chunks.
    pub(crate) fn running_before(self, x: u32, prefill: Prefill) -> u32 {
        let Prefill { prompt_len, chunk } = prefill;
        let x = x.min(prompt_len);
        match self {
            Self::All => x,
            Self::OfPrompt { len } => x.saturating_sub(prompt_len.saturating_sub(len)),
            // The tail of a chunk holds its sampled rows: it is never shorter than these.
            Self::OfStep { len, .. } => {
                let start = x - x % chunk;
                let end = start.saturating_add(chunk.get()).min(prompt_len);
                let first = end.saturating_sub(len).max(start);
                start / chunk * len.min(chunk.get()) + x.saturating_sub(first)
            }
        }
    }
}

/// A cold prompt that is prefilled in chunks of the same length, the last one perhaps shorter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prefill {
    pub(crate) prompt_len: u32,
    pub(crate) chunk: NonZeroU32,
}
