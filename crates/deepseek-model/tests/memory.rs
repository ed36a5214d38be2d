//! Budgets: what a run takes, what fits, and what is said where it does not.

mod common;

use std::num::{NonZeroU32, NonZeroUsize};

use candle_core::DType;
use common::checkpoint;
use deepseek_model::{
    CacheError, CacheOptions, Config, Error, GenerateOptions, Graphs, KvBudget, ReplayPolicy,
    RunnerOptions,
    memory::{Demand, MemoryError, MemoryUse, Place},
    sampler::SamplingConfig,
};
use proptest::prelude::*;

fn demo() -> Config {
    Config::load(&checkpoint("v41-demo")).unwrap()
}

const GPU: Place = Place {
    gpu: true,
    dtype: DType::BF16,
};
const CPU: Place = Place {
    gpu: false,
    dtype: DType::F32,
};

fn generate(chunk: usize, max_new_tokens: usize) -> GenerateOptions {
    GenerateOptions {
        policy: ReplayPolicy::PromptTail,
        chunk: NonZeroUsize::new(chunk).unwrap(),
        max_new_tokens,
        stop_ids: Vec::new(),
        sampling: SamplingConfig::GREEDY,
        logprobs: false,
        runner: RunnerOptions::default(),
    }
}

fn budget(bytes: u64, max_sequences: usize, min_tokens: usize) -> KvBudget {
    KvBudget {
        bytes,
        max_sequences,
        min_tokens,
        page_tokens: CacheOptions::PAGE_TOKENS,
        policy: ReplayPolicy::Off,
        sampled_rows: NonZeroU32::MIN,
    }
}

fn bytes(config: &Config, options: CacheOptions) -> u64 {
    options.bytes(config, DType::BF16).unwrap()
}

proptest! {
    /// The cache of a budget keeps to it, and one with a page more does not; what a refusal says
    /// would fit does.
    #[test]
    fn a_budget_is_kept_and_used(limit in 0_u64..40 << 20, sequences in 1_usize..40, tokens in 1_usize..20_000) {
        let config = demo();
        match CacheOptions::for_budget(&config, DType::BF16, budget(limit, sequences, tokens)) {
            Ok(options) => {
                prop_assert!(options.max_tokens >= tokens);
                prop_assert!(bytes(&config, options) <= limit);
                let page = CacheOptions { max_tokens: options.max_tokens + 128, ..options };
                let most = sequences * config.max_positions;
                prop_assert!(bytes(&config, page) > limit || options.max_tokens >= most);
            }
            Err(Error::Cache(CacheError::NoMemory { needed, available, fits, .. })) => {
                prop_assert!(needed > limit && available == limit && fits < tokens);
                if fits > 0 {
                    let smaller = budget(limit, sequences, fits);
                    let options = CacheOptions::for_budget(&config, DType::BF16, smaller).unwrap();
                    prop_assert!(bytes(&config, options) <= limit);
                }
            }
            Err(other) => prop_assert!(false, "{other}"),
        }
    }
}

#[test]
fn a_budget_that_holds_nothing_says_so() {
    let config = demo();
    let refused = |budget| {
        let refused = CacheOptions::for_budget(&config, DType::BF16, budget);
        refused.unwrap_err().to_string()
    };
    insta::assert_snapshot!(refused(budget(1 << 20, 1, 4096)), @"cache: 4096 tokens in 1 sequence take 1.5 MiB, expected at most 1 MiB, which hold 2560 tokens (CacheOptions::max_tokens)");
    insta::assert_snapshot!(refused(budget(0, 2, 10)), @"cache: 10 tokens in 2 sequences take 196 KiB, expected at most 0 B, which hold none (CacheOptions::max_tokens)");
    insta::assert_snapshot!(refused(budget(1 << 20, 0, 10)), @"cache: max_sequences must be at least 1, got 0");
}

