//! Checking a step against the cache, making room for it, and counting it.

use super::{CacheError, KvCache, ModelId};
use crate::{Config, Result, StepError, StepRequest};

/// A step that passed [`KvCache::check`]: pages each request still needs.
pub(crate) struct CheckedStep {
    missing_pages: usize,
    model: ModelId,
}

impl KvCache {
    /// Refuses a step that cannot run, before anything is changed.
    pub(crate) fn check(
        &self,
        requests: &[StepRequest<'_>],
        (model, config): (ModelId, &Config),
    ) -> Result<CheckedStep> {
        if self.config != *config {
            return Err(CacheError::OtherModel.into());
        }
        if self.owner.is_some_and(|owner| owner != model) {
            return Err(CacheError::OtherWeights.into());
        }
        if requests.is_empty() {
            return Err(StepError::Empty.into());
        }
        let mut missing_pages = 0;
        for (i, request) in requests.iter().enumerate() {
            let same = |other: &StepRequest<'_>| other.sequence == request.sequence;
            if let Some(first) = requests[..i].iter().position(same) {
                return Err(StepError::SameSequence {
                    first,
                    second: i,
                    id: request.sequence,
                }
                .into());
            }
            missing_pages += self.check_request(i, request, config.vocab_size)?;
        }
        self.pool.check(missing_pages)?;
        Ok(CheckedStep {
            missing_pages,
            model,
        })
    }

    /// Returns the pages the request needs beyond its own.
    fn check_request(
        &self,
        i: usize,
        request: &StepRequest<'_>,
        vocab_size: usize,
    ) -> Result<usize> {
        let sequence = self.sequences.get(request.sequence)?;
        if sequence.unfinished {
            let id = request.sequence;
            return Err(CacheError::Unfinished { id }.into());
        }
        if request.tokens.is_empty() {
            return Err(StepError::NoTokens { request: i }.into());
        }
        let outside = |id: &u32| *id as usize >= vocab_size;
        if let Some(index) = request.tokens.iter().position(outside) {
            let id = request.tokens[index];
            return Err(StepError::TokenOutsideVocabulary {
                request: i,
                index,
                id,
                vocab_size,
            }
            .into());
        }
        let (start, end) = (sequence.len, sequence.len + request.tokens.len());
        let prompt_len = sequence.options.prompt_len;
        let max_positions = self.sequences.max_positions();
        if end > max_positions {
            return Err(StepError::TooLong {
                request: i,
                end,
                max_positions,
            }
            .into());
        }
        if start < prompt_len && end > prompt_len {
            return Err(StepError::CrossesPromptEnd {
                request: i,
                start,
                end,
                prompt_len,
            }
            .into());
        }
        let prefill = start < prompt_len;
        let read = request.logits.count(request.tokens.len());
        if let Some(sampled_rows) = self.planner.readable_rows()
            && prefill
            && !sequence.options.keeps_rows
            && read > 0
            && prompt_len - (end - read) > sampled_rows
        {
            return Err(StepError::ReadsDroppedRows {
                request: i,
                policy: self.policy(),
                sampled_rows,
            }
            .into());
        }
        if read > 0 && end - read < sequence.shared {
            return Err(StepError::ReadsRebuiltRows {
                request: i,
                shared: sequence.shared,
            }
            .into());
        }
        Ok(self.pool.missing(end, sequence.pages.len()))
    }

    /// Gives every request the pages it needs, and the cache to the model. From here to
    /// [`Self::advance`] the step is under way.
    pub(crate) fn reserve(
        &mut self,
        requests: &[StepRequest<'_>],
        checked: &CheckedStep,
    ) -> Result<(), CacheError> {
        self.pool.check(checked.missing_pages)?;
        self.owner = Some(checked.model);
        for request in requests {
            let sequence = self.sequences.get_mut(request.sequence)?;
            sequence.unfinished = true;
            self.pool
                .grow(&mut sequence.pages, sequence.len + request.tokens.len());
        }
        Ok(())
    }

    /// Counts the tokens of a finished step, and keeps the ids that later n-grams reach back to.
    pub(crate) fn advance(&mut self, requests: &[StepRequest<'_>]) {
        let lookback = self.lookback();
        let exact = self.rebuilds_exactly();
        for request in requests {
            let Ok(sequence) = self.sequences.get_mut(request.sequence) else {
                continue;
            };
            sequence.unfinished = false;
            self.pool.publish(sequence, request.tokens, exact);
            sequence.len += request.tokens.len();
            sequence.tail.extend_from_slice(
                &request.tokens[request.tokens.len().saturating_sub(lookback)..],
            );
            sequence
                .tail
                .drain(..sequence.tail.len().saturating_sub(lookback));
        }
    }
}
