//! Many requests over one model and its cache: continuous batching, first come first served.
//!
//! ```
//! use std::num::{NonZeroU32, NonZeroUsize};
//!
//! use deepseek_model::engine::{Engine, EngineOptions, EngineRequest, Update};
//! use deepseek_model::{CacheOptions, Model, ModelOptions, ReplayPolicy, RunnerOptions};
//!
//! let dir = "tests/data/bf16-s1".as_ref(); // a tiny random checkpoint
//! let model = Model::load(dir, ModelOptions::default(), &|_progress| {})?;
//! let options = EngineOptions {
//!     cache: CacheOptions {
//!         max_sequences: 8,
//!         max_tokens: 4096,
//!         page_tokens: CacheOptions::PAGE_TOKENS,
//!         policy: ReplayPolicy::PromptTail,
//!         sampled_rows: NonZeroU32::MIN,
//!     },
//!     runner: RunnerOptions::default(),
//!     max_step_tokens: NonZeroUsize::new(512).unwrap(),
//!     max_waiting: 100,
//!     prefix_cache: true,
//!     tokenizer: None,
//! };
//! let engine = Engine::start(model, options, |_captured, _of| {})?;
//! let requests = [vec![5, 6, 7], vec![8; 40]].map(|prompt| EngineRequest::greedy(prompt, 4));
//! let updates = requests.map(|request| engine.submit(request).unwrap());
//! for (number, updates) in updates.into_iter().enumerate() {
//!     for update in updates {
//!         if let Update::Token { id, .. } = update {
//!             println!("request {number}: token {id}");
//!         }
//!     }
//! }
//! engine.finish();
//! # Ok::<(), deepseek_model::Error>(())
//! ```

mod core;
mod job;
mod request;
mod schedule;
mod stops;
mod text;
mod worker;

use std::{num::NonZeroUsize, sync::Arc};

pub use self::core::{EngineCore, EngineStats};
pub use request::{EndReason, EngineRequest, RequestId, TokenLogprob, Update};
pub use worker::{Engine, Updates};

use crate::{CacheOptions, Error, RunnerOptions, tokenizer::Tokenizer};

/// What an engine is made for.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Its cache: how many requests run at once, and how many tokens they hold.
    pub cache: CacheOptions,
    /// Which steps run in CUDA graphs.
    pub runner: RunnerOptions,
    /// Rows of a step at most. Decode rows come first; prompts share what is left.
    pub max_step_tokens: NonZeroUsize,
    /// Requests that are taken in at most beyond those that can run at once, which are
    /// [`CacheOptions::max_sequences`](crate::CacheOptions::max_sequences). They wait for a place; where
    /// there is no room for as many as can run, more do.
    pub max_waiting: usize,
    /// Whether prompts find the entries that others have computed of the same beginning; see
    /// [`KvCache::add_prompt`](crate::KvCache::add_prompt).
    pub prefix_cache: bool,
    /// What turns tokens into the text of [`Update::Token`] and finds stop texts in it; without, there is
    /// no text.
    pub tokenizer: Option<Arc<Tokenizer>>,
}

impl EngineOptions {
    /// Requests that are in an engine at most, those that run among them.
    pub const fn holds(&self) -> usize {
        self.cache.max_sequences.saturating_add(self.max_waiting)
    }

    /// Why `asked` requests are not taken in beside the `held` that are.
    fn full(&self, held: usize, asked: usize) -> EngineError {
        EngineError::Full {
            held,
            asked,
            running: self.cache.max_sequences,
            waiting: self.max_waiting,
        }
    }
}

/// Why an engine does not take a request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// It has no place for as many as are asked for.
    #[error(
        "engine: {asked} more than the {held} requests that are in it: expected at most {} in all, {running} that \
         can run (CacheOptions::max_sequences) and {waiting} that may wait (EngineOptions::max_waiting)",
        running.saturating_add(*waiting)
    )]
    Full {
        /// Requests that are in it.
        held: usize,
        /// Requests that were to be taken in, all or none.
        asked: usize,
        /// Requests that can run at once.
        running: usize,
        /// Requests that may wait for a place.
        waiting: usize,
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
    /// There are stop texts, and no text.
    #[error(
        "engine: the request has stop texts, which need a tokenizer (EngineOptions::tokenizer)"
    )]
    NoTokenizer,
    /// A stop text is empty, and so is everywhere.
    #[error(
        "engine: stop text {index} is empty: expected 1 character or more (EngineRequest::stop_texts)"
    )]
    EmptyStopText {
        /// Its index in [`EngineRequest::stop_texts`].
        index: usize,
    },
    /// The prompt or the sampling configuration is refused, or the engine has stopped.
    #[error(transparent)]
    Refused(#[from] Error),
}
