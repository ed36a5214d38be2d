//! Random comings and goings of requests in an engine, and what each request must get.

use std::{
    collections::HashMap,
    num::{NonZeroU32, NonZeroUsize},
    sync::Arc,
};

use deepseek_model::{
    CacheOptions, LogitRows, Model, ReplayPolicy, RunnerOptions, SequenceOptions, StepRequest,
    engine::{EndReason, EngineCore, EngineOptions, EngineRequest, EngineStats, RequestId, Update},
};
use proptest::prelude::*;

use super::{flat, greedy, load};

/// A configuration with a window of 3, so that short texts are long enough for hits.
pub fn short_windows() -> deepseek_model::Config {
    let mut config = load("bf16-s1", false).config().clone();
    config.sliding_window = 3;
    config
}

/// Four sequences in pages of 8 tokens.
pub fn engine_options(policy: ReplayPolicy, pages: usize, prefix_cache: bool) -> EngineOptions {
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
        tokenizer: None,
    }
}

/// Texts that begin alike now and then: of so many tokens, the first `same` those of the family.
pub fn prompt(family: u32, same: usize, own: u32, len: usize) -> Vec<u32> {
    let token = |seed: u32, i: usize| {
        let x = (seed + 1).wrapping_mul(2_654_435_761) ^ (i as u32 + 7).wrapping_mul(40_503_001);
        3 + (x >> 7) % 250
    };
    (0..len)
        .map(|i| token(if i < same { family } else { 1000 + own }, i))
        .collect()
}

/// Greedy continuations of prompts alone, by steps of a model.
pub struct Lone {
    pub model: Arc<Model>,
    known: HashMap<(ReplayPolicy, Vec<u32>), (Vec<u32>, usize)>,
}

impl Lone {
    pub fn new(model: &Arc<Model>) -> Self {
        Self {
            model: model.clone(),
            known: HashMap::new(),
        }
    }

    /// The first `new` tokens, and how many of them are sure. Where two tokens are as likely, sums in
    /// another order choose another.
    pub fn text(&mut self, policy: ReplayPolicy, prompt: &[u32], new: usize) -> (Vec<u32>, usize) {
        let key = (policy, prompt.to_vec());
        let run = || run_alone(&self.model, policy, prompt);
        let (ids, sure) = self.known.entry(key).or_insert_with(run);
        (ids[..new].to_vec(), new.min(*sure))
    }
}

fn run_alone(model: &Model, policy: ReplayPolicy, prompt: &[u32]) -> (Vec<u32>, usize) {
    const MOST: usize = 12;
    const TIE: f32 = 1e-3;
    let mut cache = model
        .new_cache(engine_options(policy, 64, false).cache)
        .unwrap();
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
        let row = flat(&model.forward(&[request], &mut cache).unwrap().logits);
        let id = greedy(&row);
        let close = row.iter().filter(|logit| row[id as usize] - **logit < TIE);
        if close.count() > 1 {
            sure = sure.min(ids.len());
        }
        ids.push(id);
        tokens = vec![id];
    }
    (ids, sure)
}

/// What came of a request.
#[derive(Debug, Default)]
pub struct Outcome {
    pub ids: Vec<u32>,
    pub started: usize,
    pub end: Option<EndReason>,
}

/// Collects updates, and checks their order.
pub fn collect(outcomes: &mut HashMap<RequestId, Outcome>, updates: Vec<(RequestId, Update)>) {
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
            Update::Finished { reason, .. } => outcome.end = Some(reason),
            Update::Prompt { .. } => panic!("{id}: nobody asked for the prompt"),
            Update::Failed(error) => panic!("{id}: {error}"),
        }
    }
}

/// What happens in a schedule.
#[derive(Debug, Clone)]
pub enum Op {
    /// A request comes: family, tokens of its beginning that are the family's, own seed, length, tokens
    /// to generate.
    Submit(u32, usize, u32, usize, usize),
    /// The n-th of all requests so far is cancelled, if it is still there.
    Cancel(usize),
    /// So many steps run.
    Steps(usize),
}

pub fn op() -> impl Strategy<Value = Op> {
    let submit = (0u32..2, 0usize..40, 0u32..3, 1usize..48, 0usize..12);
    prop_oneof![
        4 => submit.prop_map(|(family, same, own, len, new)| Op::Submit(family, same, own, len, new)),
        1 => any::<usize>().prop_map(Op::Cancel),
        5 => (1usize..6).prop_map(Op::Steps),
    ]
}

/// Runs a schedule to its end: every request ends once, with the text of its lone run (as far as that is
/// sure) or, if it was cancelled, its beginning; and every page comes back.
pub fn check(
    engine: &mut EngineCore,
    lone: &mut Lone,
    policy: ReplayPolicy,
    ops: &[Op],
) -> EngineStats {
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
        let (want, sure) = lone.text(policy, &prompt, new);
        let sure = sure.min(outcome.ids.len());
        assert_eq!(outcome.ids[..sure], want[..sure], "{id}");
        if !cancelled.contains(&id) {
            let whole = (outcome.ids.len(), outcome.end);
            assert_eq!(whole, (new, Some(EndReason::Length)), "{id}");
        }
    }
    assert!(outcomes.is_empty());
    let stats = engine.stats();
    assert_eq!(stats.free_pages, stats.pages, "every page comes back");
    stats
}
