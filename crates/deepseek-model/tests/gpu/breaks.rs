//! Steps in graphs that break at the cut: what an eager step gives, whatever is dropped.

use std::{num::NonZeroU32, sync::Arc};

use candle_core::DType;
use deepseek_model::{
    CacheOptions, GenerateOptions, Generator, Graphs, LogitRows, Model, ReplayLaunch, ReplayPolicy,
    ReplaySizes, Runner, RunnerOptions, SequenceOptions, StepMode, StepRequest,
    sampler::SamplingConfig,
};
use proptest::prelude::*;

use crate::common::scripts::{Script, cache_for, lone, packed_in, script};
use crate::common::{Expected, assert_close, flat, greedy, load, load_on};
use crate::{gpu, small};

/// The checkpoints' window.
const W: usize = 8;

/// Two implementations, and sums in other orders.
const TOLERANCE: f32 = 1e-3;

fn runner(model: &Arc<Model>, cache: CacheOptions, options: &RunnerOptions) -> Runner {
    let mut runner = Runner::new(model.clone(), cache, options).unwrap();
    runner.capture(|_, _| ()).unwrap();
    runner
}

fn one_sequence(policy: ReplayPolicy) -> CacheOptions {
    CacheOptions {
        max_sequences: 1,
        max_tokens: 512,
        page_tokens: CacheOptions::PAGE_TOKENS,
        policy,
        sampled_rows: NonZeroU32::MIN,
    }
}

/// Ids that no two prompts share.
fn tokens(n: usize, seed: usize) -> Vec<u32> {
    let id = |t: usize| 3 + ((seed * 31 + t * 7) % 250) as u32;
    (0..n).map(id).collect()
}

/// Runs a prompt in chunks and a few greedy steps: logits of every step, and how each ran.
fn run(runner: &mut Runner, prompt: &[u32], chunks: &[usize]) -> (Vec<Vec<f32>>, Vec<StepMode>) {
    let options = SequenceOptions {
        prompt_len: prompt.len(),
        keeps_rows: false,
    };
    let sequence = runner.add(options).unwrap();
    let (mut logits, mut modes) = (Vec::new(), Vec::new());
    let mut step = |tokens: &[u32], read| {
        let request = StepRequest {
            sequence,
            tokens,
            logits: read,
        };
        let (output, mode) = runner.forward(&[request]).unwrap();
        modes.push(mode);
        let row = flat(&output.logits);
        let next = (!row.is_empty()).then(|| greedy(&row));
        logits.push(row);
        next
    };
    let (mut at, mut next) = (0, None);
    for &n in chunks {
        let last = at + n == prompt.len();
        let read = if last {
            LogitRows::Last
        } else {
            LogitRows::None
        };
        next = step(&prompt[at..at + n], read);
        at += n;
    }
    for _ in 0..3 {
        next = step(&[next.expect("the last row is read")], LogitRows::Last);
    }
    runner.remove(sequence).unwrap();
    (logits, modes)
}

/// Prompts of 1 to 4W + 1 tokens, each in a graph of as many rows: the same bits as eager steps, in
/// every mode and under every policy, dropped rows or not (BR-07, BR-10, BR-19). 33 rows cross the
/// window, the threshold and the count of entries that are chosen.
#[test]
fn graphs_of_every_length_are_eager_steps() {
    let lengths: Vec<usize> = if small() {
        vec![1, W, W + 1, 2 * W + 3]
    } else {
        (1..=4 * W + 1).collect()
    };
    let all = [("engram-s1", DType::F32), ("bf16-s1", DType::BF16)];
    for &(name, dtype) in if small() { &all[..1] } else { &all[..] } {
        let model = Arc::new(load_on(&gpu(), dtype, name, true));
        for policy in ReplayPolicy::ALL {
            let cache = one_sequence(policy);
            let off = RunnerOptions {
                graphs: Graphs::Off,
                ..RunnerOptions::default()
            };
            let mut eager = runner(&model, cache, &off);
            for graphs in [Graphs::Full, Graphs::Piecewise, Graphs::FullAndPiecewise] {
                let options = RunnerOptions {
                    graphs,
                    capture_sizes: lengths.iter().map(|n| *n as u32).collect(),
                    replay_sizes: ReplaySizes::Of(vec![W as u32]),
                    trim_threshold: Some(W as u32 + 1),
                    ..RunnerOptions::default()
                };
                let mut graph = runner(&model, cache, &options);
                for &n in &lengths {
                    let prompt = tokens(n, n);
                    let what = format!("{name} {dtype:?} {policy} {graphs:?}, {n} tokens");
                    let (want, _) = run(&mut eager, &prompt, &[n]);
                    let (got, modes) = run(&mut graph, &prompt, &[n]);
                    check_modes(&what, policy, graphs, n, &modes);
                    if policy == ReplayPolicy::Exact && graphs != Graphs::Full && n <= W {
                        // The last layers of an eager step drop rows here, a graph below the
                        // threshold none: products of other heights, which sum in another order.
                        continue;
                    }
                    assert!(
                        got == want,
                        "{what}: {modes:?}: graph and eager step differ"
                    );
                }
            }
        }
    }
}

