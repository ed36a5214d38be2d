//! The model with random weights, and whether it can stand for a trained one.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use deepseek_model::{
    CacheOptions, Config, LogitRows, Model, ModelOptions, ReplayPolicy, SequenceOptions,
    StepRequest, device,
};
use serde::Serialize;

use super::{note, record::Record};

/// What building the model came to.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Built {
    /// Seconds to draw the weights.
    pub(crate) seconds: f64,
    /// Bytes of the device that it took.
    pub(crate) bytes: Option<u64>,
    /// Shares of the choices that the least and the most chosen expert of any layer got, times the
    /// number of experts: 1 is an even share.
    pub(crate) expert_shares: [f64; 2],
}

/// Draws the weights, and looks at how rows choose their experts.
pub(crate) fn build(
    config: Config,
    place: &Device,
    seed: u64,
    record: &mut Record,
) -> Result<Arc<Model>> {
    let options = ModelOptions {
        device: place.clone(),
        dtype: DType::BF16,
        round_cache: true,
    };
    let before = device::memory(place)?;
    let begun = Instant::now();
    let model = Model::random(config, options, seed)?;
    place.synchronize()?;
    let seconds = begun.elapsed().as_secs_f64();
    let after = device::memory(place)?;
    record.model = Built {
        seconds,
        bytes: before
            .zip(after)
            .map(|(b, a)| b.free.saturating_sub(a.free)),
        expert_shares: expert_shares(&model, seed)?,
    };
    note(format_args!("drew the weights in {seconds:.1} s"));
    Ok(Arc::new(model))
}

/// A prompt without a pattern.
pub(crate) fn prompt(vocab: usize, len: usize, seed: u64) -> Vec<u32> {
    let mut state = seed;
    let ids = (0..len).map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005);
        state = state.wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % vocab as u64) as u32
    });
    ids.collect()
}

fn expert_shares(model: &Model, seed: u64) -> Result<[f64; 2]> {
    let config = model.config();
    let len = 1024.min(config.max_positions);
    let mut cache = model.new_cache(CacheOptions {
        max_sequences: 1,
        max_tokens: len,
        page_tokens: CacheOptions::PAGE_TOKENS,
        policy: ReplayPolicy::Off,
        sampled_rows: NonZeroU32::MIN,
    })?;
    let sequence = cache.add(SequenceOptions {
        prompt_len: len,
        keeps_rows: false,
    })?;
    let shares = Mutex::new(Ok([f64::INFINITY, 0.0]));
    let observe = |name: &str, tensor: &Tensor| {
        if name.ends_with(".experts") {
            let mut shares = shares.lock().expect("no observer has panicked");
            if let Ok([least, most]) = &mut *shares {
                match shares_of(tensor, config.num_experts) {
                    Ok([low, high]) => (*least, *most) = (least.min(low), most.max(high)),
                    Err(error) => *shares = Err(error),
                }
            }
        }
    };
    let tokens = prompt(config.vocab_size, len, seed);
    let request = StepRequest {
        sequence,
        tokens: &tokens,
        logits: LogitRows::None,
    };
    model.forward_observed(&[request], &mut cache, Some(&observe))?;
    shares.into_inner().expect("no observer has panicked")
}

fn shares_of(chosen: &Tensor, experts: usize) -> Result<[f64; 2]> {
    let chosen: Vec<u32> = chosen.flatten_all()?.to_vec1()?;
    let mut counts = vec![0usize; experts];
    for expert in &chosen {
        counts[*expert as usize] += 1;
    }
    let even = chosen.len() as f64 / experts as f64;
    let shares = counts.iter().map(|&count| count as f64 / even);
    Ok(shares.fold([f64::INFINITY, 0.0], |[a, b], s| [a.min(s), b.max(s)]))
}
