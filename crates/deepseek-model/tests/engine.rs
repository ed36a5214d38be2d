//! Requests of an engine get the texts of their lone runs, whatever comes and goes beside them.

mod common;

use std::{
    collections::HashMap,
    num::{NonZeroU32, NonZeroUsize},
    sync::{Arc, LazyLock, Mutex},
    time::Instant,
};

use common::{flat, greedy, load, scripts::TOLERANCE};
use deepseek_model::{
    CacheOptions, GenerateOptions, Generator, LogitRows, Model, ModelOptions, ReplayPolicy,
    RunnerOptions, SequenceOptions, StepRequest,
    engine::{
        EndReason, EngineCore, EngineError, EngineOptions, EngineRequest, EngineStats, RequestId,
        Update,
    },
    sampler::SamplingConfig,
};
use proptest::prelude::*;

/// Of a window of 3, so that short texts are long enough for hits.
static MODEL: LazyLock<Arc<Model>> = LazyLock::new(|| {
    let mut config = load("bf16-s1", false).config().clone();
    config.sliding_window = 3;
    let options = ModelOptions {
        round_cache: false,
        ..ModelOptions::default()
    };
    Arc::new(Model::random(config, options, 1).unwrap())
});

fn options(policy: ReplayPolicy, pages: usize, prefix_cache: bool) -> EngineOptions {
    EngineOptions {
        cache: CacheOptions {
            max_sequences: 4,
            // Three more come with four sequences.
            max_tokens: (pages - 3) * 8,
            page_tokens: 8,
            policy,
            sampled_rows: NonZeroU32::MIN,
        },
        runner: RunnerOptions::default(),
        max_step_tokens: NonZeroUsize::new(13).unwrap(),
        max_waiting: 64,
        prefix_cache,
    }
}

fn engine(policy: ReplayPolicy, pages: usize, prefix_cache: bool) -> EngineCore {
    EngineCore::new(MODEL.clone(), options(policy, pages, prefix_cache)).unwrap()
}

/// Texts that begin alike now and then: of so many tokens, the first `same` those of the family.
fn prompt(family: u32, same: usize, own: u32, len: usize) -> Vec<u32> {
    let token = |seed: u32, i: usize| {
        let x = (seed + 1).wrapping_mul(2_654_435_761) ^ (i as u32 + 7).wrapping_mul(40_503_001);
        3 + (x >> 7) % 250
    };
    (0..len)
        .map(|i| token(if i < same { family } else { 1000 + own }, i))
        .collect()
}

/// The greedy continuation of a prompt alone, by steps of the model: its first `new` tokens, and how many
/// of them are sure. Where two tokens are as likely, sums in another order choose another.
fn lone(policy: ReplayPolicy, prompt: &[u32], new: usize) -> (Vec<u32>, usize) {
    type Known = Mutex<HashMap<(ReplayPolicy, Vec<u32>), (Vec<u32>, usize)>>;
    static KNOWN: LazyLock<Known> = LazyLock::new(Mutex::default);
    const MOST: usize = 12;
    const TIE: f32 = 1e-3;
    assert!(new <= MOST);
    let key = (policy, prompt.to_vec());
    if let Some((ids, sure)) = KNOWN.lock().unwrap().get(&key) {
        return (ids[..new].to_vec(), new.min(*sure));
    }
    let mut cache = MODEL.new_cache(options(policy, 64, false).cache).unwrap();
    let added = SequenceOptions {
        prompt_len: prompt.len(),
        keeps_rows: false,
    };
    let sequence = cache.add(added).unwrap();
    let (mut ids, mut sure, mut tokens) = (Vec::new(), MOST, prompt.to_vec());
    while ids.len() < MOST {
        let request = StepRequest {
            sequence,
            tokens: &tokens,
            logits: LogitRows::Last,
        };
        let row = flat(&MODEL.forward(&[request], &mut cache).unwrap().logits);
        let id = greedy(&row);
        let close = row.iter().filter(|logit| row[id as usize] - **logit < TIE);
        if close.count() > 1 {
            sure = sure.min(ids.len());
        }
        ids.push(id);
        tokens = vec![id];
    }
    let got = (ids[..new].to_vec(), new.min(sure));
    KNOWN.lock().unwrap().insert(key, (ids, sure));
    got
}

/// What came of a request.
#[derive(Debug, Default)]
struct Outcome {
    ids: Vec<u32>,
    started: usize,
    end: Option<EndReason>,
}

/// Collects updates, and checks their order.
fn collect(outcomes: &mut HashMap<RequestId, Outcome>, updates: Vec<(RequestId, Update)>) {
    for (id, update) in updates {
        let outcome = outcomes.entry(id).or_default();
        assert_eq!(outcome.end, None, "{id}: an update after the last");
        match update {
            Update::Started { .. } => {
                outcome.started += 1;
                assert_eq!((outcome.started, outcome.ids.len()), (1, 0), "{id}");
            }
            Update::Token { id: token, .. } => {
                assert_eq!(outcome.started, 1, "{id}: a token before it began");
                outcome.ids.push(token);
            }
            Update::Finished(reason) => outcome.end = Some(reason),
            Update::Prompt { .. } => panic!("{id}: nobody asked for the prompt"),
            Update::Failed(error) => panic!("{id}: {error}"),
        }
    }
}

