//! One forward pass over a packed batch: what goes in, what comes out.

use candle_core::Tensor;

use crate::cache::SequenceId;
use crate::memory::{Bytes, Shortage, fits::rows_would_fit};

/// Which output rows of a request are turned into logits.
///
/// Of a prompt these may be the last [`CacheOptions::sampled_rows`](crate::CacheOptions::sampled_rows),
/// in whichever chunks they lie. Rows before them are refused unless the policy is `Off` or the
/// sequence [keeps its rows](crate::SequenceOptions::keeps_rows): they have been dropped, or are there
/// for their window KV alone and have no window of their own to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitRows {
    /// None: a prefill chunk that is not the last.
    None,
    /// The last row.
    Last,
    /// The last so many rows, or all if the request has fewer.
    Tail(usize),
    /// Every row.
    All,
}

/// One request's rows in a step.
#[derive(Debug, Clone, Copy)]
pub struct StepRequest<'a> {
    /// The sequence that grows.
    pub sequence: SequenceId,
    /// The next token ids, at the positions after those the cache holds. A prefill chunk ends at
    /// the prompt's end or before.
    pub tokens: &'a [u32],
    /// Which rows are read.
    pub logits: LogitRows,
}

/// What a step computed.
#[derive(Debug, Clone)]
pub struct StepOutput {
    /// f32 logits `[read rows, vocab]` of all requests in order, on the model's device.
    pub logits: Tensor,
    /// For each request, the range of its rows in `logits`.
    pub ranges: Vec<std::ops::Range<usize>>,
    /// How many rows each layer ran.
    pub stats: StepStats,
}

/// Rows run, layer by layer and request by request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepStats {
    /// Rows of each request in the step.
    pub query_rows: Vec<usize>,
    /// What each layer of the model did.
    pub layers: Vec<LayerStats>,
}

/// What one layer did in a step. Of each request it is always the last rows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LayerStats {
    /// For each request, rows whose window KV was written.
    pub written: Vec<usize>,
    /// For each request, rows that went through the whole layer.
    pub run: Vec<usize>,
}

impl LogitRows {
    /// How many rows are read of a request that has `rows`.
    pub(crate) fn count(self, rows: usize) -> usize {
        match self {
            Self::None => 0,
            Self::Last => rows.min(1),
            Self::Tail(tail) => rows.min(tail),
            Self::All => rows,
        }
    }
}

impl StepStats {
    /// Sum over the layers of the rows that ran.
    pub fn row_layers(&self) -> usize {
        self.layers.iter().flat_map(|layer| &layer.run).sum()
    }

    /// The same sum if no row had been dropped.
    pub fn row_layers_without_replay(&self) -> usize {
        self.query_rows.iter().sum::<usize>() * self.layers.len()
    }
}

/// Why a step is refused. Nothing has been computed and the cache is as it was.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// No request.
    #[error("step: expected at least 1 request, got none")]
    Empty,
    /// A request without tokens.
    #[error("step: request {request} has no tokens")]
    NoTokens {
        /// Index of the request in the step.
        request: usize,
    },
    /// Two requests for one sequence.
    #[error("step: requests {first} and {second} are for the same {id}")]
    SameSequence {
        /// Index of the first.
        first: usize,
        /// Index of the second.
        second: usize,
        /// The sequence.
        id: SequenceId,
    },
    /// A token id the embedding does not have.
    #[error("step: request {request} token {index}: expected an id below {vocab_size}, got {id}")]
    TokenOutsideVocabulary {
        /// Index of the request in the step.
        request: usize,
        /// Index of the token in the request.
        index: usize,
        /// The id.
        id: u32,
        /// Ids of the model.
        vocab_size: usize,
    },
    /// A chunk that runs over the end of its prompt.
    #[error(
        "step: request {request} goes from position {start} to {end}, over the end of its prompt at {prompt_len}"
    )]
    CrossesPromptEnd {
        /// Index of the request in the step.
        request: usize,
        /// Its first position.
        start: usize,
        /// The position after its last.
        end: usize,
        /// Tokens of the prompt.
        prompt_len: usize,
    },
    /// More positions than the model has.
    #[error(
        "step: request {request} reaches position {end}, the model has {max_positions} (max_position_embeddings)"
    )]
    TooLong {
        /// Index of the request in the step.
        request: usize,
        /// The position after its last.
        end: usize,
        /// Positions of the model.
        max_positions: usize,
    },
    /// More rows than the host has memory for.
    #[error(
        "step: {rows} row{} take{} about {} of memory, {shortage}; {}",
        if *rows == 1 { "" } else { "s" },
        if *rows == 1 { "s" } else { "" },
        Bytes(*bytes),
        rows_would_fit(*fits)
    )]
    Memory {
        /// Rows of the step.
        rows: usize,
        /// Bytes of its activations, estimated.
        bytes: u64,
        /// What there is.
        shortage: Shortage,
        /// Rows of a step of this kind that would fit.
        fits: usize,
    },
    /// Rows that only rebuild window KV after a hit, with nothing below them: what they give is no
    /// result.
    #[error(
        "step: request {request} reads rows before position {shared}, which only rebuild window KV behind what was found in the cache"
    )]
    ReadsRebuiltRows {
        /// Index of the request in the step.
        request: usize,
        /// Tokens whose entries were found.
        shared: usize,
    },
    /// Logits of rows that the policy drops, or keeps for the next rows alone.
    #[error(
        "step: request {request} reads prefill rows that {policy} may drop: expected at most the last {sampled_rows} of the prompt (CacheOptions::sampled_rows), or a sequence with keeps_rows"
    )]
    ReadsDroppedRows {
        /// Index of the request in the step.
        request: usize,
        /// The cache's policy.
        policy: replay_core::ReplayPolicy,
        /// Rows at the end of a prompt that may be read.
        sampled_rows: usize,
    },
}
