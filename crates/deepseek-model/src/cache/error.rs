//! Why a cache refuses.

use super::SequenceId;
use crate::memory::{Bytes, Shortage, fits};

/// Why the cache cannot take a sequence or a step.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// `max_sequences` or `max_tokens` is 0.
    #[error("cache: {field} must be at least 1, got 0")]
    Empty {
        /// The field of [`CacheOptions`](super::CacheOptions).
        field: &'static str,
    },
    /// Values that no layer on the device reads.
    #[error(
        "cache: expected values of F32, or on a CUDA device of F32 or BF16, got {dtype:?} on device {device}"
    )]
    DType {
        /// The dtype asked for.
        dtype: candle_core::DType,
        /// The device.
        device: String,
    },
    /// The storage does not fit the memory.
    #[error(
        "cache: max_sequences {max_sequences} and max_tokens {max_tokens} need {}",
        match bytes {
            Some(bytes) => {
                format!("{} of memory, {shortage}; {} would fit", Bytes(*bytes), fits::tokens(*fits))
            }
            None => format!("more rows or bytes than can be addressed; {} could be", fits::tokens(*fits)),
        }
    )]
    TooLarge {
        /// Bytes of all storage; `None` if more than can be addressed.
        bytes: Option<u64>,
        /// What there is.
        shortage: Shortage,
        /// Sequences asked for.
        max_sequences: usize,
        /// Tokens asked for.
        max_tokens: usize,
        /// Tokens of as many sequences that would fit; where `bytes` is `None`, that could be addressed.
        fits: usize,
    },
    /// The storage does not fit the memory that there is for it.
    #[error(
        "cache: {} in {max_sequences} sequence{} take {}, expected at most {}, which hold {} \
         (CacheOptions::max_tokens)",
        fits::tokens(*max_tokens),
        if *max_sequences == 1 { "" } else { "s" },
        Bytes(*needed),
        Bytes(*available),
        fits::tokens(*fits)
    )]
    NoMemory {
        /// Bytes of all storage on the device.
        needed: u64,
        /// Bytes there are for it.
        available: u64,
        /// Sequences asked for.
        max_sequences: usize,
        /// Tokens asked for.
        max_tokens: usize,
        /// Tokens that would fit.
        fits: usize,
    },
    /// Every slot is taken.
    #[error("cache: all {max} sequences are in use (CacheOptions::max_sequences)")]
    NoSlot {
        /// Slots of the cache.
        max: usize,
    },
    /// The pages left do not hold the tokens of the step.
    #[error(
        "cache: the step needs {needed} more page{} of {page_tokens} tokens, has {free} free (CacheOptions::max_tokens)",
        if *needed == 1 { "" } else { "s" }
    )]
    NoPages {
        /// Pages the step needs.
        needed: usize,
        /// Pages left.
        free: usize,
        /// Tokens of one page.
        page_tokens: usize,
    },
    /// The sequence was added to another cache. Slots are numbered alike in all caches: taken for
    /// its own, the id would name whatever sequence is in the same slot here.
    #[error("cache: expected a sequence of this cache, got {id} of another")]
    OtherCache {
        /// What was asked for.
        id: SequenceId,
    },
    /// The sequence was removed.
    #[error("cache: {id} is not in this cache: it was removed")]
    UnknownSequence {
        /// What was asked for.
        id: SequenceId,
    },
    /// A step of the sequence began and did not end.
    #[error("cache: a step of {id} failed: remove it and compute it anew")]
    Unfinished {
        /// The sequence.
        id: SequenceId,
    },
    /// A sequence that is to begin somewhere has begun.
    #[error("cache: expected {id} to have no tokens yet, it has {len}")]
    NotEmpty {
        /// What was asked for.
        id: SequenceId,
        /// Tokens it has.
        len: usize,
    },
    /// The cache was made for a model of another configuration.
    #[error("cache: it was made for a model of another configuration")]
    OtherModel,
    /// The cache belongs to another loaded model: what it holds was computed with other weights, or
    /// with the same in another way.
    #[error("cache: it belongs to another model of the same configuration")]
    OtherWeights,
    /// A layer that the model does not have.
    #[error("cache: expected a layer below {layers}, got {layer}")]
    NoLayer {
        /// What was asked for.
        layer: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// A layer that writes no compressed KV.
    #[error("cache: expected a KV source, got layer {layer}, which is none")]
    NoSource {
        /// What was asked for.
        layer: usize,
    },
    /// A prompt of no tokens.
    #[error("cache: a prompt must have at least 1 token")]
    EmptyPrompt,
    /// The prompt does not fit the model's positions.
    #[error(
        "cache: a prompt of {prompt_len} tokens exceeds the model's {max_positions} positions (max_position_embeddings)"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt_len: usize,
        /// Positions of the model.
        max_positions: usize,
    },
}
