//! Text to token ids and back.

/// Why a tokenizer file cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {}
