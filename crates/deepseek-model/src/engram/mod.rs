//! Engram, the integer half: compressed token ids and table rows of the n-grams that end at a token.

/// Why an engram cannot be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngramError {}
