//! Prompts that find the entries of their beginning in the cache.

use std::{num::NonZeroU32, sync::Arc};

use candle_core::DType;
use deepseek_model::{
    CacheOptions, Graphs, LogitRows, Model, PrefixOptions, ReplayPolicy, Runner, RunnerOptions,
    StepRequest,
};

use crate::common::{assert_close, flat, load, load_on};
use crate::{gpu, small};

const PAGE: usize = 128;

fn text(seed: usize, len: usize) -> Vec<u32> {
    let token = |i: usize| 3 + ((i * 7 + i * i * 3 + seed * 31) % 250) as u32;
    (0..len).map(token).collect()
}

/// Two prompts of the same beginning, one after the other, each with some decode steps: the logits that
/// are read. The cache is full of NaN before.
fn two(model: &Arc<Model>, policy: ReplayPolicy, graphs: Graphs) -> Vec<Vec<f32>> {
    let cache = CacheOptions {
        max_sequences: 2,
        max_tokens: 1024,
        page_tokens: CacheOptions::PAGE_TOKENS,
        policy,
        sampled_rows: NonZeroU32::MIN,
    };
    let options = RunnerOptions {
        graphs,
        capture_sizes: vec![1, 16, 40],
        trim_threshold: Some(9),
        ..RunnerOptions::default()
    };
    let mut runner = Runner::new(model.clone(), cache, &options).unwrap();
    runner.capture(|_, _| ()).unwrap();
    runner.fill(f32::NAN).unwrap();
    let shared = text(1, 2 * PAGE);
    let mut read = Vec::new();
    for (seed, suffix) in [(2, 5), (3, 29)] {
        let prompt = [&shared[..], &text(seed, suffix)].concat();
        let (sequence, found) = runner
            .add_prompt(&prompt, false, PrefixOptions::default())
            .unwrap();
        assert_eq!(
            found.tokens,
            if seed == 2 { 0 } else { 2 * PAGE },
            "{policy}"
        );
        let rest = &prompt[found.start..];
        let decoded = text(4, 10);
        let chunks = rest.chunks(40).chain(decoded.chunks(1));
        let prefill = rest.len().div_ceil(40);
        for (index, tokens) in chunks.enumerate() {
            let logits = if index + 1 < prefill {
                LogitRows::None
            } else {
                LogitRows::Last
            };
            let request = StepRequest {
                sequence,
                tokens,
                logits,
            };
            let (output, _) = runner.forward(&[request]).unwrap();
            if logits == LogitRows::Last {
                read.push(flat(&output.logits));
            }
        }
    }
    read
}

/// In graphs and without, under every policy: what the CPU gives. Window KV below the rows that are
/// computed again is NaN (BR-11, BR-12), and entries that were found are read and not written.
#[test]
fn hits_give_the_cpu_s_values_in_every_mode() {
    let cpu = Arc::new(load("engram-s1", false));
    let model = Arc::new(load_on(&gpu(), DType::F32, "engram-s1", false));
    let policies = if small() {
        &[ReplayPolicy::PromptTail][..]
    } else {
        &ReplayPolicy::ALL[..]
    };
    for &policy in policies {
        let want = two(&cpu, policy, Graphs::Off);
        for graphs in [Graphs::Off, Graphs::Piecewise, Graphs::FullAndPiecewise] {
            let got = two(&model, policy, graphs);
            assert_eq!(got.len(), want.len());
            for (step, (got, want)) in got.iter().zip(&want).enumerate() {
                let what = format!("{policy} {graphs:?} step {step}");
                assert_close(&what, got, want, 1e-3);
            }
        }
    }
}
