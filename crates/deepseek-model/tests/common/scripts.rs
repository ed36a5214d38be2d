//! Requests that are packed together in many ways, and each by itself.

use std::num::NonZeroU32;

use deepseek_model::{
    CacheOptions, KvCache, LogitRows, Model, ReplayPolicy, Runner, SequenceId, SequenceOptions,
    StepOutput, StepRequest,
};
use proptest::prelude::*;

use super::{Lone, flat};

/// Matrix products of different heights may sum in another order.
pub const TOLERANCE: f32 = 1e-4;

/// A request: a prompt in chunks, then decode steps with given tokens.
#[derive(Debug, Clone)]
pub struct Script {
    pub tokens: Vec<u32>,
    /// Rows of each of its steps; those after the prompt's are 1.
    pub steps: Vec<usize>,
    pub prompt_len: usize,
    pub keeps_rows: bool,
}

impl Script {
    fn options(&self) -> SequenceOptions {
        SequenceOptions {
            prompt_len: self.prompt_len,
            keeps_rows: self.keeps_rows,
        }
    }

    /// Which rows step `step`, which ends at `end`, may read.
    fn reads(&self, end: usize) -> LogitRows {
        match (self.keeps_rows, end >= self.prompt_len) {
            (true, _) => LogitRows::All,
            (false, true) => LogitRows::Last,
            (false, false) => LogitRows::None,
        }
    }
}

pub fn script() -> impl Strategy<Value = Script> {
    let chunks = prop::collection::vec(1usize..14, 1..4);
    (
        chunks,
        0usize..4,
        any::<bool>(),
        prop::collection::vec(3u32..280, 48),
    )
        .prop_map(|(chunks, decode, keeps_rows, tokens)| {
            let prompt_len = chunks.iter().sum();
            let steps = chunks
                .into_iter()
                .chain(std::iter::repeat_n(1, decode))
                .collect();
            Script {
                tokens,
                steps,
                prompt_len,
                keeps_rows,
            }
        })
}

/// Logits of every step of a lone run.
pub fn lone(model: &Model, script: &Script, policy: ReplayPolicy) -> Vec<Vec<f32>> {
    let mut run = Lone::with(model, policy, script.options());
    let mut end = 0;
    let step = |&n: &usize| {
        let tokens = &script.tokens[end..end + n];
        end += n;
        run.step(tokens, script.reads(end))
    };
    script.steps.iter().map(step).collect()
}

/// What steps are run on.
pub trait Steps {
    fn add(&mut self, options: SequenceOptions) -> SequenceId;
    fn len(&self, id: SequenceId) -> usize;
    fn step(&mut self, requests: &[StepRequest<'_>]) -> StepOutput;
}

impl Steps for (&Model, KvCache) {
    fn add(&mut self, options: SequenceOptions) -> SequenceId {
        self.1.add(options).unwrap()
    }

    fn len(&self, id: SequenceId) -> usize {
        self.1.len(id).unwrap()
    }

    fn step(&mut self, requests: &[StepRequest<'_>]) -> StepOutput {
        self.0.forward(requests, &mut self.1).unwrap()
    }
}

impl Steps for Runner {
    fn add(&mut self, options: SequenceOptions) -> SequenceId {
        Runner::add(self, options).unwrap()
    }

    fn len(&self, id: SequenceId) -> usize {
        self.cache().len(id).unwrap()
    }

    fn step(&mut self, requests: &[StepRequest<'_>]) -> StepOutput {
        self.forward(requests).unwrap().0
    }
}

/// The cache that scripts run in.
pub fn cache_for(scripts: usize, policy: ReplayPolicy) -> CacheOptions {
    CacheOptions {
        max_sequences: scripts,
        max_tokens: 64 * scripts,
        page_tokens: CacheOptions::PAGE_TOKENS,
        policy,
        sampled_rows: NonZeroU32::MIN,
    }
}

/// As [`packed_in`], operation by operation and in a cache full of NaN.
pub fn packed(
    model: &Model,
    scripts: &[Script],
    policy: ReplayPolicy,
    schedule: &[u8],
) -> Vec<Vec<Vec<f32>>> {
    let mut cache = model.new_cache(cache_for(scripts.len(), policy)).unwrap();
    cache.fill(f32::NAN).unwrap();
    packed_in(&mut (model, cache), scripts, schedule)
}

/// Runs all scripts side by side. Each number of `schedule` is a step: its bits say which scripts
/// take part, its remainder how they are rotated. Scripts left over then run one at a time.
pub fn packed_in(
    steps: &mut impl Steps,
    scripts: &[Script],
    schedule: &[u8],
) -> Vec<Vec<Vec<f32>>> {
    let ids: Vec<_> = scripts.iter().map(|s| steps.add(s.options())).collect();
    let mut results = vec![Vec::new(); scripts.len()];
    let mut run = |chosen: &[usize]| {
        let open = |i: &&usize| results[**i].len() < scripts[**i].steps.len();
        let chosen: Vec<usize> = chosen.iter().filter(open).copied().collect();
        let requests: Vec<_> = chosen
            .iter()
            .map(|&i| {
                let (start, n) = (steps.len(ids[i]), scripts[i].steps[results[i].len()]);
                let tokens = &scripts[i].tokens[start..start + n];
                StepRequest {
                    sequence: ids[i],
                    tokens,
                    logits: scripts[i].reads(start + n),
                }
            })
            .collect();
        if requests.is_empty() {
            return;
        }
        let output = steps.step(&requests);
        for (&i, range) in chosen.iter().zip(&output.ranges) {
            results[i].push(flat(
                &output.logits.narrow(0, range.start, range.len()).unwrap(),
            ));
        }
    };
    for &step in schedule {
        let mut chosen: Vec<usize> = (0..scripts.len()).filter(|i| step >> i & 1 == 1).collect();
        let rotation = usize::from(step) % chosen.len().max(1);
        chosen.rotate_left(rotation);
        run(&chosen);
    }
    for (i, script) in scripts.iter().enumerate() {
        for _ in &script.steps {
            run(&[i]);
        }
    }
    results
}
