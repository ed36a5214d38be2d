//! Planning into reused buffers: 256 requests with 65,536 rows, for every policy.

use std::hint::black_box;
use std::num::NonZeroU32;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use replay_core::{
    LayerSchedule, Planner, PlannerConfig, ReplayLayers, ReplayPolicy, Request, StepPlan, Window,
};

const REQUESTS: u32 = 256;
const ROWS: u32 = 65_536;

/// The released geometry: 40 layers cut at 20, a window of 128.
fn planner(policy: ReplayPolicy) -> Planner {
    let layers = ReplayLayers::from_schedule(&LayerSchedule {
        num_layers: 40,
        kv_sources: &[2, 8, 14, 20],
        compress_ratios: &[],
        engram_layers: &[],
    });
    Planner::new(PlannerConfig {
        window: Window::new(128).expect("a window"),
        layers: layers.expect("a model that can replay"),
        policy,
        sampled_rows: NonZeroU32::MIN,
    })
}

/// Every request prefills the last chunk of its prompt.
fn last_chunks() -> Vec<Request> {
    let rows = ROWS / REQUESTS;
    vec![Request::prefill(4 * rows, 3 * rows..4 * rows); REQUESTS as usize]
}

/// One long chunk, and decode steps for the other requests.
fn one_long_chunk() -> Vec<Request> {
    let mut requests = vec![Request::decode(100, 200); REQUESTS as usize - 1];
    let rows = ROWS - (REQUESTS - 1);
    requests.push(Request::prefill(rows, 0..rows));
    requests
}

fn planning(c: &mut Criterion) {
    for (batch, requests) in [
        ("last-chunks", last_chunks()),
        ("one-long-chunk", one_long_chunk()),
    ] {
        let mut group = c.benchmark_group(format!("plan-256-requests-65536-rows/{batch}"));
        group.throughput(Throughput::Elements(u64::from(REQUESTS)));
        for policy in ReplayPolicy::ALL {
            let planner = planner(policy);
            let mut plan = StepPlan::new();
            group.bench_function(policy.name(), |b| {
                b.iter(|| planner.plan_into(black_box(&requests), black_box(&mut plan)));
            });
        }
        group.finish();
    }
}

criterion_group!(benches, planning);
criterion_main!(benches);
