//! A packed batch gives each request the result of its lone run, whatever it is packed with.

mod common;

use std::{num::NonZeroU32, sync::LazyLock};

use common::{Lone, assert_close, flat, load};
use deepseek_model::{CacheOptions, LogitRows, Model, ReplayPolicy, SequenceOptions, StepRequest};
use proptest::prelude::*;

static MODEL: LazyLock<Model> = LazyLock::new(|| load("engram-s1", false));

/// Matrix products of different heights may sum in another order.
const TOLERANCE: f32 = 1e-4;

const POLICIES: [ReplayPolicy; 4] = [
    ReplayPolicy::Off,
    ReplayPolicy::StepTail,
    ReplayPolicy::PromptTail,
    ReplayPolicy::Exact,
];

/// A request: a prompt in chunks, then decode steps with given tokens.
#[derive(Debug, Clone)]
struct Script {
    tokens: Vec<u32>,
    /// Rows of each of its steps; those after the prompt's are 1.
    steps: Vec<usize>,
    prompt_len: usize,
    keeps_rows: bool,
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

fn script() -> impl Strategy<Value = Script> {
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
fn lone(script: &Script, policy: ReplayPolicy) -> Vec<Vec<f32>> {
    let mut run = Lone::with(&MODEL, policy, script.options());
    let mut end = 0;
    let step = |&n: &usize| {
        let tokens = &script.tokens[end..end + n];
        end += n;
        run.step(tokens, script.reads(end))
    };
    script.steps.iter().map(step).collect()
}

/// Runs all scripts in one cache. Each number of `schedule` is a step: its bits say which scripts
/// take part, its remainder how they are rotated. Scripts left over then run one at a time.
fn packed(scripts: &[Script], policy: ReplayPolicy, schedule: &[u8]) -> Vec<Vec<Vec<f32>>> {
    let options = CacheOptions {
        max_sequences: scripts.len(),
        max_tokens: 64 * scripts.len(),
        policy,
        sampled_rows: NonZeroU32::MIN,
    };
    let mut cache = MODEL.new_cache(options).unwrap();
    cache.fill(f32::NAN).unwrap();
    let ids: Vec<_> = scripts
        .iter()
        .map(|s| cache.add(s.options()).unwrap())
        .collect();
    let mut results = vec![Vec::new(); scripts.len()];
    let mut run = |chosen: &[usize]| {
        let open = |i: &&usize| results[**i].len() < scripts[**i].steps.len();
        let chosen: Vec<usize> = chosen.iter().filter(open).copied().collect();
        let requests: Vec<_> = chosen
            .iter()
            .map(|&i| {
                let (start, n) = (
                    cache.len(ids[i]).unwrap(),
                    scripts[i].steps[results[i].len()],
                );
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
        let output = MODEL.forward(&requests, &mut cache).unwrap();
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Prefill chunks, decode rows and kept prompts in any mix and order, in a cache full of NaN.
    #[test]
    fn any_mix_of_requests_gives_each_its_own_result(
        scripts in prop::collection::vec(script(), 1..5),
        schedule in prop::collection::vec(1u8..16, 0..8),
    ) {
        for policy in POLICIES {
            let got = packed(&scripts, policy, &schedule);
            for (i, script) in scripts.iter().enumerate() {
                for (step, want) in lone(script, policy).iter().enumerate() {
                    assert_close(&format!("{policy} request {i} step {step}"), &got[i][step], want, TOLERANCE);
                }
            }
        }
    }
}

/// The order of the requests in a step changes nothing, and neither does taking turns.
#[test]
fn every_order_of_three_requests_gives_the_same() {
    let tokens: Vec<u32> = (0..48).map(|i| 3 + i * 5 % 270).collect();
    let scripts = [
        Script {
            tokens: tokens.clone(),
            steps: vec![20, 1, 1],
            prompt_len: 20,
            keeps_rows: false,
        },
        Script {
            tokens: tokens[7..].to_vec(),
            steps: vec![6, 1],
            prompt_len: 6,
            keeps_rows: true,
        },
        Script {
            tokens: tokens[3..].to_vec(),
            steps: vec![16, 9, 1],
            prompt_len: 25,
            keeps_rows: false,
        },
    ];
    for policy in POLICIES {
        let want: Vec<_> = scripts.iter().map(|s| lone(s, policy)).collect();
        for order in [
            [0, 1, 2],
            [0, 2, 1],
            [1, 0, 2],
            [1, 2, 0],
            [2, 0, 1],
            [2, 1, 0],
        ] {
            let permuted: Vec<Script> = order.iter().map(|&i| scripts[i].clone()).collect();
            for schedule in [&[7u8, 7, 7][..], &[1, 2, 4, 1, 2, 4, 1, 4]] {
                let got = packed(&permuted, policy, schedule);
                for (at, &i) in order.iter().enumerate() {
                    for (step, want) in want[i].iter().enumerate() {
                        assert_close(
                            &format!("{policy} {order:?} {i}.{step}"),
                            &got[at][step],
                            want,
                            TOLERANCE,
                        );
                    }
                }
            }
        }
    }
}
