//! A request on its way: what is known of it, and what a step's logits add.

use std::sync::Arc;

use super::{
    request::{EndReason, EngineRequest, RequestId, TokenLogprob, Update},
    stops::Certain,
    text::OutputText,
};
use crate::{
    CachedPrefix, LogitRows, Result,
    sampler::{Sampler, SamplerError, log_softmax_at, top_logprobs},
    tokenizer::Tokenizer,
};

/// A request in the engine.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) id: RequestId,
    pub(super) request: EngineRequest,
    /// Prompt and output.
    pub(super) tokens: Vec<u32>,
    sampler: Sampler,
    /// What it found in the cache when it began to run. Where replay only comes close, it must find no
    /// more when it is computed again, or its text would depend on that.
    pub(super) cached: Option<CachedPrefix>,
    prompt_logprobs: Vec<TokenLogprob>,
    /// The output's, if there is a tokenizer. Tokens that are computed again are not chosen again, so
    /// that it takes each once.
    text: Option<OutputText>,
}

impl Job {
    /// # Errors
    /// If the sampling configuration is refused.
    pub(super) fn new(
        id: RequestId,
        request: EngineRequest,
        tokenizer: Option<Arc<Tokenizer>>,
    ) -> Result<Self> {
        let stops = request.stop_texts.clone();
        Ok(Self {
            id,
            tokens: request.prompt.clone(),
            sampler: Sampler::new(request.sampling)?,
            request,
            cached: None,
            prompt_logprobs: Vec::new(),
            text: tokenizer.map(|tokenizer| OutputText::new(tokenizer, stops)),
        })
    }

    pub(super) fn prompt_len(&self) -> usize {
        self.request.prompt.len()
    }

    /// Tokens of the output.
    fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len()
    }

    /// Whether the next step of a sequence of `done` tokens is one row of decode.
    pub(super) fn decodes(&self, done: usize) -> bool {
        done >= self.prompt_len() && done + 1 == self.tokens.len()
    }

    /// Tokens of the next step at most: no step goes over the end of the prompt.
    pub(super) fn next(&self, done: usize) -> usize {
        let end = if done < self.prompt_len() {
            self.prompt_len()
        } else {
            self.tokens.len()
        };
        end - done
    }

    /// What a step that ends at `end` reads.
    pub(super) fn reads(&self, end: usize) -> LogitRows {
        if self.request.prompt_logprobs.is_some() && end <= self.prompt_len() {
            LogitRows::All
        } else if end == self.tokens.len() {
            LogitRows::Last
        } else {
            LogitRows::None
        }
    }

    /// Takes the logits of a step over the tokens from `start` on: what comes of it.
    ///
    /// # Errors
    /// If no token can be chosen, or none decoded.
    pub(super) fn take(
        &mut self,
        (start, end): (usize, usize),
        logits: &[Vec<f32>],
        max_positions: usize,
    ) -> Result<Vec<Update>> {
        let mut updates = Vec::new();
        if let Some(likeliest) = self.request.prompt_logprobs
            && end <= self.prompt_len()
        {
            self.take_prompt(start, logits, likeliest)?;
            if end == self.prompt_len() && self.generated() == 0 {
                let logprobs = std::mem::take(&mut self.prompt_logprobs);
                updates.push(Update::Prompt { logprobs });
            }
        }
        if end < self.tokens.len() {
            return Ok(updates);
        }
        let most = self.request.max_new_tokens;
        let row = match logits.last() {
            Some(row) if self.generated() < most => row,
            _ => {
                updates.push(self.finish(EndReason::Length)?);
                return Ok(updates);
            }
        };
        let id = self.sampler.sample(row)?;
        if self.request.stop_ids.contains(&id) {
            updates.push(self.finish(EndReason::Stop)?);
            return Ok(updates);
        }
        let logprob = self.request.logprobs;
        let logprob = logprob.map(|likeliest| TokenLogprob::of(row, id, likeliest));
        let logprob = logprob.transpose()?;
        self.tokens.push(id);
        let text = self.text.as_mut().map(|text| text.push(id));
        let Certain { text, stop } = text.transpose()?.unwrap_or_default();
        updates.push(Update::Token { id, logprob, text });
        if let Some(index) = stop {
            updates.push(Update::Finished {
                reason: EndReason::StopText { index },
                text: String::new(),
            });
        } else if self.generated() == most {
            updates.push(self.finish(EndReason::Length)?);
        } else if end == max_positions {
            updates.push(self.finish(EndReason::Positions)?);
        }
        Ok(updates)
    }

    /// The end of the output, with the text that was held back. A stop text in it is the reason before any
    /// other.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub(super) fn finish(&mut self, reason: EndReason) -> Result<Update> {
        let text = self.text.as_mut().map(OutputText::finish);
        let Certain { text, stop } = text.transpose()?.unwrap_or_default();
        let reason = stop.map_or(reason, |index| EndReason::StopText { index });
        Ok(Update::Finished { reason, text })
    }

    /// Log-probabilities of the prompt's tokens behind the rows of a step. A prompt that is computed
    /// again gives those that it has given before.
    fn take_prompt(&mut self, start: usize, logits: &[Vec<f32>], likeliest: usize) -> Result<()> {
        let next = self.request.prompt[start + 1..].iter();
        for (index, (row, id)) in (start..).zip(logits.iter().zip(next)) {
            if index == self.prompt_logprobs.len() {
                let logprob = TokenLogprob::of(row, *id, likeliest)?;
                self.prompt_logprobs.push(logprob);
            }
        }
        Ok(())
    }
}

impl TokenLogprob {
    /// Of a token and so many of the likeliest, by the logits of its place.
    fn of(logits: &[f32], id: u32, likeliest: usize) -> Result<Self, SamplerError> {
        Ok(Self {
            logprob: log_softmax_at(logits, id)?,
            likeliest: match likeliest {
                // It would go through all logits once more.
                0 => Vec::new(),
                most => top_logprobs(logits, most)?,
            },
        })
    }
}