#[test]
fn sizes_beyond_any_memory_are_refused() {
    let config = demo();
    let refused = |sequences, tokens| {
        let budget = budget(u64::MAX, sequences, tokens);
        CacheOptions::for_budget(&config, DType::BF16, budget)
            .unwrap_err()
            .to_string()
    };
    insta::assert_snapshot!(refused(1, usize::MAX), @"cache: max_sequences 1 and max_tokens 18446744073709551615 need more rows or bytes than can be addressed; 4294967168 tokens could be");
    insta::assert_snapshot!(refused(usize::MAX, 1), @"cache: max_sequences 18446744073709551615 and max_tokens 1 need more rows or bytes than can be addressed; none could be");
}

#[test]
fn a_cpu_counts_weights_and_cache_only() {
    let config = demo();
    let on = |place| {
        Demand::of_generation(&config, place, &generate(512, 64), &[1000, 20])
            .estimate()
            .unwrap()
    };
    let (cpu, gpu) = (on(CPU), on(GPU));
    assert_eq!((cpu.graphs, cpu.workspace), (0, 0));
    assert!(gpu.graphs > 0 && gpu.workspace > 0);
    assert!(
        gpu.weights < cpu.weights && gpu.kv < cpu.kv,
        "bf16 takes less than f32"
    );
}

#[test]
fn graphs_count_where_some_are_captured() {
    let config = demo();
    let graphs = |options: &GenerateOptions| {
        let demand = Demand::of_generation(&config, GPU, options, &[100; 8]);
        demand.estimate().unwrap().graphs
    };
    assert!(graphs(&generate(512, 2)) > 0);
    let off = GenerateOptions {
        runner: RunnerOptions {
            graphs: Graphs::Off,
            ..RunnerOptions::default()
        },
        ..generate(512, 2)
    };
    assert_eq!(graphs(&off), 0);
}

/// A limit of exactly what is needed is enough, and a byte less is not, whatever is short: the first
/// part that is too large is to blame, and graphs where a run without them would fit.
#[test]
fn what_is_needed_is_enough_and_no_less() {
    let config = demo();
    for place in [CPU, GPU] {
        let demand = Demand::of_generation(&config, place, &generate(512, 64), &[1000, 20]);
        let need = demand.estimate().unwrap();
        assert_eq!(demand.check(need.total()).unwrap(), need);
        let blamed = |limit| {
            let refused = demand.check(limit).unwrap_err();
            let Error::Memory(error) = refused else {
                panic!("{refused}");
            };
            match error {
                MemoryError::Weights { .. } => "weights",
                MemoryError::Workspace { .. } => "workspace",
                MemoryError::Graphs { .. } => "graphs",
                MemoryError::Cache { .. } => "cache",
                other => panic!("{other}"),
            }
        };
        let without_graphs = need.total() - need.graphs;
        let last = if place.gpu { "graphs" } else { "cache" };
        assert_eq!(blamed(need.total() - 1), last);
        assert_eq!(blamed(without_graphs - 1), "cache");
        assert_eq!(blamed(need.weights + need.workspace), "cache");
        let beside_weights = if place.gpu { "workspace" } else { "cache" };
        assert_eq!(blamed(need.weights), beside_weights);
        assert_eq!(blamed(need.weights - 1), "weights");
        assert_eq!(blamed(0), "weights");
    }
}

/// Tokens that are said to fit do, without graphs.
#[test]
fn what_would_fit_fits() {
    let config = demo();
    let mut demand = Demand::of_generation(&config, GPU, &generate(512, 3000), &[1000, 20]);
    let need = demand.estimate().unwrap();
    let limit = need.weights + need.workspace + need.kv / 2;
    let refused = demand.check(limit).unwrap_err();
    let Error::Memory(MemoryError::Cache { tokens, fits, .. }) = refused else {
        panic!("{refused}");
    };
    assert!(0 < fits && fits < tokens);
    demand.cache.max_tokens = fits;
    demand.runner.graphs = Graphs::Off;
    assert!(demand.check(limit).unwrap().total() <= limit);
}

