//! Steps that fail, and what comes after them.

mod common;

use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind};

use deepseek_model::{
    CacheError, CacheOptions, Error, LogitRows, ReplayPolicy, SequenceOptions, StepRequest,
};

use common::{FIXTURES, load, recovery::check_failed_steps};

#[test]
fn a_failed_step_leaves_the_next_request_alone() {
    for name in FIXTURES {
        check_failed_steps(&load(name, true));
    }
}

/// Layers before the failure hold the step's rows and those behind it do not: a next step would be
/// computed from both.
#[test]
fn a_sequence_whose_step_did_not_end_takes_no_other() {
    let model = load("bf16-s1", true);
    let options = CacheOptions {
        max_sequences: 1,
        max_tokens: 256,
        page_tokens: CacheOptions::PAGE_TOKENS,
        policy: ReplayPolicy::PromptTail,
        sampled_rows: NonZeroU32::MIN,
    };
    let mut cache = model.new_cache(options).unwrap();
    let prompt: Vec<u32> = (3..43).collect();
    let options = SequenceOptions {
        prompt_len: prompt.len(),
        keeps_rows: false,
    };
    let sequence = cache.add(options).unwrap();
    let step = StepRequest {
        sequence,
        tokens: &prompt,
        logits: LogitRows::Last,
    };
    let at_the_end = |name: &str, _: &candle_core::Tensor| assert_ne!(name, "final_norm");
    let run = || model.forward_observed(&[step], &mut cache, Some(&at_the_end));
    catch_unwind(AssertUnwindSafe(run)).unwrap_err();
    for tokens in [&prompt[..], &prompt[..1]] {
        let refused = model.forward(&[StepRequest { tokens, ..step }], &mut cache);
        let refused = refused.map(drop).unwrap_err();
        assert!(
            matches!(refused, Error::Cache(CacheError::Unfinished { id }) if id == sequence),
            "{refused}"
        );
    }
    cache.remove(sequence).unwrap();
    let sequence = cache.add(options).unwrap();
    let step = StepRequest { sequence, ..step };
    model.forward(&[step], &mut cache).unwrap();
}
