//! Requests of an engine get the texts of their lone runs, whatever comes and goes beside them.

mod common;

use std::{
    collections::HashMap,
    num::NonZeroUsize,
    sync::{Arc, LazyLock, Mutex},
    time::Instant,
};

use common::{
    schedules::{Lone, Op, check, collect, engine_options, op, prompt, short_windows},
    scripts::TOLERANCE,
};
use deepseek_model::{
    GenerateOptions, Generator, LogitRows, Model, ModelOptions, ReplayPolicy, RunnerOptions,
    SequenceOptions, StepRequest,
    engine::{
        EndReason, EngineCore, EngineOptions, EngineRequest, EngineStats, RequestId, TokenLogprob,
        Update,
    },
    sampler::SamplingConfig,
};
use proptest::prelude::*;

static MODEL: LazyLock<Arc<Model>> = LazyLock::new(|| {
    let options = ModelOptions {
        round_cache: false,
        ..ModelOptions::default()
    };
    Arc::new(Model::random(short_windows(), options, 1).unwrap())
});

static LONE: LazyLock<Mutex<Lone>> = LazyLock::new(|| Mutex::new(Lone::new(&MODEL)));

fn engine(policy: ReplayPolicy, pages: usize, prefix_cache: bool) -> EngineCore {
    let options = engine_options(policy, pages, prefix_cache);
    EngineCore::new(MODEL.clone(), options).unwrap()
}

/// Runs a schedule in an engine of its own.
fn run(policy: ReplayPolicy, pages: usize, prefix_cache: bool, ops: &[Op]) -> EngineStats {
    let mut engine = engine(policy, pages, prefix_cache);
    assert_eq!(engine.stats().pages, pages);
    let mut lone = LONE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    check(&mut engine, &mut lone, policy, ops)
}

/// Schedules of each kind: `REPLAY_SCHEDULES` says how many, for those who have the time.
fn schedules() -> ProptestConfig {
    let asked = std::env::var("REPLAY_SCHEDULES").ok();
    let cases = asked.map_or(64, |n| n.parse().expect("REPLAY_SCHEDULES: a number"));
    ProptestConfig::with_cases(cases)
}

proptest! {
    #![proptest_config(schedules())]

    /// Under `Exact`, with what others have computed found in the cache.
    #[test]
    fn any_schedule_gives_each_request_its_own_text(
        ops in prop::collection::vec(op(), 1..24),
        pages in 8usize..20,
    ) {
        run(ReplayPolicy::Exact, pages, true, &ops);
    }

    /// Under `PromptTail`, where nothing is found.
    #[test]
    fn any_schedule_gives_bounded_replay_its_own_text(
        ops in prop::collection::vec(op(), 1..24),
        pages in 8usize..20,
    ) {
        run(ReplayPolicy::PromptTail, pages, false, &ops);
    }
}

/// A cache too small for all that run: requests lose their room, and their texts stay what they are.
#[test]
fn requests_that_lose_their_room_go_on_with_their_text() {
    let ops: Vec<Op> = (0..6).map(|i| Op::Submit(i, 0, i, 30, 11)).collect();
    for (policy, prefix_cache) in [
        (ReplayPolicy::Off, true),
        (ReplayPolicy::Exact, true),
        (ReplayPolicy::PromptTail, false),
        (ReplayPolicy::StepTail, false),
    ] {
        // Two prompts fill 8 pages, and with their texts 10.
        let stats = check_text(policy, 9, prefix_cache, &ops);
        assert!(stats.preemptions > 0, "{policy}");
    }
}

/// Requests that begin alike, one after the other and at once, find what was computed, and get the texts
/// of lone runs.
#[test]
fn requests_that_begin_alike_share() {
    let ops: Vec<Op> = (0..8)
        .flat_map(|i| [Op::Submit(0, 40, i % 3, 47, 6), Op::Steps(3)])
        .collect();
    for policy in [ReplayPolicy::Off, ReplayPolicy::Exact] {
        let stats = run(policy, 20, true, &ops);
        assert!(stats.cached_tokens > 0, "{policy}: {stats:?}");
    }
}

