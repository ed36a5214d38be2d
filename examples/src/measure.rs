//! What `perplexity` measures: one context under one policy, and means over contexts.

use std::num::{NonZeroU32, NonZeroUsize};
use std::ops::ControlFlow;

use anyhow::{Context, ensure};
use deepseek_model::sampler::log_softmax_at;
use deepseek_model::{
    CacheOptions, Error, KvCache, LogitRows, Model, ReplayPolicy, SequenceOptions, StepRequest,
};

use crate::interrupt::Signal;
use crate::model::{FLAG, blame};
use crate::windows::Window;

/// What came of one context under one policy.
pub(crate) struct Measured {
    /// Mean over its scored rows.
    pub(crate) nll: f64,
    pub(crate) row_layers: usize,
    pub(crate) row_layers_without_replay: usize,
}

/// A cache for one context of `len` tokens, the last `rows` of which are scored.
pub(crate) fn new_cache(
    model: &Model,
    policy: ReplayPolicy,
    len: usize,
    rows: NonZeroU32,
) -> anyhow::Result<KvCache> {
    let options = CacheOptions {
        max_sequences: 1,
        max_tokens: len,
        page_tokens: CacheOptions::PAGE_TOKENS,
        policy,
        sampled_rows: rows,
    };
    model.new_cache(options).map_err(|error| {
        let (policy, size) = (format!("--policies {policy}"), format!("--contexts {len}"));
        blame(error, &policy, &size)
    })
}

/// Prefills a context, a chunk at a time, and scores its last rows, unless a signal comes
/// before a chunk.
pub(crate) fn measure(
    model: &Model,
    policy: ReplayPolicy,
    chunk: Option<NonZeroUsize>,
    window: &Window<'_>,
    signal: impl Fn() -> Option<Signal>,
) -> anyhow::Result<ControlFlow<Signal, Measured>> {
    let prompt_len = window.context.len();
    let rows = window.targets.len();
    let sampled = NonZeroU32::new(rows as u32).context("no rows to score")?;
    let mut cache = new_cache(model, policy, prompt_len, sampled)?;
    let sequence = cache.add(SequenceOptions {
        prompt_len,
        keeps_rows: false,
    })?;
    let mut measured = Measured {
        nll: 0.0,
        row_layers: 0,
        row_layers_without_replay: 0,
    };
    let blamed = |error: Error| {
        let size = chunk.map_or_else(
            || format!("--contexts {prompt_len} without --chunk"),
            |chunk| format!("--chunk {chunk}"),
        );
        blame(error, &format!("--policies {policy}"), &size)
    };
    let (mut end, mut targets) = (0, window.targets);
    for tokens in window
        .context
        .chunks(chunk.map_or(prompt_len, NonZeroUsize::get))
    {
        if let Some(signal) = signal() {
            return Ok(ControlFlow::Break(signal));
        }
        end += tokens.len();
        // The scored rows may begin in an earlier chunk than the last.
        let scored = (end + rows).saturating_sub(prompt_len).min(tokens.len());
        let logits = LogitRows::Tail(scored);
        let requests = [StepRequest {
            sequence,
            tokens,
            logits,
        }];
        let output = model.forward(&requests, &mut cache).map_err(blamed)?;
        let (here, later) = targets.split_at(scored);
        let logits: Vec<Vec<f32>> = output.logits.to_vec2()?;
        for ((row, id), position) in logits.iter().zip(here).zip(end - scored..) {
            let nll = -f64::from(log_softmax_at(row, *id).map_err(|error| blamed(error.into()))?);
            ensure!(
                nll.is_finite(),
                "{FLAG}: the negative log-likelihood of token {id} after position {position} is {nll}: \
                 expected a finite number"
            );
            measured.nll += nll / rows as f64;
        }
        targets = later;
        measured.row_layers += output.stats.row_layers();
        measured.row_layers_without_replay += output.stats.row_layers_without_replay();
    }
    Ok(ControlFlow::Continue(measured))
}

/// The mean, and its standard error if there are two values or more.
pub(crate) fn mean_and_error(
    values: impl ExactSizeIterator<Item = f64> + Clone,
) -> (f64, Option<f64>) {
    let count = values.len() as f64;
    let mean = values.clone().sum::<f64>() / count;
    let squares: f64 = values.map(|value| (value - mean).powi(2)).sum();
    let error = (squares / (count - 1.0) / count).sqrt();
    (mean, (count > 1.0).then_some(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_have_errors() {
        assert_eq!(mean_and_error([2.0].into_iter()), (2.0, None));
        let (mean, error) = mean_and_error([1.0, 2.0, 3.0, 6.0].into_iter());
        assert!((mean - 3.0).abs() < 1e-12);
        // Variance 14 / 3, over four values.
        assert!((error.unwrap() - (14.0_f64 / 12.0).sqrt()).abs() < 1e-12);
    }
}
