//! A runner on a CPU: the model's own steps, with what can be refused and measured without a GPU.

mod common;

use std::{
    num::NonZeroU32,
    sync::{Arc, LazyLock},
};

use common::scripts::{Steps, cache_for, packed, packed_in, script};
use common::{flat, load};
use deepseek_model::{
    CacheOptions, Graphs, LogitRows, Model, ReplayPolicy, ReplaySizes, Runner, RunnerOptions,
    SequenceOptions, StepMode, StepRequest,
};
use proptest::{prelude::*, strategy::ValueTree, test_runner::TestRunner};

static MODEL: LazyLock<Arc<Model>> = LazyLock::new(|| load("engram-s1", false).into());

const CACHE: CacheOptions = CacheOptions {
    max_sequences: 2,
    max_tokens: 256,
    page_tokens: CacheOptions::PAGE_TOKENS,
    policy: ReplayPolicy::PromptTail,
    sampled_rows: NonZeroU32::MIN,
};

/// Graphs are for GPUs: on a CPU every mode runs the model's own steps.
#[test]
fn every_mode_runs_eagerly() {
    let mut cases = TestRunner::deterministic();
    let scripts = prop::collection::vec(script(), 4).new_tree(&mut cases);
    let (scripts, schedule) = (scripts.unwrap().current(), [15, 6, 9, 15, 3, 12]);
    let want = packed(&MODEL, &scripts, ReplayPolicy::PromptTail, &schedule);
    for graphs in [
        Graphs::Off,
        Graphs::Full,
        Graphs::Piecewise,
        Graphs::FullAndPiecewise,
    ] {
        let options = RunnerOptions {
            graphs,
            ..RunnerOptions::default()
        };
        let cache = cache_for(4, ReplayPolicy::PromptTail);
        let mut runner = Runner::new(MODEL.clone(), cache, &options).unwrap();
        let report = runner
            .capture(|_, _| panic!("nothing is captured"))
            .unwrap();
        assert_eq!(report.captured, 0);
        runner.fill(f32::NAN).unwrap();
        assert_eq!(packed_in(&mut runner, &scripts, &schedule), want);
    }
}

/// The time of every phase, of steps that drop rows, all rows or none; without the option, none.
#[test]
fn a_profile_has_every_phase() {
    let options = RunnerOptions {
        profile: true,
        ..RunnerOptions::default()
    };
    let prompt: Vec<u32> = (0..120).map(|t| 3 + t).collect();
    for policy in ReplayPolicy::ALL {
        let cache = CacheOptions { policy, ..CACHE };
        let mut runner = Runner::new(MODEL.clone(), cache, &options).unwrap();
        assert_eq!(runner.profile().unwrap(), None, "no step has run");
        let sequence = runner.add(SequenceOptions {
            prompt_len: 120,
            keeps_rows: false,
        });
        let sequence = sequence.unwrap();
        let step = |tokens: &[u32]| {
            let request = StepRequest {
                sequence,
                tokens,
                logits: LogitRows::None,
            };
            let begun = std::time::Instant::now();
            let (_, mode) = runner.forward(&[request]).unwrap();
            assert_eq!(mode, StepMode::Eager);
            let times = runner.profile().unwrap().unwrap();
            assert!(times.total() <= begun.elapsed(), "{policy}: {times:?}");
            assert!(
                !times.encoder.is_zero() && !times.write_kv.is_zero(),
                "{policy}: {times:?}"
            );
            times
        };
        let times = [&prompt[..60], &prompt[60..], &prompt[..1]].map(step);
        if policy == ReplayPolicy::PromptTail {
            assert!(times[0].replay < times[1].replay, "{times:?}");
        }
    }
    let mut silent = Runner::new(MODEL.clone(), CACHE, &RunnerOptions::default()).unwrap();
    assert_eq!(silent.profile().unwrap(), None);
    let sequence = Steps::add(
        &mut silent,
        SequenceOptions {
            prompt_len: 1,
            keeps_rows: false,
        },
    );
    let request = StepRequest {
        sequence,
        tokens: &[5],
        logits: LogitRows::Last,
    };
    let output = Steps::step(&mut silent, &[request]);
    assert_eq!(flat(&output.logits).len(), MODEL.config().vocab_size);
    assert_eq!(silent.profile().unwrap(), None);
}

/// A step that failed, and a capture, have no times: those of the step before are no longer the last.
#[test]
fn a_profile_is_of_the_last_step_if_that_ended_well() {
    let options = RunnerOptions {
        profile: true,
        ..RunnerOptions::default()
    };
    let mut runner = Runner::new(MODEL.clone(), CACHE, &options).unwrap();
    let sequence = runner
        .add(SequenceOptions {
            prompt_len: 20,
            keeps_rows: false,
        })
        .unwrap();
    let step = |runner: &mut Runner, tokens: &[u32]| {
        let request = StepRequest {
            sequence,
            tokens,
            logits: LogitRows::None,
        };
        runner.forward(&[request]).map(drop)
    };
    step(&mut runner, &[5; 10]).unwrap();
    assert!(runner.profile().unwrap().is_some());
    step(&mut runner, &[u32::MAX]).unwrap_err();
    assert_eq!(runner.profile().unwrap(), None, "the last step failed");
    step(&mut runner, &[5; 5]).unwrap();
    assert!(runner.profile().unwrap().is_some());
    runner.capture(|_, _| ()).unwrap();
    assert_eq!(
        runner.profile().unwrap(),
        None,
        "a capture passes the marks"
    );
}

/// Sizes and thresholds that make no sense are refused where there are no graphs either (BR-15).
#[test]
fn refused_options_say_why() {
    let refuse = |options: RunnerOptions| {
        let error = Runner::new(MODEL.clone(), CACHE, &options).unwrap_err();
        error.to_string()
    };
    let default = RunnerOptions::default;
    let texts = [
        refuse(RunnerOptions {
            trim_threshold: Some(8),
            ..default()
        }),
        refuse(RunnerOptions {
            capture_sizes: vec![4, 0],
            ..default()
        }),
        refuse(RunnerOptions {
            capture_sizes: vec![64],
            max_captured_tokens: Some(32),
            ..default()
        }),
        refuse(RunnerOptions {
            capture_sizes: vec![32],
            replay_sizes: ReplaySizes::Of(vec![32, 8, 33]),
            ..default()
        }),
        refuse(RunnerOptions {
            replay_sizes: ReplaySizes::Of(vec![]),
            ..default()
        }),
    ];
    insta::assert_snapshot!(texts.join("\n"));
}
