//! An engine's schedules on a GPU, in graphs.

use std::sync::Arc;

use candle_core::DType;
use deepseek_model::{Model, ModelOptions, ReplayPolicy, RunnerOptions, engine::EngineCore};
use proptest::{prelude::*, test_runner::TestRunner};

use crate::common::schedules::{Lone, check, engine_options, op, short_windows};
use crate::{gpu, small};

/// Any arrivals, cancellations and preemptions give each request the text of its lone run: under `Exact`
/// with what others have computed found in the cache, from one schedule to the next, and under
/// `PromptTail` where nothing is found. Steps run in graphs of both kinds, and without where none fits.
#[test]
fn any_schedule_gives_each_request_its_own_text() {
    let options = ModelOptions {
        device: gpu(),
        dtype: DType::F32,
        round_cache: false,
    };
    let model = Arc::new(Model::random(short_windows(), options, 1).unwrap());
    let mut lone = Lone::new(&model);
    for (policy, prefix_cache) in [
        (ReplayPolicy::Exact, true),
        (ReplayPolicy::PromptTail, false),
    ] {
        let mut options = engine_options(policy, 12, prefix_cache);
        options.runner = RunnerOptions {
            capture_sizes: vec![1, 2, 4, 8],
            trim_threshold: Some(4),
            ..RunnerOptions::default()
        };
        let mut engine = EngineCore::new(model.clone(), options).unwrap();
        engine.capture(|_, _| ()).unwrap();
        let cases = if small() { 2 } else { 150 };
        let mut runner = TestRunner::new(ProptestConfig::with_cases(cases));
        let (engine, lone) = (
            std::cell::RefCell::new(&mut engine),
            std::cell::RefCell::new(&mut lone),
        );
        let run = |ops: Vec<_>| {
            check(*engine.borrow_mut(), *lone.borrow_mut(), policy, &ops);
            Ok(())
        };
        let schedules = prop::collection::vec(op(), 1..16);
        // Most draws have some that preempt; one that has none is followed by another.
        for _ in 0..5 {
            runner.run(&schedules, run).unwrap();
            if engine.borrow().stats().preemptions > 0 {
                break;
            }
        }
        let stats = engine.borrow().stats();
        assert!(stats.preemptions > 0 || small(), "{policy}: {stats:?}");
        assert_eq!(stats.cached_tokens > 0, prefix_cache, "{policy}: {stats:?}");
    }
}