/// A prefill of `n` tokens and decode steps ran as the mode asks.
fn check_modes(what: &str, policy: ReplayPolicy, graphs: Graphs, n: usize, modes: &[StepMode]) {
    let piecewise = |padded_rows, broke| StepMode::Piecewise { padded_rows, broke };
    let window = replay_core::RowCount::new(W as u32);
    let in_graph = ReplayLaunch::Graph {
        padded_rows: window,
    };
    let broke = match policy {
        _ if n <= W => None,
        ReplayPolicy::Off => None,
        ReplayPolicy::StepTail | ReplayPolicy::PromptTail => Some(in_graph),
        // Another set of rows in each layer; or more than the graph holds, if none is dropped.
        ReplayPolicy::Exact => Some(ReplayLaunch::Eager),
    };
    let prefill = match graphs {
        Graphs::Full => StepMode::Eager,
        _ => piecewise(n, broke),
    };
    let decode = match graphs {
        Graphs::Piecewise => piecewise(1, None),
        _ => StepMode::Full { padded_rows: 1 },
    };
    assert_eq!(modes[0], prefill, "{what}");
    assert!(
        modes[1..].iter().all(|mode| *mode == decode),
        "{what}: {modes:?}"
    );
}

/// A chunk without a kept row skips the layers, and still stores what the cut makes of it: the next
/// chunk reads it. Chunks that are not the last, each in a graph.
#[test]
fn a_chunk_without_kept_rows_skips_the_layers() {
    let model = Arc::new(load_on(&gpu(), DType::F32, "engram-s1", false));
    let options = RunnerOptions {
        trim_threshold: Some(W as u32 + 1),
        ..RunnerOptions::default()
    };
    let prompt = tokens(60, 5);
    for policy in [ReplayPolicy::PromptTail, ReplayPolicy::Exact] {
        let mut graph = runner(&model, one_sequence(policy), &options);
        let (want, _) = run(&mut graph, &prompt, &[60]);
        for chunks in [
            &[20, 20, 20][..],
            &[25, 30, 5],
            &[48, 12],
            &[57, 3],
            &[13, 47],
        ] {
            let (got, modes) = run(&mut graph, &prompt, chunks);
            let (got, rest) = (&got[chunks.len() - 1..], &modes[..chunks.len()]);
            for (got, want) in got.iter().zip(&want) {
                assert_close(&format!("{policy} {chunks:?}"), got, want, TOLERANCE);
            }
            let skips = rest.iter().filter(|mode| {
                let skip = Some(ReplayLaunch::Skip);
                matches!(mode, StepMode::Piecewise { broke, .. } if *broke == skip)
            });
            let expected = match (policy, chunks) {
                // Kept are rows from 52 on, and from 38 on.
                (ReplayPolicy::PromptTail, [20, 20, 20]) => 2,
                (_, [20, 20, 20] | [25, 30, 5] | [13, 47])
                | (ReplayPolicy::PromptTail, [48, 12]) => 1,
                _ => 0,
            };
            assert_eq!(skips.count(), expected, "{policy} {chunks:?}: {rest:?}");
        }
    }
}

