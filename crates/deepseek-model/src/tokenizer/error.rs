//! Why a tokenizer file, a text or an id cannot be used.

use std::path::{Path, PathBuf};

use super::steps::Failing;
use crate::{
    config::{Violation, Violations, unreadable},
    memory::MemoryError,
    plain::{InQuotes, Plain, Shown},
};

/// The release of the `tokenizers` crate this one is built with, for error messages: a file that
/// it refuses was most likely written by a newer one.
pub const LIBRARY_VERSION: &str = "0.23";

/// Why a tokenizer file, a text or an id cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The file is missing or unreadable.
    #[error("cannot read {}", Shown(path))]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The host has no memory for what is made of the file.
    #[error(transparent)]
    Reading(#[from] MemoryError),
    /// The file is not whole JSON: most often a download that broke off.
    #[error("{} {}", Shown(path), unreadable("valid JSON (truncated?)", key))]
    Json {
        /// The file.
        path: PathBuf,
        /// The key at which the parser stopped, dotted if nested; empty if at none.
        key: String,
        /// Where and why the parser stopped.
        source: serde_json::Error,
    },
    /// The file holds a key twice, most likely a token with two ids.
    #[error("{} breaks {}", Shown(path), Violations(violations))]
    Repeated {
        /// The file.
        path: PathBuf,
        /// Every such key.
        violations: Vec<Violation>,
    },
    /// The file is JSON, but the `tokenizers` crate knows no such tokenizer.
    #[error(
        "the tokenizers crate {LIBRARY_VERSION} cannot read the {part} of {}, which is damaged or \
         newer than the library: {}",
        Shown(path),
        Plain(reason)
    )]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The part that is refused, with its type if it has one: `normalizer "Frobnicate"`; or a key that
        /// is not known, as `key zz`.
        part: String,
        /// What the crate said.
        reason: String,
    },
    /// A step at which the `tokenizers` crate fails, on nearly every text or on some.
    #[error(
        "the {part} of {} has {step}, at which the tokenizers crate {LIBRARY_VERSION} fails: expected \
         {expected}",
        Shown(path)
    )]
    Step {
        /// The file.
        path: PathBuf,
        /// The part, with its type.
        part: String,
        /// The step, with what is wrong with it.
        step: String,
        /// What the step may hold.
        expected: &'static str,
    },
    /// A part that can make so much of a text that memory runs out.
    #[error(
        "the {part} of {} can make {growth} bytes or more of one, expected at most {max}",
        Shown(path)
    )]
    Growth {
        /// The file.
        path: PathBuf,
        /// The part, with its type.
        part: String,
        /// Bytes that all its steps together can make of one.
        growth: usize,
        /// The most they may.
        max: usize,
    },
    /// A text that the normalizer could make so long that memory runs out.
    #[error(
        "the normalizer of {} could make {could} bytes of a text of {bytes}, expected at most {max}",
        Shown(path)
    )]
    Grown {
        /// The file.
        path: PathBuf,
        /// Bytes of the text.
        bytes: usize,
        /// Bytes that the next step could have made of it.
        could: usize,
        /// Bytes that are accepted.
        max: usize,
    },
    /// An added token that would get another id than the file says.
    #[error(
        "{} gives the added token {} the id {id}, which the tokenizers crate {LIBRARY_VERSION} makes \
         {renumbered}: expected ids that follow those of the vocabulary without a gap",
        Shown(path),
        InQuotes(token)
    )]
    Renumbered {
        /// The file.
        path: PathBuf,
        /// The token, or its beginning.
        token: String,
        /// Its id in the file.
        id: u64,
        /// The id that texts would have.
        renumbered: u32,
    },
    /// Two tokens of one id: it would be read as either.
    #[error(
        "{} gives the tokens {} and {} the id {id}, expected an id for each",
        Shown(path),
        InQuotes(&tokens[0]),
        InQuotes(&tokens[1])
    )]
    SharedId {
        /// The file.
        path: PathBuf,
        /// The tokens, or their beginnings.
        tokens: [String; 2],
        /// Their id.
        id: u32,
    },
    /// The vocabulary has no token for a part of a text, and the file names no token for what is
    /// unknown: the library would leave it out and say nothing.
    #[error(
        "{} has no token for {} at byte {at} of the text, nor one for what is unknown",
        Shown(path),
        InQuotes(text)
    )]
    NoToken {
        /// The file.
        path: PathBuf,
        /// The word, or its beginning.
        text: String,
        /// Where it begins.
        at: usize,
    },
    /// A text of which nothing is left.
    #[error(
        "{} leaves no token of a text that is not empty, expected at least 1",
        Shown(path)
    )]
    NothingLeft {
        /// The file.
        path: PathBuf,
    },
    /// A token that has no row in the model's embedding.
    #[error(
        "{} gives the token {} the id {id}, expected less than the model's vocab_size ({vocab_size}): \
         tokenizer.json and config.json do not belong together",
        Shown(path),
        InQuotes(token)
    )]
    Vocabulary {
        /// The file.
        path: PathBuf,
        /// The token of the highest id, or its beginning.
        token: String,
        /// Its id.
        id: u32,
        /// Ids the model knows.
        vocab_size: usize,
    },
    /// A text that is too long whatever its tokens are.
    #[error(
        "expected a text of at most {max_tokens} tokens of {longest} bytes or less, so {} bytes, got \
         {bytes} bytes",
        max_tokens.saturating_mul(*longest)
    )]
    TooLong {
        /// Bytes of the text.
        bytes: usize,
        /// Tokens that it may have.
        max_tokens: usize,
        /// Bytes of text that the longest token stands for.
        longest: usize,
    },
    /// The `tokenizers` crate failed on a text or on ids.
    #[error("the tokenizer {} cannot {action}: {}", Shown(path), Plain(reason))]
    Failed {
        /// The file.
        path: PathBuf,
        /// `encode` or `decode`.
        action: &'static str,
        /// What the crate said.
        reason: String,
    },
    /// A token id has no row in the model's embedding.
    #[error(
        "token id {id} at index {index} is outside the vocabulary: expected less than {vocab_size}"
    )]
    OutsideVocabulary {
        /// The id.
        id: u32,
        /// Its place in the list, from 0.
        index: usize,
        /// Ids the model knows.
        vocab_size: usize,
    },
}

impl TokenizerError {
    pub(super) fn failing(failing: &Failing, path: &Path) -> Self {
        Self::Step {
            path: path.to_owned(),
            part: failing.part.clone(),
            step: failing.step.clone(),
            expected: failing.expected,
        }
    }

    /// Whether the file is to blame whatever the text, even if the error came with a text.
    pub fn is_of_the_file(&self) -> bool {
        !matches!(
            self,
            Self::Grown { .. }
                | Self::NoToken { .. }
                | Self::NothingLeft { .. }
                | Self::TooLong { .. }
                | Self::OutsideVocabulary { .. }
        )
    }
}

/// The beginning of a text, for errors.
pub(super) fn cut(text: &str) -> String {
    const LONGEST: usize = 60;
    let mut cut: String = text.chars().take(LONGEST).collect();
    if cut.len() < text.len() {
        cut.push_str("..");
    }
    cut
}
