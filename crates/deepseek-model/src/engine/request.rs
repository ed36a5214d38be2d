//! What is asked of an engine, and what it answers.

use std::{sync::Arc, time::Instant};

use crate::{Error, cache::CachedPrefix, sampler::SamplingConfig};

/// A text to continue.
#[derive(Debug, Clone)]
pub struct EngineRequest {
    /// Token ids of the prompt, with the beginning-of-text token if the model has one.
    pub prompt: Vec<u32>,
    /// Tokens to generate at most; 0 only computes the prompt.
    pub max_new_tokens: usize,
    /// How tokens are chosen.
    pub sampling: SamplingConfig,
    /// Ids that end the text; the id itself is not part of it.
    pub stop_ids: Vec<u32>,
    /// Texts that end the output where they begin. Which one ends it is a matter of the text alone, not of
    /// how tokens cut it: the one that begins earliest, and of those that begin there the shortest. They
    /// may span tokens, and the prompt is not searched. They need [`EngineOptions::tokenizer`].
    ///
    /// [`EngineOptions::tokenizer`]: super::EngineOptions::tokenizer
    pub stop_texts: Vec<String>,
    /// Whether the log-probability of each token of the output is given, and those of how many of the
    /// likeliest tokens beside it; of a small vocabulary, as many as there are.
    pub logprobs: Option<usize>,
    /// The same of each token of the prompt; then every row of it runs in every layer, and nothing of it
    /// is taken from the cache.
    pub prompt_logprobs: Option<usize>,
    /// When the request ends, finished or not.
    pub deadline: Option<Instant>,
    /// Texts of different salts share no cached entries.
    pub salt: u64,
}

impl EngineRequest {
    /// A greedy continuation of a prompt.
    pub fn greedy(prompt: Vec<u32>, max_new_tokens: usize) -> Self {
        Self {
            prompt,
            max_new_tokens,
            sampling: SamplingConfig::GREEDY,
            stop_ids: Vec::new(),
            stop_texts: Vec::new(),
            logprobs: None,
            prompt_logprobs: None,
            deadline: None,
            salt: 0,
        }
    }
}

/// Names a request of one engine. A later one is greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub(super) u64);

impl std::fmt::Display for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "request {}", self.0)
    }
}

/// How likely a token was where it stands: natural logarithms of probabilities under the model itself,
/// before temperature, top-k and top-p.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprob {
    /// That of the token.
    pub logprob: f32,
    /// Those of the likeliest tokens there, as many as were asked for: the likeliest first, of equals the
    /// lower id. The token itself may be one of them.
    pub likeliest: Vec<(u32, f32)>,
}

/// What happened to a request. The last is [`Update::Finished`] or [`Update::Failed`], and comes once.
#[derive(Debug, Clone)]
pub enum Update {
    /// The request runs for the first time.
    Started {
        /// What it found in the cache.
        cached: CachedPrefix,
    },
    /// All of the prompt is computed: log-probabilities of its tokens, given those before each, if asked
    /// for.
    Prompt {
        /// One for each token but the first.
        logprobs: Vec<TokenLogprob>,
    },
    /// A token was chosen.
    Token {
        /// The token.
        id: u32,
        /// How likely it was, if asked for.
        logprob: Option<TokenLogprob>,
        /// The text that is certain now and was not before, often empty: characters are held back until
        /// they are complete, and what may be the beginning of a stop text until it is not. Always empty
        /// without [`EngineOptions::tokenizer`](super::EngineOptions::tokenizer).
        text: String,
    },
    /// The text has ended. Put together, the texts of all updates are that of the tokens, cut where a stop
    /// text begins. The tokens themselves go on to the one that completed it, or that decided which one
    /// it is.
    Finished {
        /// Why.
        reason: EndReason,
        /// The text that was held back; empty if the request was cancelled.
        text: String,
    },
    /// The request cannot go on. Others are unharmed.
    Failed(Arc<Error>),
}

impl Update {
    /// Whether no other update of the request follows.
    pub fn is_last(&self) -> bool {
        matches!(self, Self::Finished { .. } | Self::Failed(_))
    }
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndReason {
    /// The model chose a stop id.
    Stop,
    /// A stop text appeared. So it is called as well where the request ended for another reason, and its
    /// text held one.
    StopText {
        /// Which one, as an index into [`EngineRequest::stop_texts`].
        index: usize,
    },
    /// `max_new_tokens` are there.
    Length,
    /// The model has no more positions.
    Positions,
    /// Nobody wants it any more.
    Cancelled,
    /// Its deadline has passed.
    Deadline,
}