/// Up to eight requests, prefill chunks, decode rows and kept prompts in any mix and order, padded to
/// few sizes, in a cache full of NaN: each gets the result of its lone run on the CPU, and so do later steps in the same
/// graphs (BR-02, BR-12, BR-16, BR-17, BR-21).
#[test]
fn any_mix_in_graphs_gives_each_its_own_result() {
    let cpu = load("engram-s1", false);
    let model = Arc::new(load_on(&gpu(), DType::F32, "engram-s1", false));
    let cases = if small() { 1 } else { 12 };
    let mut cases = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(cases));
    let inputs = (
        prop::collection::vec(script(), 1..9),
        prop::collection::vec(any::<u8>(), 0..12),
        prop::sample::select(vec![
            ReplaySizes::Ladder,
            ReplaySizes::Eager,
            ReplaySizes::Of(vec![4, 40]),
        ]),
    );
    let check = |(scripts, schedule, replay_sizes): (Vec<Script>, Vec<u8>, ReplaySizes)| {
        for policy in ReplayPolicy::ALL {
            let options = RunnerOptions {
                graphs: Graphs::FullAndPiecewise,
                capture_sizes: vec![2, 8, 16, 32, 64],
                replay_sizes: replay_sizes.clone(),
                trim_threshold: Some(W as u32 + 1),
                ..RunnerOptions::default()
            };
            let mut graph = runner(&model, cache_for(scripts.len(), policy), &options);
            graph.fill(f32::NAN).unwrap();
            let got = packed_in(&mut graph, &scripts, &schedule);
            for (i, script) in scripts.iter().enumerate() {
                for (step, want) in lone(&cpu, script, policy).iter().enumerate() {
                    let what = format!("{policy} {replay_sizes:?} request {i} step {step}");
                    assert_close(&what, &got[i][step], want, TOLERANCE);
                }
            }
        }
        Ok(())
    };
    cases.run(&inputs, check).unwrap();
}

/// 48 greedy ids of the demo, in every mode, under every policy and chunking: the reference's, which
/// the CPU gives as well, and under `StepTail`, where they depend on the chunks and a reference has one
/// chunking only, the CPU's. Where a sanitizer watches, 3 ids of a shorter prompt, those of eager steps.
#[test]
fn the_demo_writes_the_cpu_s_text_in_every_mode() {
    let expected = Expected::load("v41-demo");
    let prompt = expected.ids("tokens");
    let model = Arc::new(load_on(&gpu(), DType::F32, "v41-demo", false));
    if small() {
        let short = &prompt[..100];
        for policy in [ReplayPolicy::PromptTail, ReplayPolicy::StepTail] {
            let ids = |graphs| generate(&model, (short, 3), policy, (graphs, 100, BREAKS));
            let want = ids(Graphs::Off);
            for graphs in [Graphs::Full, Graphs::Piecewise, Graphs::FullAndPiecewise] {
                assert_eq!(ids(graphs), want, "{policy} {graphs:?}");
            }
        }
        return;
    }
    let cpu = Arc::new(load("v41-demo", false));
    for policy in ReplayPolicy::ALL {
        // Chunks of 100 rows below the threshold: graphs keep what an eager step drops of them.
        for (chunk, threshold) in [(600, BREAKS), (256, BREAKS), (37, BREAKS), (100, KEEPS)] {
            let want = match policy {
                ReplayPolicy::Off => expected.ids("plain.off.ids"),
                ReplayPolicy::PromptTail => expected.ids("plain.bounded.ids"),
                ReplayPolicy::Exact => expected.ids("plain.exact.ids"),
                ReplayPolicy::StepTail => {
                    generate(&cpu, (&prompt, 48), policy, (Graphs::Off, chunk, threshold))
                }
            };
            for graphs in [
                Graphs::Off,
                Graphs::Full,
                Graphs::Piecewise,
                Graphs::FullAndPiecewise,
            ] {
                let got = generate(&model, (&prompt, 48), policy, (graphs, chunk, threshold));
                assert_eq!(got, want, "{policy} {graphs:?} chunk {chunk}");
            }
        }
    }
}

