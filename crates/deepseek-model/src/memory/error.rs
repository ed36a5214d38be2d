//! Why a run does not fit the memory it may take.

use super::{Bytes, MemoryUse};

/// Why a run does not fit the memory it may take.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The weights alone are too large.
    #[error(
        "the weights take {}, expected at most {}: {} are missing",
        Bytes(*needed),
        Bytes(*limit),
        Bytes(needed.saturating_sub(*limit))
    )]
    Weights {
        /// Bytes of the weights.
        needed: u64,
        /// Bytes that the run may take.
        limit: u64,
    },
    /// What the other parts leave does not hold the cache.
    #[error("{}", cache(*limit, need, (*tokens, *sequences), *fits))]
    Cache {
        /// Bytes that the run may take.
        limit: u64,
        /// What each part takes.
        need: MemoryUse,
        /// Sequences of the cache.
        sequences: usize,
        /// Tokens that it must hold.
        tokens: usize,
        /// Tokens that would fit.
        fits: usize,
    },
    /// The sizes are beyond any memory.
    #[error("the weights take more bytes than can be addressed")]
    Unaddressable,
}

fn cache(limit: u64, need: &MemoryUse, (tokens, sequences): (usize, usize), fits: usize) -> String {
    let named = [
        ("weights", need.weights),
        ("graphs", need.graphs),
        ("workspace", need.workspace),
    ];
    let others = named.iter().filter(|(_, bytes)| *bytes > 0);
    let others: Vec<_> = others
        .map(|(name, bytes)| format!("{name} ({})", Bytes(*bytes)))
        .collect();
    let left = limit.saturating_sub(MemoryUse { kv: 0, ..*need }.total());
    let plural = if sequences == 1 { "" } else { "s" };
    format!(
        "a KV cache of {tokens} tokens in {sequences} sequence{plural} takes {}, expected at most the {} \
         of {} that {} leave: {fits} tokens would fit",
        Bytes(need.kv),
        Bytes(left),
        Bytes(limit),
        others.join(", "),
    )
}
