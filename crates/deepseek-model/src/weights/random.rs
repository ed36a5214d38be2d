//! Random weights, for benchmarks.

use std::{collections::HashMap, path::Path};

use candle_core::DType;

use super::{
    LoadOptions, Weights, WeightsError,
    manifest::{Manifest, Target},
    size,
};
use crate::{Config, draw::Draw};

impl Weights {
    /// Random weights of a configuration, each tensor drawn on its device and held as
    /// [`Self::load`] would hold it. Values of every activation stay of the order of 1, and rows choose
    /// their experts evenly; nothing else can be said of what such a model computes.
    ///
    /// # Errors
    ///
    /// The configuration has n-gram tables, which nobody draws; or as [`Self::load`], but for what a
    /// checkpoint can have wrong.
    pub fn random(config: &Config, options: &LoadOptions, seed: u64) -> Result<Self, WeightsError> {
        if !matches!(options.dtype, DType::F32 | DType::BF16) {
            return Err(WeightsError::HeldDtype(options.dtype));
        }
        config.check_bounds()?;
        let manifest = Manifest::new(config);
        if let Some(table) = manifest.tables.first() {
            return Err(WeightsError::RandomTable { layer: table.layer });
        }
        size::check(&manifest, options, Path::new("a random model"))?;
        let failed = |tensor: &str, source| WeightsError::Device {
            tensor: tensor.to_owned(),
            source,
        };
        let mut draw = Draw::new(&options.device, seed).map_err(|e| failed("the first", e))?;
        let mut tensors = HashMap::with_capacity(manifest.targets.len());
        for target in manifest.targets {
            let dtype = if target.always_f32 {
                DType::F32
            } else {
                options.dtype
            };
            let (shape, device) = (&target.shape, &options.device);
            let tensor = draw.tensor(shape, dtype, device, moments(&target));
            let tensor = tensor.map_err(|source| failed(&target.name, source))?;
            tensors.insert(target.name, tensor);
        }
        Ok(Self {
            tensors,
            tables: HashMap::new(),
        })
    }
}

/// Mean and standard deviation of a tensor's values.
fn moments(target: &Target) -> (f64, f64) {
    let (name, shape) = (&target.name, &target.shape);
    let ends = |end: &str| name.ends_with(end);
    match shape.len() {
        // A sum of as many products of values of the order of 1 is of the order of 1 again.
        2.. if !ends("embed.weight") => (0.0, 1.0 / (shape[shape.len() - 1] as f64).sqrt()),
        2.. => (0.0, 1.0),
        // How much the streams differ in how they are mixed.
        _ if ends("_scale") => (0.5, 0.0),
        // Small beside the differences of scores, or some experts would be everybody's choice.
        _ if ends("gate.bias") => (0.0, 0.01),
        _ if ends("attn_sink") || ends("_base") => (0.0, 0.5),
        // Norms.
        _ => (1.0, 0.0),
    }
}