/// A trim threshold one above the demo's window, and the default, 192 rows.
const BREAKS: Option<u32> = Some(33);
const KEEPS: Option<u32> = None;

/// Greedy ids after a prompt, each step in the mode that is asked for.
fn generate(
    model: &Arc<Model>,
    (prompt, new): (&[u32], usize),
    policy: ReplayPolicy,
    (graphs, chunk, trim_threshold): (Graphs, usize, Option<u32>),
) -> Vec<u32> {
    let mut runner = RunnerOptions {
        graphs,
        trim_threshold,
        ..RunnerOptions::default()
    };
    if small() {
        runner.capture_sizes = vec![1, 100];
    }
    let options = GenerateOptions {
        policy,
        chunk: chunk.try_into().unwrap(),
        max_new_tokens: new,
        stop_ids: vec![],
        sampling: SamplingConfig::GREEDY,
        logprobs: false,
        runner,
    };
    let mut generator = Generator::new(model.clone(), vec![prompt.to_vec()], options).unwrap();
    generator.capture(|_, _| ()).unwrap();
    while !generator.is_finished() {
        generator.step().unwrap();
    }
    let steps = generator.summary().steps;
    let in_graphs = matches!(graphs, Graphs::Piecewise | Graphs::FullAndPiecewise);
    assert_eq!(steps.prefill.eager.steps == 0, in_graphs, "{steps:?}");
    let fully = matches!(graphs, Graphs::Full | Graphs::FullAndPiecewise);
    assert_eq!(steps.decode.full.steps > 0, fully, "{steps:?}");
    generator.results().next().unwrap().ids.clone()
}

/// A second pass over all sizes captures nothing, and takes nothing (BR-29).
#[test]
fn a_second_capture_takes_nothing() {
    let device = gpu();
    let model = Arc::new(load_on(&device, DType::F32, "engram-s1", true));
    let cache = one_sequence(ReplayPolicy::PromptTail);
    let mut runner = Runner::new(model, cache, &RunnerOptions::default()).unwrap();
    let (mut last, mut most) = (0, 0);
    let first = runner
        .capture(|done, total| (last, most) = (done, total))
        .unwrap();
    assert!(first.captured > 10 && first.already == 0, "{first:?}");
    assert_eq!([last, most], [first.captured; 2]);
    let before = crate::free(&device);
    let second = runner.capture(|_, _| ()).unwrap();
    assert_eq!([second.captured, second.already], [0, first.captured]);
    assert_eq!(crate::free(&device), before);
}

/// Each mode marks all phases of its steps, dropped rows or not.
#[test]
fn a_profile_has_every_phase_in_every_mode() {
    let model = Arc::new(load_on(&gpu(), DType::F32, "engram-s1", true));
    for policy in ReplayPolicy::ALL {
        for graphs in [Graphs::Off, Graphs::Full, Graphs::Piecewise] {
            let options = RunnerOptions {
                graphs,
                trim_threshold: Some(W as u32 + 1),
                profile: true,
                ..RunnerOptions::default()
            };
            let mut runner = runner(&model, one_sequence(policy), &options);
            let prompt = tokens(60, 1);
            let options = SequenceOptions {
                prompt_len: 60,
                keeps_rows: false,
            };
            let sequence = runner.add(options).unwrap();
            assert!(runner.profile().unwrap().is_none(), "captures are no steps");
            let step = |tokens: &[u32]| {
                let request = StepRequest {
                    sequence,
                    tokens,
                    logits: LogitRows::None,
                };
                let begun = std::time::Instant::now();
                runner.forward(&[request]).unwrap();
                let times = runner.profile().unwrap().unwrap();
                let (total, wall) = (times.total(), begun.elapsed());
                let what = format!("{policy} {graphs:?} {} rows: {times:?}", tokens.len());
                assert!(!times.encoder.is_zero(), "{what}");
                assert!(total < wall, "{what} of {wall:?}");
                times
            };
            let times = [&prompt[..20], &prompt[20..], &prompt[..1]].map(step);
            if policy == ReplayPolicy::PromptTail {
                // No row of the first chunk is kept.
                assert!(times[0].replay < times[1].replay, "{graphs:?}: {times:?}");
            }
        }
    }
}
