//! Why a run does not fit the memory it may take.

use std::path::PathBuf;

use super::{
    Bytes, MemoryUse, Shortage,
    fits::{self, rows_would_fit},
};
use crate::plain::Shown;

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
    /// The tensors of the largest step are too large beside the weights.
    #[error(
        "the tensors of a step of {rows} row{} take {}; {}",
        if *rows == 1 { "" } else { "s" },
        beside(need.workspace, *limit, &[("weights", need.weights)]),
        rows_would_fit(*fits)
    )]
    Workspace {
        /// Bytes that the run may take.
        limit: u64,
        /// What each part takes.
        need: MemoryUse,
        /// Rows of the largest step.
        rows: usize,
        /// Rows of the largest step that would fit.
        fits: usize,
    },
    /// The run would fit without graphs.
    #[error(
        "CUDA graphs take {}",
        beside(
            need.graphs,
            *limit,
            &[("weights", need.weights), ("KV cache", need.kv), ("workspace", need.workspace)]
        )
    )]
    Graphs {
        /// Bytes that the run may take.
        limit: u64,
        /// What each part takes.
        need: MemoryUse,
    },
    /// The cache is too large beside weights and workspace, also without graphs.
    #[error(
        "a KV cache of {} in {sequences} sequence{} takes {}; {} would fit{}",
        fits::tokens(*tokens),
        if *sequences == 1 { "" } else { "s" },
        beside(
            need.kv,
            *limit,
            &[("weights", need.weights), ("workspace", need.workspace)]
        ),
        fits::tokens(*fits),
        if need.graphs > 0 { ", without graphs" } else { "" }
    )]
    Cache {
        /// Bytes that the run may take.
        limit: u64,
        /// What each part takes.
        need: MemoryUse,
        /// Sequences of the cache.
        sequences: usize,
        /// Tokens that it must hold.
        tokens: usize,
        /// Tokens that would fit, without graphs.
        fits: usize,
    },
    /// A file of a checkpoint of which the host has no memory for what is made of it.
    #[error("reading {} may take {} of memory, {shortage}", Shown(path), Bytes(*bytes))]
    File {
        /// The file.
        path: PathBuf,
        /// Bytes that it may take, estimated from above.
        bytes: u64,
        /// What there is.
        shortage: Shortage,
    },
    /// A text that takes too much memory on its way to its tokens.
    #[error(
        "to encode a text of {} may take {} of memory, {shortage}; {}",
        Bytes(*text_bytes),
        Bytes(*bytes),
        if *fits > 0 { format!("a text of {} would fit", Bytes(*fits)) } else { "none would fit".to_owned() }
    )]
    Text {
        /// Bytes of the text.
        text_bytes: u64,
        /// Bytes that encoding may take, estimated from above.
        bytes: u64,
        /// What there is.
        shortage: Shortage,
        /// Bytes of a text that would fit.
        fits: u64,
    },
    /// The sizes are beyond any memory.
    #[error("the weights take more bytes than can be addressed")]
    Unaddressable,
}

/// What a part takes, what others leave it of the limit, and by how much it is too large: sizes that
/// differ by little are written alike.
fn beside(needed: u64, limit: u64, others: &[(&str, u64)]) -> String {
    let others = others.iter().filter(|(_, bytes)| *bytes > 0);
    let taken = others
        .clone()
        .fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes));
    let names: Vec<_> = others
        .map(|(name, bytes)| format!("{name} ({})", Bytes(*bytes)))
        .collect();
    let names = match names.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, before)) => format!("{} and {last}", before.join(", ")),
        None => String::new(),
    };
    let left = limit.saturating_sub(taken);
    format!(
        "{}, expected at most the {} that {names} leave of {}: {} too much",
        Bytes(needed),
        Bytes(left),
        Bytes(limit),
        Bytes(needed.saturating_sub(left)),
    )
}
