//! One request's part of a step, and the checks on it.

use crate::PlanError;

/// One request's part of a packed batch.
///
/// All lengths are in tokens, and in one step a token is a row. The rows of the step sit at the
/// positions `seq_len - query_len .. seq_len` of the sequence and contiguously in the batch, in the
/// order of the requests.
///
/// Over the steps of a request, `keeps_rows` and `replay_start` must stay what they were and
/// `prompt_len` must not shrink: they decide what earlier steps wrote to the window KV.
///
/// ```
/// use replay_core::Request;
///
/// // The last chunk of a prompt of 20 tokens, then the first decode step.
/// let chunk = Request::prefill(20, 16..20);
/// assert_eq!((chunk.query_len, chunk.seq_len, chunk.prefilling), (4, 20, true));
/// let step = Request::decode(20, 21);
/// assert_eq!((step.query_len, step.start(), step.prefilling), (1, 20, false));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Request {
    /// `q`: rows in this step. Zero for a request that only fills up the metadata.
    pub query_len: u32,
    /// `s`: length of the sequence after this step.
    pub seq_len: u32,
    /// `p`: length of the prompt: every token known before the first one is sampled. A request that
    /// was preempted and is computed anew either counts the tokens it had generated, or feeds them again as
    /// decode rows: then its window KV becomes what it was.
    pub prompt_len: u32,
    /// The first position for which the request holds window KV: 0 for a cold one, and after a
    /// prefix hit what [`PrefixHit::replay_start`](crate::PrefixHit::replay_start) says.
    pub replay_start: u32,
    /// Whether the step starts inside the prompt. Checked against the lengths, so that a scheduler
    /// and this crate cannot split prefill from decode differently.
    pub prefilling: bool,
    /// Whether someone reads the output of every prompt row (prompt log-probabilities); then none is
    /// dropped.
    pub keeps_rows: bool,
}

impl Request {
    /// A cold request's prefill chunk that holds the given positions of a prompt of `prompt_len`
    /// tokens.
    ///
    /// A range that ends before it starts is a chunk of no rows. One that runs past the prompt is
    /// planned too: rows at or after `prompt_len` count as decode rows and always run.
    pub const fn prefill(prompt_len: u32, positions: core::ops::Range<u32>) -> Self {
        Self {
            query_len: positions.end.saturating_sub(positions.start),
            seq_len: positions.end,
            prompt_len,
            replay_start: 0,
            prefilling: true,
            keeps_rows: false,
        }
    }

    /// A cold request's decode step of one row, after which the sequence has `seq_len` tokens.
    pub const fn decode(prompt_len: u32, seq_len: u32) -> Self {
        Self {
            query_len: 1,
            seq_len,
            prompt_len,
            replay_start: 0,
            prefilling: false,
            keeps_rows: false,
        }
    }

    /// The position of the step's first row.
    pub const fn start(&self) -> u32 {
        self.seq_len.saturating_sub(self.query_len)
    }

    /// Whether the policy may drop rows of this request.
    pub(crate) const fn may_drop(&self) -> bool {
        self.prefilling && !self.keeps_rows
    }

    /// Rows of the prompt since the replay start, when the policy may drop some; else 0.
    pub(crate) fn droppable_prompt(&self) -> u32 {
        if self.may_drop() {
            self.prompt_len.saturating_sub(self.replay_start)
        } else {
            0
        }
    }

    /// Refuses lengths that contradict each other; `request` is the index for the message.
    pub(crate) fn check(&self, request: usize) -> Result<(), PlanError> {
        let &Self {
            query_len,
            seq_len,
            prompt_len,
            replay_start,
            prefilling,
            ..
        } = self;
        if query_len > seq_len {
            return Err(PlanError::QueryExceedsSequence {
                request,
                query_len,
                seq_len,
            });
        }
        let start = self.start();
        if query_len > 0 && prefilling != (start < prompt_len) {
            return Err(PlanError::PhaseMismatch {
                request,
                start,
                prompt_len,
                prefilling,
            });
        }
        if start < replay_start {
            return Err(PlanError::StartsBelowReplay {
                request,
                start,
                replay_start,
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reversed range must not wrap to billions of rows.
    #[test]
    #[allow(clippy::reversed_empty_ranges, reason = "the hazard")]
    fn a_reversed_range_is_a_chunk_of_no_rows() {
        assert_eq!(Request::prefill(5, 4..2).query_len, 0);
        assert_eq!(Request::prefill(5, 2..4).query_len, 2);
    }
}
