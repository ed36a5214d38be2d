//! Engram, the integer half: compressed token ids and table rows of the n-grams that end at a token.
//!
//! An engram layer looks up, for each token, the hashes of the 2-grams to N-grams that end there.
//! [`TokenMap`] folds token ids that spell the same word (case, accents, spacing) into one;
//! [`NgramHasher`] turns a run of ids into rows of a layer's table. Both depend on the tokenizer and
//! the configuration only, so they are made once and shared by every sequence.

mod hash;
mod primes;
mod token_map;

use std::path::PathBuf;

pub use hash::NgramHasher;
pub use token_map::TokenMap;

use crate::{
    plain::{Plain, Shown},
    tokenizer::TokenizerError,
};

/// Why an engram cannot be set up or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngramError {
    /// Folding the vocabulary gives another number of ids than the tables were trained for. The
    /// multipliers depend on that number, so every lookup would read a wrong row.
    #[error(
        "{} folds to {found} compressed ids, but engram_compressed_vocab_size is {expected}: \
         tokenizer.json and config.json do not belong together",
        Shown(path)
    )]
    CompressedVocabulary {
        /// The tokenizer's file.
        path: PathBuf,
        /// Distinct ids the tokenizer gives.
        found: usize,
        /// `engram_compressed_vocab_size`.
        expected: usize,
    },
    /// `engram_pad_token_id` is no id of the tokenizer.
    #[error(
        "engram_pad_token_id {id} is outside the vocabulary of {}: expected less than {vocab_size}",
        Shown(path)
    )]
    PadToken {
        /// The tokenizer's file.
        path: PathBuf,
        /// `engram_pad_token_id`.
        id: u32,
        /// Ids of the tokenizer.
        vocab_size: usize,
    },
    /// A table is shorter than the ranges its hash columns need.
    #[error(
        "the engram table of layer {layer} has {rows} rows, but its hash columns need at least \
         {needed} (engram_num_embeddings, engram_vocab_size, engram_n_heads, \
         engram_max_ngram_size)"
    )]
    TableTooShort {
        /// The layer.
        layer: usize,
        /// Rows of its table.
        rows: usize,
        /// Rows the columns' primes add up to, or a lower bound of that.
        needed: u64,
    },
    /// A shape of n-grams that there is nothing to look up for.
    #[error(
        "the engram has n-grams of up to {max_ngram} tokens and {heads} heads, expected at least 2 \
         tokens and 1 head"
    )]
    NoColumns {
        /// Longest n-gram, in tokens.
        max_ngram: usize,
        /// Hash heads per n-gram size.
        heads: usize,
    },
    /// A table that no layer owns.
    #[error("expected one of {tables} engram tables, got number {table}")]
    NoTable {
        /// What was asked for.
        table: usize,
        /// Tables of the model.
        tables: usize,
    },
    /// A token id that the tokenizer does not know has no compressed id.
    #[error(
        "token id {id} at index {index} has no compressed id: the tokenizer has {vocab_size} tokens"
    )]
    UnknownToken {
        /// The id.
        id: u32,
        /// Its place among the ids handed over, from 0; those just before them come first.
        index: usize,
        /// Ids of the tokenizer.
        vocab_size: usize,
    },
    /// A token could not be spelled out or normalised.
    #[error("token id {id} of {} cannot be folded: {}", Shown(path), Plain(reason))]
    Fold {
        /// The tokenizer's file.
        path: PathBuf,
        /// The id.
        id: u32,
        /// Why.
        reason: String,
    },
    /// The tables that a configuration describes.
    #[error("{}: {cause}", Shown(path))]
    Config {
        /// The configuration's file.
        path: PathBuf,
        /// Why there can be none.
        cause: Box<EngramError>,
    },
    /// The tokenizer failed.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}