/// `StepTail` depends on the chunks, so only its own promises are checked.
fn check_text(policy: ReplayPolicy, pages: usize, prefix_cache: bool, ops: &[Op]) -> EngineStats {
    if policy != ReplayPolicy::StepTail {
        return run(policy, pages, prefix_cache, ops);
    }
    let mut engine = engine(policy, pages, prefix_cache);
    for op in ops {
        if let Op::Submit(family, same, own, len, new) = *op {
            let prompt = prompt(family, same, own, len);
            engine.submit(EngineRequest::greedy(prompt, new)).unwrap();
        }
    }
    let mut outcomes = HashMap::new();
    while !engine.is_idle() {
        collect(&mut outcomes, engine.step());
    }
    assert!(
        outcomes
            .values()
            .all(|o| o.ids.len() == 11 && o.end == Some(EndReason::Length))
    );
    engine.stats()
}

/// What an engine does not take in, and what it says.
#[test]
fn requests_that_are_refused() {
    let mut engine = engine(ReplayPolicy::PromptTail, 8, true);
    let mut refuse = |request: EngineRequest| engine.submit(request).unwrap_err().to_string();
    insta::assert_snapshot!(refuse(EngineRequest::greedy(vec![], 1)), @"cache: a prompt must have at least 1 token");
    insta::assert_snapshot!(refuse(EngineRequest::greedy(vec![5; 65], 1)), @"engine: the request may reach 65 tokens, the cache holds 64 of one sequence (CacheOptions::max_tokens)");
    insta::assert_snapshot!(refuse(EngineRequest::greedy(vec![5; 60], 6)), @"engine: the request may reach 65 tokens, the cache holds 64 of one sequence (CacheOptions::max_tokens)");
    insta::assert_snapshot!(refuse(EngineRequest::greedy(vec![5, 100_000], 1)), @"token id 100000 at index 1 is outside the vocabulary: expected less than 288");
    let mut hot = EngineRequest::greedy(vec![5], 1);
    hot.sampling.top_p = 2.0;
    insta::assert_snapshot!(refuse(hot), @"top_p is 2: expected above 0 and at most 1");
    let mut stops = EngineRequest::greedy(vec![5], 1);
    stops.stop_texts = vec!["a".into()];
    insta::assert_snapshot!(refuse(stops.clone()), @"engine: the request has stop texts, which need a tokenizer (EngineOptions::tokenizer)");
    stops.stop_texts.push(String::new());
    insta::assert_snapshot!(refuse(stops), @"engine: stop text 1 is empty: expected 1 character or more (EngineRequest::stop_texts)");
    // 4 that can run and 64 that wait.
    for _ in 0..68 {
        engine.submit(EngineRequest::greedy(vec![5], 1)).unwrap();
    }
    let full = engine
        .submit(EngineRequest::greedy(vec![5], 1))
        .unwrap_err();
    insta::assert_snapshot!(full, @"engine: 1 more than the 68 requests that are in it: expected at most 68 in all, 4 that can run (CacheOptions::max_sequences) and 64 that may wait (EngineOptions::max_waiting)");
    while !engine.is_idle() {
        engine.step();
    }
    // The longest there can be, alone.
    engine
        .submit(EngineRequest::greedy(vec![5; 60], 5))
        .unwrap();
    while !engine.is_idle() {
        engine.step();
    }
}

