//! Decode steps in full graphs: the same bits as eager steps.

use std::{num::NonZeroU32, sync::Arc};

use candle_core::DType;
use deepseek_model::{
    CacheOptions, Graphs, Model, ReplayPolicy, Runner, RunnerOptions, SequenceId, StepMode,
};

use crate::common::load_on;
use crate::drive::{decode, start};
use crate::{free, gpu, small};

fn runner(model: &Arc<Model>, sequences: usize, graphs: Graphs) -> Runner {
    let cache = CacheOptions {
        max_sequences: sequences,
        max_tokens: 512 * sequences,
        page_tokens: CacheOptions::PAGE_TOKENS,
        policy: ReplayPolicy::PromptTail,
        sampled_rows: NonZeroU32::MIN,
    };
    let options = RunnerOptions {
        graphs,
        ..RunnerOptions::default()
    };
    let mut runner = Runner::new(model.clone(), cache, &options).unwrap();
    runner.capture(|_, _| ()).unwrap();
    runner
}

/// Prompts of many lengths: around the window, a page, a group.
fn prompts(n: usize) -> Vec<Vec<u32>> {
    let lengths = [1, 2, 7, 8, 9, 31, 33, 64, 100, 127, 128, 130];
    let prompt = |i: usize| (0..lengths[i % 12]).map(move |t| 3 + ((i * 31 + t * 7) % 250) as u32);
    (0..n).map(|i| prompt(i).collect()).collect()
}

/// Adds the prompts, one chunk each; the first greedy id of each.
fn prefill(runner: &mut Runner, prompts: &[Vec<u32>]) -> Vec<(SequenceId, u32)> {
    let add = |prompt: &Vec<u32>| {
        let (sequence, mode) = start(runner, prompt);
        assert_eq!(mode, StepMode::Eager);
        sequence
    };
    prompts.iter().map(add).collect()
}

/// Batches of every size up to 8, padded and not, over 40 steps: across pages, groups and the ring.
/// Bit for bit where graph and eager step have the same number of rows; padding changes the shapes
/// that cuBLAS sees, and with them the order of its sums. In f32 the cache is not rounded: its formats
/// would make a visible step of a last bit.
#[test]
fn graphs_decode_as_eager_steps_do() {
    let all = [
        ("engram-s1", DType::F32),
        ("bf16-s1", DType::F32),
        ("engram-s1", DType::BF16),
    ];
    let (models, sizes, steps) = if small() {
        (&all[..1], 2..=3, 4)
    } else {
        (&all[..], 1..=8, 40)
    };
    for &(name, dtype) in models {
        let model = Arc::new(load_on(&gpu(), dtype, name, dtype == DType::BF16));
        for n in sizes.clone() {
            let prompts = prompts(n);
            let mut eager = runner(&model, 8, Graphs::Off);
            let mut graph = runner(&model, 8, Graphs::Full);
            let mut a = prefill(&mut eager, &prompts);
            let mut b = prefill(&mut graph, &prompts);
            for step in 0..steps {
                let (want, eagerly) = decode(&mut eager, &mut a);
                let (got, mode) = decode(&mut graph, &mut b);
                assert_eq!(eagerly, StepMode::Eager);
                let padded_rows = n.next_power_of_two();
                assert_eq!(mode, StepMode::Full { padded_rows });
                let what = format!("{name} {dtype:?}, {n} requests, step {step}");
                if padded_rows == n {
                    assert!(got == want, "{what}: graph and eager step differ");
                } else if dtype == DType::F32 {
                    crate::common::assert_close(&what, &got, &want, 1e-3);
                    let ids = |batch: &[(SequenceId, u32)]| -> Vec<u32> {
                        batch.iter().map(|(_, id)| *id).collect()
                    };
                    assert_eq!(ids(&a), ids(&b), "{what}");
                }
            }
        }
    }
}

/// Batches that shrink, grow and change places in one bucket, with a prefill between: nothing of an
/// earlier launch is left in the lists (BR-21).
#[test]
fn shrinking_and_growing_batches_keep_their_text() {
    let model = Arc::new(load_on(&gpu(), DType::F32, "engram-s1", true));
    let prompts = prompts(5);
    let alone: Vec<Vec<u32>> = prompts
        .iter()
        .map(|prompt| {
            let mut eager = runner(&model, 5, Graphs::Off);
            let mut batch = prefill(&mut eager, std::slice::from_ref(prompt));
            let ids = |_| {
                decode(&mut eager, &mut batch);
                batch[0].1
            };
            (0..12).map(ids).collect()
        })
        .collect();
    let mut graph = runner(&model, 5, Graphs::Full);
    let mut all = prefill(&mut graph, &prompts[..4]);
    let mut ids = vec![Vec::new(); 5];
    let members = [
        vec![0, 1, 2, 3],
        vec![3, 1],
        vec![2, 0, 1],
        vec![1],
        vec![0, 3, 2, 1],
    ];
    let rounds = if small() { 12 } else { 20 };
    for (round, chosen) in members.iter().cycle().take(rounds).enumerate() {
        if round == 10 {
            all.extend(prefill(&mut graph, &prompts[4..]));
        }
        let mut chosen = chosen.clone();
        if round >= 10 {
            chosen.push(4);
        }
        let mut batch: Vec<_> = chosen.iter().map(|i| all[*i]).collect();
        decode(&mut graph, &mut batch);
        for (i, row) in chosen.iter().zip(batch) {
            all[*i] = row;
            ids[*i].push(row.1);
        }
    }
    for (i, (got, want)) in ids.iter().zip(&alone).enumerate() {
        let n = got.len().min(want.len());
        assert!(n > 1, "request {i} took part {n} times");
        assert_eq!(got[..n], want[..n], "request {i}");
    }
}

