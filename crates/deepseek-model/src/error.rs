//! One error type at the crate's boundary; each module has its own with the facts as fields.

use crate::{config::ConfigError, engram::EngramError, tokenizer::TokenizerError, weights::WeightsError};

/// What can go wrong in this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// `config.json` could not be read or breaks a rule.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A checkpoint file or tensor is missing, damaged or misshapen.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// `tokenizer.json` could not be read or used.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The engram's tables or token map do not fit the configuration.
    #[error(transparent)]
    Engram(#[from] EngramError),
    /// A tensor operation failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;
