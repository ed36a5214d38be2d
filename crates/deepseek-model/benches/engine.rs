//! Measures an engine with the demo checkpoint on a CPU: requests at once against one after the other, and
//! the first token of a request whose beginning is in the cache.
//!
//! Runs that are compared take turns in one engine. `cargo xtask bench engine` runs it.

use std::{
    num::{NonZeroU32, NonZeroUsize},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use deepseek_model::{
    CacheOptions, Model, ModelOptions, ReplayPolicy, RunnerOptions,
    engine::{EngineCore, EngineOptions, EngineRequest, Update},
};

const RUNS: usize = 5;
const REQUESTS: usize = 32;
const PROMPT: usize = 256;
const OUTPUT: usize = 64;
/// Rows of a step.
const STEP: NonZeroUsize = NonZeroUsize::new(512).unwrap();
/// Tokens that two prompts begin with, and that each goes on with.
const SHARED: usize = 1024;
const OWN: usize = 16;

fn main() -> Result<()> {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/v41-demo");
    let model = Arc::new(Model::load(&dir, ModelOptions::default(), &|_| {})?);
    println!(
        "threads {}, runs {RUNS}, steps of {STEP} rows, median (fastest .. slowest)",
        rayon::current_num_threads()
    );
    at_once(&model)?;
    for policy in [ReplayPolicy::PromptTail, ReplayPolicy::Exact] {
        shared(&model, policy)?;
    }
    Ok(())
}

fn at_once(model: &Arc<Model>) -> Result<()> {
    let mut engine = engine(model, ReplayPolicy::PromptTail, false)?;
    let requests: Vec<_> = (0..REQUESTS)
        .map(|seed| EngineRequest::greedy(tokens(model, seed, PROMPT), OUTPUT))
        .collect();
    let (mut together, mut alone) = (Vec::new(), Vec::new());
    for _ in 0..=RUNS {
        together.push(run(&mut engine, &requests)?);
        let mut time = Duration::ZERO;
        for request in &requests {
            time += run(&mut engine, std::slice::from_ref(request))?;
        }
        alone.push(time);
    }
    println!("{REQUESTS} requests of {PROMPT} + {OUTPUT} tokens, prompt-tail");
    let alone = report("one after the other", alone, None);
    report("at once", together, Some(alone));
    Ok(())
}

fn shared(model: &Arc<Model>, policy: ReplayPolicy) -> Result<()> {
    let mut engine = engine(model, policy, true)?;
    let (mut first, mut second) = (Vec::new(), Vec::new());
    for run in 0..=RUNS {
        for (own, times) in [(1, &mut first), (2, &mut second)] {
            let mut prompt = tokens(model, 0, SHARED);
            prompt.extend(tokens(model, own, OWN));
            let mut request = EngineRequest::greedy(prompt, 1);
            // Nothing of another run is found.
            request.salt = run as u64;
            times.push(self::run(&mut engine, &[request])?);
        }
    }
    println!("first token of {SHARED} + {OWN} tokens, {policy}");
    let first = report("nothing known", first, None);
    report("the beginning known", second, Some(first));
    Ok(())
}

fn engine(model: &Arc<Model>, policy: ReplayPolicy, prefix_cache: bool) -> Result<EngineCore> {
    let options = EngineOptions {
        cache: CacheOptions {
            max_sequences: REQUESTS,
            max_tokens: REQUESTS * (PROMPT + OUTPUT),
            page_tokens: CacheOptions::PAGE_TOKENS,
            policy,
            sampled_rows: NonZeroU32::MIN,
        },
        runner: RunnerOptions::default(),
        max_step_tokens: STEP,
        max_waiting: REQUESTS,
        prefix_cache,
        tokenizer: None,
    };
    Ok(EngineCore::new(model.clone(), options)?)
}

/// A fixed walk over the vocabulary for each seed: it costs what a text costs.
fn tokens(model: &Model, seed: usize, count: usize) -> Vec<u32> {
    let vocab = model.config().vocab_size as u64;
    let seed = seed as u64 * 7919;
    (seed..seed + count as u64)
        .map(|i| (2 + i.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (vocab - 2)) as u32)
        .collect()
}

/// The time until all are done.
fn run(engine: &mut EngineCore, requests: &[EngineRequest]) -> Result<Duration> {
    let start = Instant::now();
    for request in requests {
        engine.submit(request.clone())?;
    }
    while !engine.is_idle() {
        for (id, update) in engine.step() {
            if let Update::Failed(error) = update {
                return Err(anyhow::anyhow!(error)).with_context(|| id.to_string());
            }
        }
    }
    Ok(start.elapsed())
}

/// Prints the times of some runs, and gives their median.
fn report(what: &str, mut times: Vec<Duration>, of: Option<Duration>) -> Duration {
    times.remove(0); // the first run warms caches and allocators
    times.sort();
    let median = times[RUNS / 2];
    let share = of.map(|of| {
        let share = median.as_secs_f64() / of.as_secs_f64();
        format!("  {share:.3} of the former")
    });
    println!(
        "  {what:<20} {median:>9.1?}  ({:.1?} .. {:.1?}){}",
        times[0],
        times[RUNS - 1],
        share.unwrap_or_default()
    );
    median
}