/// Graphs that are captured beside live sequences, in a cache that holds their KV: the sequences go on
/// as without a capture, and new ones begin as well, in decode graphs and in graphs that break.
#[test]
fn a_capture_leaves_live_sequences_alone() {
    let model = Arc::new(load_on(&gpu(), DType::F32, "engram-s1", false));
    for policy in ReplayPolicy::ALL {
        let uncaptured = |graphs| {
            let cache = CacheOptions {
                max_sequences: 8,
                max_tokens: 4096,
                page_tokens: CacheOptions::PAGE_TOKENS,
                policy,
                sampled_rows: NonZeroU32::MIN,
            };
            let options = RunnerOptions {
                graphs,
                capture_sizes: vec![1, 8, 64],
                trim_threshold: Some(9),
                ..RunnerOptions::default()
            };
            Runner::new(model.clone(), cache, &options).unwrap()
        };
        let mut runners = [Graphs::Off, Graphs::FullAndPiecewise].map(uncaptured);
        // What a capture writes to any slot but a pad row's, it writes over these.
        let live = prompts(7);
        let mut batches = runners.each_mut().map(|runner| prefill(runner, &live));
        for round in 0..6 {
            let mut logits = Vec::new();
            for (runner, batch) in runners.iter_mut().zip(&mut batches) {
                logits.push(decode(runner, batch));
            }
            let [(want, _), (got, mode)] = logits.try_into().unwrap();
            let what = format!("{policy} round {round}");
            crate::common::assert_close(&what, &got, &want, 1e-3);
            let ids = |batch: &[(SequenceId, u32)]| batch.iter().map(|row| row.1).collect();
            let ids: [Vec<u32>; 2] = batches.each_ref().map(|batch| ids(batch));
            assert_eq!(ids[0], ids[1], "{what}");
            let captured = round > 2;
            assert_eq!(
                mode == StepMode::Full { padded_rows: 8 },
                captured,
                "{what}"
            );
            if round == 2 {
                let report = runners[1].capture(|_, _| ()).unwrap();
                assert_eq!(runners[1].captured().already, report.captured);
            }
        }
        // Another prompt, beside those that are there: in a graph that breaks, unless nothing drops.
        let prompt: Vec<u32> = (0..50).map(|t| 3 + t * 5).collect();
        let started = runners.each_mut().map(|runner| start(runner, &prompt));
        let [((_, want), _), ((_, got), mode)] = started;
        assert_eq!(got, want, "{policy}");
        assert!(
            matches!(
                mode,
                StepMode::Piecewise {
                    padded_rows: 64,
                    ..
                }
            ),
            "{mode:?}"
        );
    }
}

/// Sequences that are longer than graphs are made for run eagerly, and others in the same runner in
/// graphs: both write what they write without any.
#[test]
fn sequences_beyond_the_graphs_run_eagerly() {
    let model = Arc::new(load_on(&gpu(), DType::F32, "engram-s1", true));
    let short = |graphs| {
        let cache = CacheOptions {
            max_sequences: 2,
            max_tokens: 1024,
            page_tokens: CacheOptions::PAGE_TOKENS,
            policy: ReplayPolicy::PromptTail,
            sampled_rows: NonZeroU32::MIN,
        };
        let options = RunnerOptions {
            graphs,
            capture_sizes: vec![1, 2],
            max_sequence_tokens: Some(35),
            ..RunnerOptions::default()
        };
        let mut runner = Runner::new(model.clone(), cache, &options).unwrap();
        runner.capture(|_, _| ()).unwrap();
        runner
    };
    let mut runners = [Graphs::Off, Graphs::Full].map(short);
    let prompt: Vec<u32> = (0..30).map(|t| 3 + t * 7).collect();
    let mut batches = runners.each_mut().map(|runner| [start(runner, &prompt).0]);
    for at in 31..40 {
        let (want, _) = decode(&mut runners[0], &mut batches[0]);
        let (got, mode) = decode(&mut runners[1], &mut batches[1]);
        let expected = match at {
            ..=35 => StepMode::Full { padded_rows: 1 },
            _ => StepMode::Eager,
        };
        assert_eq!(mode, expected, "token {at}");
        assert!(got == want, "token {at}: graph and eager step differ");
    }
}

/// 300 decode steps leave the device's memory as it was.
#[test]
fn decode_steps_leave_memory_flat() {
    let device = gpu();
    let model = Arc::new(load_on(&device, DType::F32, "engram-s1", true));
    let mut graph = runner(&model, 4, Graphs::Full);
    let mut batch = prefill(&mut graph, &prompts(4));
    let mut after = Vec::new();
    let every = if small() { 5 } else { 100 };
    for step in 0..3 * every {
        decode(&mut graph, &mut batch);
        if step % every == every / 2 {
            after.push(free(&device));
        }
    }
    assert!(after.windows(2).all(|pair| pair[0] == pair[1]), "{after:?}");
}