/// Prompts that begin alike and come at once would each compute the beginning: those behind the first
/// wait for the step that computes it, and no others do.
#[test]
fn prompts_that_begin_alike_wait_for_the_first() {
    let options = |prefix_cache| EngineOptions {
        max_step_tokens: NonZeroUsize::new(500).unwrap(),
        ..engine_options(ReplayPolicy::PromptTail, 64, prefix_cache)
    };
    let begun = |prefix_cache, requests: Vec<EngineRequest>| -> Vec<Vec<usize>> {
        let mut engine = EngineCore::new(MODEL.clone(), options(prefix_cache)).unwrap();
        let ids: Vec<_> = requests
            .into_iter()
            .map(|r| engine.submit(r).unwrap())
            .collect();
        let mut steps = Vec::new();
        while !engine.is_idle() {
            let started = engine
                .step()
                .into_iter()
                .filter_map(|(id, update)| match update {
                    Update::Started { cached } => Some((id, cached.start)),
                    _ => None,
                });
            steps.push(started.collect::<Vec<_>>());
        }
        let step_and_start = |id| {
            let mut of_step = steps.iter().enumerate();
            let found = of_step.find_map(|(step, ids)| {
                let (_, start) = ids.iter().find(|(other, _)| *other == id)?;
                Some(vec![step, *start])
            });
            found.unwrap()
        };
        ids.into_iter().map(step_and_start).collect()
    };
    let alike = |own| EngineRequest::greedy(prompt(1, 40, own, 50), 3);
    // 5 pages of 8 are found, and a window of 3 rows is computed again.
    let requests = || vec![alike(1), alike(2), alike(3)];
    assert_eq!(begun(true, requests()), [[0, 0], [1, 37], [1, 37]]);
    assert_eq!(begun(false, requests()), [[0, 0]; 3]);
    // Another salt shares nothing, and of a prompt whose rows are all read none is spared.
    let salted = EngineRequest {
        salt: 1,
        ..alike(2)
    };
    let read = EngineRequest {
        prompt_logprobs: Some(0),
        ..alike(2)
    };
    assert_eq!(begun(true, vec![alike(1), salted, read]), [[0, 0]; 3]);
    // What is alike is too short to spare anything.
    let short = EngineRequest::greedy(prompt(1, 9, 2, 50), 3);
    let other = EngineRequest::greedy(prompt(1, 7, 3, 50), 3);
    assert_eq!(
        begun(true, vec![alike(1), other, alike(4)]),
        [[0, 0], [0, 0], [1, 37]]
    );
    assert_eq!(begun(true, vec![alike(1), short]), [[0, 0], [1, 5]]);
}

/// Stop ids, log-probabilities of prompt and output, deadlines, nothing to generate.
#[test]
fn what_a_request_can_ask_for() {
    let mut engine = engine(ReplayPolicy::PromptTail, 32, true);
    let text = prompt(1, 40, 0, 40);
    let (ids, sure) = LONE
        .lock()
        .unwrap()
        .text(ReplayPolicy::PromptTail, &text, 5);
    assert_eq!(sure, 5);
    let mut stops = EngineRequest::greedy(text.clone(), 12);
    stops.stop_ids = vec![ids[3]];
    let mut reads = EngineRequest::greedy(text.clone(), 2);
    (reads.prompt_logprobs, reads.logprobs) = (Some(0), Some(0));
    let mut late = EngineRequest::greedy(text.clone(), 12);
    late.deadline = Some(Instant::now());
    let nothing = EngineRequest::greedy(text.clone(), 0);
    let asked = [stops, reads, late, nothing].map(|r| engine.submit(r).unwrap());
    let mut all: HashMap<RequestId, Vec<Update>> = HashMap::new();
    while !engine.is_idle() {
        for (id, update) in engine.step() {
            all.entry(id).or_default().push(update);
        }
    }
    let [stops, reads, late, nothing] = asked.map(|id| all.remove(&id).unwrap());
    let tokens = |updates: &[Update]| -> Vec<u32> {
        let id = |update: &Update| match update {
            Update::Token { id, .. } => Some(*id),
            _ => None,
        };
        updates.iter().filter_map(id).collect()
    };
    let first = ids.iter().position(|id| *id == ids[3]).unwrap();
    assert_eq!(tokens(&stops), ids[..first]);
    assert!(matches!(
        stops.last(),
        Some(Update::Finished {
            reason: EndReason::Stop,
            ..
        })
    ));
    assert!(matches!(
        late[..],
        [Update::Finished {
            reason: EndReason::Deadline,
            ..
        }]
    ));
    assert!(matches!(
        nothing[..],
        [
            Update::Started { .. },
            Update::Finished {
                reason: EndReason::Length,
                ..
            }
        ]
    ));
    let Some(Update::Prompt { logprobs }) = reads.get(1) else {
        panic!("{reads:?}");
    };
    let options = GenerateOptions {
        policy: ReplayPolicy::PromptTail,
        chunk: NonZeroUsize::new(1024).unwrap(),
        max_new_tokens: 2,
        stop_ids: Vec::new(),
        sampling: SamplingConfig::GREEDY,
        logprobs: true,
        runner: RunnerOptions::default(),
    };
    let mut generator = Generator::new(MODEL.clone(), vec![text], options).unwrap();
    while !generator.is_finished() {
        generator.step().unwrap();
    }
    let want = generator.results().next().unwrap();
    let of_prompt: Vec<f32> = logprobs.iter().map(|token| token.logprob).collect();
    common::assert_close("prompt", &of_prompt, &want.prompt_logprobs, TOLERANCE);
    let of_output = logprobs_of(&reads);
    let got: Vec<f32> = of_output.iter().map(|token| token.logprob).collect();
    common::assert_close("output", &got, &want.logprobs, TOLERANCE);
}

