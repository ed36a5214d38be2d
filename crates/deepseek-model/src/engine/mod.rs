//! Many requests over one model and its cache: continuous batching, first come first served.

mod core;
mod job;
mod request;
mod schedule;

use std::num::NonZeroUsize;

pub use self::core::{EngineCore, EngineStats};
pub use request::{EndReason, EngineRequest, RequestId, Update};

use crate::{CacheOptions, Error, RunnerOptions};

/// What an engine is made for.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Its cache: how many requests run at once, and how many tokens they hold.
    pub cache: CacheOptions,
    /// Which steps run in CUDA graphs.
    pub runner: RunnerOptions,
    /// Rows of a step at most. Decode rows come first; prompts share what is left.
    pub max_step_tokens: NonZeroUsize,
    /// Requests that wait at most, beside those that run.
    pub max_waiting: usize,
    /// Whether prompts find the entries that others have computed of the same beginning; see
    /// [`KvCache::add_prompt`](crate::KvCache::add_prompt).
    pub prefix_cache: bool,
}

/// Why an engine does not take a request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// As many wait as may.
    #[error("engine: {max} requests wait already (EngineOptions::max_waiting)")]
    Full {
        /// Requests that may wait.
        max: usize,
    },
    /// The cache could not hold the request if it were alone.
    #[error(
        "engine: the request may reach {tokens} tokens, the cache holds {fits} of one sequence (CacheOptions::max_tokens)"
    )]
    TooLong {
        /// Tokens of prompt and output.
        tokens: usize,
        /// Tokens that fit.
        fits: usize,
    },
    /// The prompt or the sampling configuration is refused.
    #[error(transparent)]
    Refused(#[from] Error),
}
