//! What all requests share: the engine, the model's texts, and how a text is ordered.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::http::StatusCode;
use deepseek_model::Config;
use deepseek_model::engine::{Engine, EngineRequest};
use deepseek_model::memory::check_text;
use deepseek_model::tokenizer::{Tokenizer, TokenizerError, check_ids};

use super::answers::{Answers, channel};
use super::error::{ApiError, Result};
use super::fields::{Fields, text};
use super::metrics::Metrics;
use super::params::{Params, check_choices};
use super::renders::Renders;
use super::shutdown::{Gate, Pass};
use crate::sampling::{Recommended, SamplingArgs};
use crate::values::quoted;

/// The server.
#[derive(Debug)]
pub(super) struct App {
    pub(super) engine: Engine,
    pub(super) config: Config,
    pub(super) tokenizer: Arc<Tokenizer>,
    /// Where the model's chat template runs, or why there is none that can be used.
    pub(super) renders: std::result::Result<Renders, String>,
    /// How tokens are chosen where a client does not say.
    pub(super) recommended: Recommended,
    /// What the model is called.
    pub(super) name: String,
    pub(super) api_key: Option<String>,
    pub(super) limits: Limits,
    pub(super) metrics: Metrics,
    pub(super) gate: Gate,
    /// Seconds since 1970 when the server started.
    pub(super) created: u64,
}

/// How much a request may ask for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Bytes of a body.
    pub(super) body: usize,
    /// Tokens of a text where a client does not say.
    pub(super) new_tokens: usize,
    /// Texts of one: all have a place at the same time.
    pub(super) texts: usize,
    /// How long a request takes.
    pub(super) time: Option<Duration>,
}

/// What all texts of a request have in common.
pub(super) struct Order<'a> {
    pub(super) prompts: Vec<Vec<u32>>,
    /// The field that the prompts came in.
    pub(super) param: &'static str,
    pub(super) params: &'a Params,
    /// As [`EngineRequest::logprobs`].
    pub(super) logprobs: Option<usize>,
    /// As [`EngineRequest::prompt_logprobs`].
    pub(super) prompt_logprobs: Option<usize>,
    pub(super) pass: Pass,
}

impl App {
    /// A pass for a request that makes the engine work.
    ///
    /// # Errors
    /// The server is shutting down.
    pub(super) fn pass(&self) -> Result<Pass> {
        self.gate.pass().ok_or_else(ApiError::shutting_down)
    }

    /// The ids of a text behind the beginning-of-text id, if the model has one. Takes as long as the
    /// text is: not for threads that others wait for.
    ///
    /// # Errors
    /// The text is too long for the model or for the memory that is free, or not one of the tokenizer's;
    /// names `param`.
    pub(super) fn encode(&self, param: &str, text: &str) -> Result<Vec<u32>> {
        let refused = |error: TokenizerError| ApiError::of_prompt(param, &error);
        // Before anything is encoded, which takes memory many times the text's own.
        let length = self.tokenizer.check_length(text, self.config.max_positions);
        length.map_err(refused)?;
        check_text(text.len()).map_err(|error| ApiError::too_long(param, error))?;
        let ids = match self.config.bos_token_id {
            Some(bos) => self.tokenizer.encode_with_bos(bos, text),
            None => self.tokenizer.encode(text),
        };
        ids.map_err(refused)
    }

    /// Takes the model's name out of a request. A client that names none means the one there is.
    ///
    /// # Errors
    /// It is another.
    pub(super) fn check_model(&self, fields: &mut Fields) -> Result<()> {
        match fields.take("model", "a text", text)? {
            Some(name) if name != self.name => Err(ApiError {
                param: Some(fields.path("model")),
                ..self.no_model(&name)
            }),
            _ => Ok(()),
        }
    }

    /// There is no model of this name.
    pub(super) fn no_model(&self, name: &str) -> ApiError {
        let name = quoted(&name.into());
        let message = format!("no model is called {name}: expected {:?}", self.name);
        ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message)
    }

    /// Refuses a prompt that the model cannot go on from.
    ///
    /// # Errors
    /// Names `param`.
    pub(super) fn check_prompt(&self, param: &str, ids: &[u32]) -> Result<()> {
        if ids.is_empty() {
            return Err(ApiError::field(param, "expected 1 token or more, got none"));
        }
        let most = self.engine.max_tokens();
        if ids.len() > most {
            let message = format!(
                "the prompt has {} tokens: expected at most {most}",
                ids.len()
            );
            return Err(ApiError::too_long(param, message));
        }
        let known = check_ids(ids, self.config.vocab_size);
        known.map_err(|error| ApiError::of_prompt(param, &error))
    }

    /// Orders every text of a request: that of prompt `p` and number `i` of it has the index `p · n + i`.
    ///
    /// # Errors
    /// One of them is refused; then none is made.
    pub(super) fn order(&self, order: Order<'_>) -> Result<Answers> {
        let params = order.params;
        check_choices(order.prompts.len(), params.n, self.limits.texts)?;
        let requests = order
            .prompts
            .iter()
            .map(|prompt| self.request(prompt, &order))
            .collect::<Result<Vec<_>>>()?;
        let texts = requests.iter().flat_map(|request| {
            (0..params.n as u64).map(|number| {
                let mut request = request.clone();
                request.sampling.seed = request.sampling.seed.wrapping_add(number);
                request
            })
        });
        let (sinks, receiver) = channel(requests.len() * params.n);
        let texts = texts.zip(sinks).map(|(request, mut send)| {
            let mut watch = self.metrics.text();
            let sink = move |update| {
                watch.see(&update);
                send(update)
            };
            (request, sink)
        });
        let cancelled = self.engine.submit_all(texts.collect());
        let cancelled = cancelled.map_err(|error| ApiError::of_engine(order.param, error))?;
        Ok(Answers::new(receiver, cancelled, order.pass))
    }

    fn request(&self, prompt: &[u32], order: &Order<'_>) -> Result<EngineRequest> {
        let params = order.params;
        let sampling = SamplingArgs {
            seed: params.seed.unwrap_or_else(random),
            ..params.sampling.clone()
        };
        Ok(EngineRequest {
            max_new_tokens: self.new_tokens(prompt.len(), order)?,
            sampling: sampling.config(&self.recommended),
            stop_ids: self.config.eos_token_ids.clone(),
            stop_texts: params.stop.clone(),
            logprobs: order.logprobs,
            prompt_logprobs: order.prompt_logprobs,
            deadline: self.limits.time.map(|time| Instant::now() + time),
            ..EngineRequest::greedy(prompt.to_vec(), 0)
        })
    }

    /// Tokens that a text may get: what the client asks for, else what is left up to the usual number.
    fn new_tokens(&self, prompt: usize, order: &Order<'_>) -> Result<usize> {
        let most = self.engine.max_tokens();
        let room = most.saturating_sub(prompt);
        match order.params.max_tokens {
            Some((_, new)) if new <= room && prompt <= most => Ok(new),
            None if room > 0 => Ok(self.limits.new_tokens.min(room)),
            Some((field, new)) if room > 0 => {
                let message = format!(
                    "expected at most {room}, as the prompt takes {prompt} of {most} tokens, got {new}"
                );
                Err(ApiError::too_long(field, message))
            }
            _ => {
                let message = format!(
                    "the prompt has {prompt} tokens, and 1 or more are to follow: expected at most {most} in \
                     all"
                );
                Err(ApiError::too_long(order.param, message))
            }
        }
    }
}

/// Seconds since 1970.
pub(super) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |time| time.as_secs())
}

/// A number that nobody foresees: the standard library's maps start from such.
pub(super) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
