//! Many requests, one after the other and at once: equal answers, and nothing that grows.

use std::{
    num::NonZeroU32,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use candle_core::{DType, Device, Tensor};
use deepseek_model::{
    CacheOptions, Graphs, Model, ReplayPolicy, Runner, RunnerOptions, SequenceId,
};

use crate::common::load_on;
use crate::drive::{self, decode};
use crate::{free, gpu, small};

fn runner(model: &Arc<Model>, sequences: usize, graphs: Graphs) -> Runner {
    let cache = CacheOptions {
        max_sequences: sequences,
        max_tokens: 1024 * sequences,
        page_tokens: CacheOptions::PAGE_TOKENS,
        policy: ReplayPolicy::PromptTail,
        sampled_rows: NonZeroU32::MIN,
    };
    let options = RunnerOptions {
        graphs,
        trim_threshold: Some(33),
        max_captured_tokens: Some(256),
        ..RunnerOptions::default()
    };
    let mut runner = Runner::new(model.clone(), cache, &options).unwrap();
    runner.capture(|_, _| ()).unwrap();
    runner
}

fn demo(device: &Device) -> Arc<Model> {
    Arc::new(load_on(device, DType::F32, "v41-demo", false))
}

fn prompt(n: usize) -> Vec<u32> {
    (0..n).map(|t| 3 + (t * 37 % 1900) as u32).collect()
}

fn start(runner: &mut Runner, prompt: &[u32]) -> (SequenceId, u32) {
    drive::start(runner, prompt).0
}

/// 500 short requests one after the other: the same answer each time, and flat memory.
#[test]
fn serial_requests_answer_alike_and_leave_memory_flat() {
    let device = gpu();
    let mut runner = runner(&demo(&device), 1, Graphs::FullAndPiecewise);
    let requests = if small() { 3 } else { 500 };
    let (mut answers, mut free_after) = (Vec::new(), Vec::new());
    for request in 0..requests {
        let n = [20, 50, 120][request % 3];
        let mut batch = [start(&mut runner, &prompt(n))];
        let mut ids = vec![batch[0].1];
        for _ in 0..8 {
            decode(&mut runner, &mut batch);
            ids.push(batch[0].1);
        }
        runner.remove(batch[0].0).unwrap();
        if request < 3 {
            answers.push(ids);
        } else {
            assert_eq!(ids, answers[request % 3], "request {request}");
        }
        if request % 100 == 99 {
            free_after.push(free(&device));
        }
    }
    let same = free_after.windows(2).all(|pair| pair[0] == pair[1]);
    assert!(same, "{free_after:?}");
}

/// Eight identical requests at once give eight equal answers, the answer of one alone.
#[test]
fn concurrent_requests_answer_alike() {
    let model = demo(&gpu());
    let steps = if small() { 4 } else { 48 };
    for graphs in [Graphs::Off, Graphs::Piecewise, Graphs::FullAndPiecewise] {
        let mut runner = runner(&model, 8, graphs);
        let mut answers = vec![Vec::new(); 8];
        let start = |_| start(&mut runner, &prompt(90));
        let mut batch: Vec<_> = (0..8).map(start).collect();
        for _ in 0..steps {
            decode(&mut runner, &mut batch);
            for (answer, (_, id)) in answers.iter_mut().zip(&batch) {
                answer.push(*id);
            }
        }
        let mut alone = self::runner(&model, 1, graphs);
        let mut batch = [self::start(&mut alone, &prompt(90))];
        let step = |_| {
            decode(&mut alone, &mut batch);
            batch[0].1
        };
        let want: Vec<u32> = (0..steps).map(step).collect();
        assert!(answers.iter().all(|answer| *answer == want), "{graphs:?}");
    }
}

/// Six sequences over 200 decode steps, while another thread takes and returns memory: the ids are
/// those without graphs (BR-25).
#[test]
fn an_allocator_beside_it_changes_nothing() {
    let device = gpu();
    let model = demo(&device);
    let steps = if small() { 4 } else { 200 };
    let [want, got] = [Graphs::Off, Graphs::FullAndPiecewise].map(|graphs| {
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            // Its own stream: a capture of this one allows no allocation on it.
            scope.spawn(|| {
                let other = gpu();
                let mut kept = Vec::new();
                for n in (1..).take_while(|_| !done.load(Ordering::Relaxed)) {
                    let words = 1 + n * 7919 % (4 << 20);
                    kept.push(Tensor::full(f32::NAN, words, &other).unwrap());
                    if n % 5 == 0 {
                        kept.drain(..4);
                    }
                    std::thread::sleep(Duration::from_micros(200));
                }
            });
            let mut runner = runner(&model, 6, graphs);
            let start = |n| start(&mut runner, &prompt(n));
            let mut batch: Vec<_> = (30..130).step_by(17).map(start).collect();
            let mut ids = Vec::new();
            for _ in 0..steps {
                decode(&mut runner, &mut batch);
                ids.extend(batch.iter().map(|(_, id)| *id));
            }
            done.store(true, Ordering::Relaxed);
            ids
        })
    });
    assert!(got == want);
}

/// After 2,000 tokens a decode step takes no more than 5 % longer than after 100, at the same context:
/// the least of five medians of 60 steps from context 40 on, since the host has other things to do. It may
/// have for longer, so a later median does as well: what slows down with its tokens only gets slower.
#[test]
fn decode_does_not_slow_down() {
    if small() {
        return; // a sanitizer's own work is all there would be to measure
    }
    let mut runner = runner(&demo(&gpu()), 1, Graphs::FullAndPiecewise);
    let mut decoded = 0;
    let mut round = || {
        let mut batch = [start(&mut runner, &prompt(40))];
        let step = |_| {
            let begun = Instant::now();
            decode(&mut runner, &mut batch);
            begun.elapsed()
        };
        let mut times: Vec<Duration> = (0..60).map(step).collect();
        runner.remove(batch[0].0).unwrap();
        decoded += times.len();
        times.sort_unstable();
        (decoded, times[times.len() / 2])
    };
    while round().0 < 100 {}
    let early = (0..5).map(|_| round().1).min().expect("five rounds");
    while round().0 < 2000 {}
    let enough = early.mul_f64(1.05);
    let mut late = Duration::MAX;
    for n in 0..40 {
        if n >= 5 && late < enough {
            break;
        }
        late = late.min(round().1);
    }
    println!("decode step after 100 tokens {early:?}, after 2,000 {late:?}");
    assert!(late < enough, "{early:?} and then {late:?}");
}