#[derive(Debug, Clone)]
enum Op {
    /// A request comes: family, tokens of its beginning that are the family's, own seed, length, tokens
    /// to generate.
    Submit(u32, usize, u32, usize, usize),
    /// The n-th of all requests so far is cancelled, if it is still there.
    Cancel(usize),
    /// So many steps run.
    Steps(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let submit = (0u32..2, 0usize..40, 0u32..3, 1usize..48, 0usize..12);
    prop_oneof![
        4 => submit.prop_map(|(family, same, own, len, new)| Op::Submit(family, same, own, len, new)),
        1 => any::<usize>().prop_map(Op::Cancel),
        5 => (1usize..6).prop_map(Op::Steps),
    ]
}

/// Runs a schedule to its end: every request ends once, with the text of its lone run (as far as that is
/// sure) or, if it was cancelled, its beginning; and every page comes back.
fn check(policy: ReplayPolicy, pages: usize, prefix_cache: bool, ops: &[Op]) -> EngineStats {
    let mut engine = engine(policy, pages, prefix_cache);
    assert_eq!(engine.stats().pages, pages);
    let mut asked: Vec<(RequestId, Vec<u32>, usize)> = Vec::new();
    let (mut outcomes, mut cancelled) = (HashMap::new(), Vec::new());
    for op in ops {
        match *op {
            Op::Submit(family, same, own, len, new) => {
                let prompt = prompt(family, same, own, len);
                let id = engine
                    .submit(EngineRequest::greedy(prompt.clone(), new))
                    .unwrap();
                asked.push((id, prompt, new));
            }
            Op::Cancel(n) if !asked.is_empty() => {
                let id = asked[n % asked.len()].0;
                if engine.cancel(id) {
                    cancelled.push(id);
                }
                assert!(!engine.cancel(id), "a request ends once");
            }
            Op::Cancel(_) => {}
            Op::Steps(n) => (0..n).for_each(|_| collect(&mut outcomes, engine.step())),
        }
    }
    let mut steps = 0;
    while !engine.is_idle() {
        collect(&mut outcomes, engine.step());
        steps += 1;
        assert!(
            steps < 10_000,
            "requests wait for one another: {:?}",
            engine.stats()
        );
    }
    for (id, prompt, new) in asked {
        let outcome = outcomes.remove(&id).unwrap_or_default();
        let (want, sure) = lone(policy, &prompt, new);
        let sure = sure.min(outcome.ids.len());
        assert_eq!(outcome.ids[..sure], want[..sure], "{id}");
        if !cancelled.contains(&id) {
            let whole = (outcome.ids.len(), outcome.end);
            assert_eq!(whole, (new, Some(EndReason::Length)), "{id}");
        }
    }
    assert!(outcomes.is_empty());
    assert_eq!(engine.stats().free_pages, pages, "every page comes back");
    engine.stats()
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
        check(ReplayPolicy::Exact, pages, true, &ops);
    }

    /// Under `PromptTail`, where nothing is found.
    #[test]
    fn any_schedule_gives_bounded_replay_its_own_text(
        ops in prop::collection::vec(op(), 1..24),
        pages in 8usize..20,
    ) {
        check(ReplayPolicy::PromptTail, pages, false, &ops);
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
        let stats = check(policy, 20, true, &ops);
        assert!(stats.cached_tokens > 0, "{policy}: {stats:?}");
    }
}

/// `StepTail` depends on the chunks, so only its own promises are checked.
fn check_text(policy: ReplayPolicy, pages: usize, prefix_cache: bool, ops: &[Op]) -> EngineStats {
    if policy != ReplayPolicy::StepTail {
        return check(policy, pages, prefix_cache, ops);
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
    for _ in 0..64 {
        engine.submit(EngineRequest::greedy(vec![5], 1)).unwrap();
    }
    let full = engine
        .submit(EngineRequest::greedy(vec![5], 1))
        .unwrap_err();
    assert!(matches!(full, EngineError::Full { max: 64 }));
    insta::assert_snapshot!(full, @"engine: 64 requests wait already (EngineOptions::max_waiting)");
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

/// Stop ids, log-probabilities of prompt and output, deadlines, nothing to generate.
#[test]
fn what_a_request_can_ask_for() {
    let mut engine = engine(ReplayPolicy::PromptTail, 32, true);
    let text = prompt(1, 40, 0, 40);
    let (ids, sure) = lone(ReplayPolicy::PromptTail, &text, 5);
    assert_eq!(sure, 5);
    let mut stops = EngineRequest::greedy(text.clone(), 12);
    stops.stop_ids = vec![ids[3]];
    let mut reads = EngineRequest::greedy(text.clone(), 2);
    (reads.prompt_logprobs, reads.logprobs) = (true, true);
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
        Some(Update::Finished(EndReason::Stop))
    ));
    assert!(matches!(late[..], [Update::Finished(EndReason::Deadline)]));
    assert!(matches!(
        nothing[..],
        [Update::Started { .. }, Update::Finished(EndReason::Length)]
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
    common::assert_close("prompt", logprobs, &want.prompt_logprobs, TOLERANCE);
    let got: Vec<f32> = reads
        .iter()
        .filter_map(|u| match u {
            Update::Token { logprob, .. } => *logprob,
            _ => None,
        })
        .collect();
    common::assert_close("output", &got, &want.logprobs, TOLERANCE);
}