/// Rows that are said to fit do, and one more does not.
#[test]
fn rows_that_would_fit_fit() {
    let config = demo();
    for logprobs in [false, true] {
        let options = GenerateOptions {
            logprobs,
            ..generate(8192, 10)
        };
        let demand = Demand::of_generation(&config, GPU, &options, &[6000]);
        let need = demand.estimate().unwrap();
        let fits = |demand: &Demand<'_>, limit| match demand.check(limit) {
            Err(Error::Memory(MemoryError::Workspace { fits, .. })) => Some(fits),
            _ => None,
        };
        let limit = need.weights + need.workspace * 4 / 5;
        let rows = fits(&demand, limit).unwrap();
        assert!(0 < rows && rows < 6000, "{rows}");
        let of_rows = |rows| {
            let mut smaller = demand.clone();
            smaller.step.rows = rows;
            if logprobs {
                smaller.step.logit_rows = rows;
            }
            fits(&smaller, limit)
        };
        assert_eq!(of_rows(rows), None, "it is the cache's turn");
        assert_eq!(of_rows(rows + 1), Some(rows));
        assert_eq!(fits(&demand, need.weights), Some(0));
    }
}

/// Sizes and thresholds that a runner would refuse are refused before there is one.
#[test]
fn graphs_that_make_no_sense_are_refused_before_loading() {
    let config = demo();
    let refused = |runner: RunnerOptions| {
        let options = GenerateOptions {
            runner,
            ..generate(512, 2)
        };
        let texts = [CPU, GPU].map(|place| {
            let demand = Demand::of_generation(&config, place, &options, &[100; 8]);
            demand.check(u64::MAX).unwrap_err().to_string()
        });
        assert_eq!(texts[0], texts[1]);
        texts[0].clone()
    };
    let default = RunnerOptions::default;
    let texts = [
        refused(RunnerOptions {
            capture_sizes: vec![64],
            max_captured_tokens: Some(32),
            ..default()
        }),
        refused(RunnerOptions {
            capture_sizes: vec![64],
            replay_sizes: deepseek_model::ReplaySizes::Of(vec![65]),
            ..default()
        }),
        refused(RunnerOptions {
            trim_threshold: Some(32),
            ..default()
        }),
    ];
    insta::assert_snapshot!(texts.join("\n"), @r"
    graphs of steps: graph size 64 is above 32, the most rows that a graph may have
    graphs of the replay layers: graph size 65 is above 64, the most rows that a graph may have
    the trim threshold must exceed the sliding window of 32 rows, got 32
    ");
}

#[test]
fn what_does_not_fit_is_said_with_what_would() {
    let weights = MemoryError::Weights {
        needed: 5 << 30,
        limit: 4 << 30,
    };
    insta::assert_snapshot!(weights, @"the weights take 5 GiB, expected at most 4 GiB: 1 GiB are missing");
    let need = |graphs, workspace| MemoryUse {
        weights: 5 << 30,
        kv: 3 << 30,
        graphs,
        workspace,
    };
    let cache = |limit, graphs, workspace| MemoryError::Cache {
        limit,
        need: need(graphs, workspace),
        sequences: 2,
        tokens: 70_000,
        fits: 30_208,
    };
    insta::assert_snapshot!(cache((8 << 30) - 1, 0, 0), @"a KV cache of 70000 tokens in 2 sequences takes 3 GiB, expected at most the 3 GiB that weights (5 GiB) leave of 8 GiB: 1 B too much; 30208 tokens would fit");
    insta::assert_snapshot!(cache(7 << 30, 256 << 20, 768 << 20), @"a KV cache of 70000 tokens in 2 sequences takes 3 GiB, expected at most the 1.2 GiB that weights (5 GiB) and workspace (768 MiB) leave of 7 GiB: 1.8 GiB too much; 30208 tokens would fit, without graphs");
    let graphs = MemoryError::Graphs {
        limit: (9 << 30) - (128 << 20),
        need: need(256 << 20, 768 << 20),
    };
    insta::assert_snapshot!(graphs, @"CUDA graphs take 256 MiB, expected at most the 128 MiB that weights (5 GiB), KV cache (3 GiB) and workspace (768 MiB) leave of 8.9 GiB: 128 MiB too much");
    let workspace = MemoryError::Workspace {
        limit: (5 << 30) + (512 << 20),
        need: need(256 << 20, 768 << 20),
        rows: 8194,
        fits: 5000,
    };
    insta::assert_snapshot!(workspace, @"the tensors of a step of 8194 rows take 768 MiB, expected at most the 512 MiB that weights (5 GiB) leave of 5.5 GiB: 256 MiB too much; 5000 rows would fit");
}
