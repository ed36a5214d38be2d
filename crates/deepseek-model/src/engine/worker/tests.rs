//! Of what only the thread knows.

use std::num::{NonZeroU32, NonZeroUsize};

use super::*;
use crate::{CacheOptions, ModelOptions, ReplayPolicy, RunnerOptions};

/// Who watches an engine must learn of its end without a request.
#[test]
fn an_engine_whose_thread_has_ended_does_not_run() {
    let model = Model::load(
        "tests/data/bf16-s1".as_ref(),
        ModelOptions::default(),
        &|_| (),
    );
    let options = EngineOptions {
        cache: CacheOptions {
            max_sequences: 1,
            max_tokens: 8,
            page_tokens: 8,
            policy: ReplayPolicy::Exact,
            sampled_rows: NonZeroU32::MIN,
        },
        runner: RunnerOptions::default(),
        max_step_tokens: NonZeroUsize::MIN,
        max_waiting: 1,
        prefix_cache: false,
        tokenizer: None,
    };
    let mut engine = Engine::start(model.unwrap(), options, |_, _| ()).unwrap();
    assert!(engine.is_running());
    // The thread ends when nobody can order any more.
    engine.orders = None;
    while engine.is_running() {
        std::thread::yield_now();
    }
}
