//! Measures the demo checkpoint on a CPU: load, prefill by policy, decode, peak memory.
//!
//! One table from one run, so that its rows compare. `cargo xtask bench cpu` runs it.

use std::{
    num::NonZeroU32,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use deepseek_model::{
    CacheOptions, KvCache, LogitRows, Model, ModelOptions, ReplayPolicy, SequenceOptions,
    StepRequest,
};

const RUNS: usize = 7;

fn main() -> Result<()> {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/v41-demo");
    let load = Instant::now();
    let model = Model::load(&dir, ModelOptions::default(), &|_| {})?;
    let load = load.elapsed();
    println!(
        "threads {}, runs {RUNS}, median (fastest .. slowest)",
        rayon::current_num_threads()
    );
    println!("load                      {load:>10.1?}");
    for tokens in [1024, 2048] {
        let prompt = prompt(&model, tokens);
        let mut off = Duration::ZERO;
        // Policies take turns, so that a slow moment of the machine does not fall on one alone.
        let policies = [
            ReplayPolicy::Off,
            ReplayPolicy::PromptTail,
            ReplayPolicy::Exact,
            ReplayPolicy::StepTail,
        ];
        let mut times = vec![Vec::new(); policies.len()];
        for _ in 0..=RUNS {
            for (policy, times) in policies.iter().zip(&mut times) {
                times.push(prefill(&model, *policy, &prompt)?.0);
            }
        }
        for (policy, times) in policies.iter().zip(&mut times) {
            times.remove(0); // the first run warms caches and allocators
            times.sort();
            let median = times[RUNS / 2];
            if *policy == ReplayPolicy::Off {
                off = median;
            }
            println!(
                "prefill {tokens} {:<12} {median:>10.1?}  ({:.1?} .. {:.1?})  {:.3} of off  {:.0} tokens/s",
                policy.to_string(),
                times[0],
                times[RUNS - 1],
                median.as_secs_f64() / off.as_secs_f64(),
                tokens as f64 / median.as_secs_f64(),
            );
        }
    }
    decode(&model)?;
    if let Some(peak) = peak_memory() {
        println!("peak memory               {:>8.1} MB", peak as f64 / 1e6);
    }
    Ok(())
}

/// Token ids of held-out text would need a tokenizer and a file; a fixed walk over the vocabulary
/// costs the same.
fn prompt(model: &Model, tokens: usize) -> Vec<u32> {
    let vocab = model.config().vocab_size as u64;
    (0..tokens as u64)
        .map(|i| (2 + i.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (vocab - 2)) as u32)
        .collect()
}

fn prefill(
    model: &Model,
    policy: ReplayPolicy,
    prompt: &[u32],
) -> Result<(Duration, KvCache, deepseek_model::SequenceId)> {
    let mut cache = model.new_cache(CacheOptions {
        max_sequences: 1,
        max_tokens: prompt.len() + 256,
        page_tokens: CacheOptions::PAGE_TOKENS,
        policy,
        sampled_rows: NonZeroU32::MIN,
    })?;
    let sequence = cache.add(SequenceOptions {
        prompt_len: prompt.len(),
        keeps_rows: false,
    })?;
    let start = Instant::now();
    model.forward(
        &[StepRequest {
            sequence,
            tokens: prompt,
            logits: LogitRows::Last,
        }],
        &mut cache,
    )?;
    Ok((start.elapsed(), cache, sequence))
}

fn decode(model: &Model) -> Result<()> {
    let prompt = prompt(model, 1024);
    let (_, mut cache, sequence) = prefill(model, ReplayPolicy::PromptTail, &prompt)?;
    let mut times = Vec::new();
    for &token in &prompt[..200] {
        let tokens = [token];
        let start = Instant::now();
        model.forward(
            &[StepRequest {
                sequence,
                tokens: &tokens,
                logits: LogitRows::Last,
            }],
            &mut cache,
        )?;
        times.push(start.elapsed());
    }
    times.sort();
    let median = times.get(100).context("no decode step ran")?;
    println!(
        "decode at 1024            {median:>10.1?}  {:.0} tokens/s",
        1.0 / median.as_secs_f64()
    );
    Ok(())
}

/// The process's largest resident size in bytes, where the system tells.
fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}
