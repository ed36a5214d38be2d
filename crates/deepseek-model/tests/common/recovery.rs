//! Steps that fail, and what comes after them: the same on every device.

use std::num::NonZeroU32;

use deepseek_model::{
    CacheOptions, Error, KvCache, LogitRows, Model, ReplayPolicy, SequenceOptions, StepError,
    StepOutput, StepRequest,
};

use super::{flat, greedy};

/// A prompt over several windows and groups.
fn prompt() -> Vec<u32> {
    (0..70).map(|t| 3 + (t * 7) % 250).collect()
}

fn step(
    model: &Model,
    cache: &mut KvCache,
    sequence: deepseek_model::SequenceId,
    tokens: &[u32],
) -> deepseek_model::Result<StepOutput> {
    let request = StepRequest {
        sequence,
        tokens,
        logits: LogitRows::Last,
    };
    model.forward(&[request], cache)
}

/// Prefill in two chunks, and four greedy steps: the logits of all.
fn serve(model: &Model, cache: &mut KvCache) -> Vec<f32> {
    let prompt = prompt();
    let options = SequenceOptions {
        prompt_len: prompt.len(),
        keeps_rows: false,
    };
    let sequence = cache.add(options).unwrap();
    let mut next = prompt[40..].to_vec();
    let request = StepRequest {
        sequence,
        tokens: &prompt[..40],
        logits: LogitRows::None,
    };
    model.forward(&[request], cache).unwrap();
    let mut all = Vec::new();
    for _ in 0..5 {
        let logits = flat(&step(model, cache, sequence, &next).unwrap().logits);
        next = vec![greedy(&logits)];
        all.extend(logits);
    }
    cache.remove(sequence).unwrap();
    all
}

/// After a step with an id that is none, and after one whose values are no numbers, the same cache
/// gives the next request what a fresh one gives it, bit for bit.
pub fn check_failed_steps(model: &Model) {
    let fresh = || {
        let options = CacheOptions {
            max_sequences: 2,
            max_tokens: 256,
            page_tokens: CacheOptions::PAGE_TOKENS,
            policy: ReplayPolicy::PromptTail,
            sampled_rows: NonZeroU32::MIN,
        };
        model.new_cache(options).unwrap()
    };
    let want = serve(model, &mut fresh());
    let mut cache = fresh();
    for round in 0..2 {
        let prompt = prompt();
        let options = SequenceOptions {
            prompt_len: prompt.len(),
            keeps_rows: false,
        };
        let sequence = cache.add(options).unwrap();
        let vocab = model.config().vocab_size as u32;
        let refused = step(model, &mut cache, sequence, &[5, vocab]).unwrap_err();
        let of_id = StepError::TokenOutsideVocabulary {
            request: 0,
            index: 1,
            id: vocab,
            vocab_size: vocab as usize,
        };
        assert!(matches!(refused, Error::Step(error) if error == of_id));
        assert_eq!(serve(model, &mut cache), want, "after an id, round {round}");

        step(model, &mut cache, sequence, &prompt).unwrap();
        cache.fill(f32::NAN).unwrap();
        let failed = step(model, &mut cache, sequence, &[9]).unwrap_err();
        assert!(matches!(failed, Error::Model(_)), "{failed}");
        cache.remove(sequence).unwrap();
        assert_eq!(
            serve(model, &mut cache),
            want,
            "after a fault, round {round}"
        );
    }
}