/// Of the tokens that were chosen, in order.
fn logprobs_of(updates: &[Update]) -> Vec<TokenLogprob> {
    let of = |update: &Update| match update {
        Update::Token { logprob, .. } => logprob.clone(),
        _ => None,
    };
    updates.iter().filter_map(of).collect()
}

/// Logits of each token of a text, and behind the last, by a model alone.
fn logits_alone(text: &[u32]) -> Vec<Vec<f32>> {
    let options = engine_options(ReplayPolicy::Off, 64, false);
    let mut cache = MODEL.new_cache(options.cache).unwrap();
    let added = SequenceOptions {
        prompt_len: text.len(),
        keeps_rows: true,
    };
    let request = StepRequest {
        sequence: cache.add(added).unwrap(),
        tokens: text,
        logits: LogitRows::All,
    };
    let output = MODEL.forward(&[request], &mut cache).unwrap();
    output.logits.to_vec2().unwrap()
}

/// Temperature, top-k and top-p change what is chosen, and no log-probability; nor do they leave out any of
/// the likeliest tokens.
#[test]
fn the_likeliest_tokens_are_those_of_the_model() {
    const LIKELIEST: usize = 5;
    let mut engine = engine(ReplayPolicy::Off, 32, true);
    let mut request = EngineRequest::greedy(prompt(1, 40, 0, 20), 12);
    request.sampling = SamplingConfig {
        temperature: 2.0,
        top_k: Some(3),
        top_p: 0.9,
        seed: 7,
    };
    (request.logprobs, request.prompt_logprobs) = (Some(LIKELIEST), Some(LIKELIEST));
    let mut text = request.prompt.clone();
    // More than the vocabulary has.
    let mut all = EngineRequest::greedy(text.clone(), 1);
    all.logprobs = Some(usize::MAX);
    let asked = [request, all].map(|request| engine.submit(request).unwrap());
    let mut updates: HashMap<RequestId, Vec<Update>> = HashMap::new();
    while !engine.is_idle() {
        for (id, update) in engine.step() {
            updates.entry(id).or_default().push(update);
        }
    }
    let [updates, of_all] = asked.map(|id| updates.remove(&id).unwrap());
    let mut got = Vec::new();
    for update in &updates {
        match update {
            Update::Prompt { logprobs } => got.extend(logprobs.clone()),
            Update::Token { id, .. } => text.push(*id),
            _ => {}
        }
    }
    got.extend(logprobs_of(&updates));
    let logits = logits_alone(&text);
    assert_eq!((got.len(), text.len()), (20 - 1 + 12, 20 + 12));
    let mut unlikely = 0;
    for ((row, id), got) in logits.iter().zip(&text[1..]).zip(&got) {
        let sum: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum();
        let logprob = |id: u32| f64::from(row[id as usize]) - sum.ln();
        let close = |got: f32, want: f64| (f64::from(got) - want).abs() < 1e-4;
        assert!(close(got.logprob, logprob(*id)), "{got:?}");
        let mut sorted: Vec<f64> = (0..row.len() as u32).map(logprob).collect();
        sorted.sort_by(|a, b| b.total_cmp(a));
        assert_eq!(got.likeliest.len(), LIKELIEST);
        let mut ids = Vec::new();
        for (&(id, got), want) in got.likeliest.iter().zip(sorted) {
            // Of two that all but tie, either may come first.
            assert!(close(got, want) && close(got, logprob(id)), "{got:?}");
            assert!(!ids.contains(&id));
            ids.push(id);
        }
        unlikely += usize::from(!ids.contains(id));
    }
    assert!(unlikely > 0, "tokens of the prompt are any");
    let of_all = &logprobs_of(&of_all)[0].likeliest;
    assert_eq!(of_all.len(), logits[0].len());
    assert!(of_all.is_sorted_by(|a, b| a.1 >= b.1));
}
