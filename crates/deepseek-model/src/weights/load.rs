//! Loads the weights of the decoder.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    path::Path,
};

use candle_core::{DType, Device, Tensor};
use half::bf16;
use rayon::prelude::*;

use super::{
    checkpoint::{self, Checkpoint},
    error::WeightsError,
    formats::Element,
    manifest::{Manifest, Target},
    problem::{Problem, Problems},
    progress::{LoadProgress, Meter},
    resolve::{Resolved, resolve},
    size,
    stored::{self, Stored},
    table::EngramTable,
};

/// Values that one task dequantises: enough to outweigh handing it to a worker.
const TASK_VALUES: usize = 1 << 16;

/// Tensors that a configuration may ask for beyond [`SLACK_FACTOR`] times those that are there, to
/// have them listed one by one.
const SLACK: usize = 1 << 16;
const SLACK_FACTOR: usize = 4;

/// Where and how weights are held.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// The device that tensors are placed on.
    pub device: Device,
    /// Dtype of matrices: F32, or BF16 to halve the memory. See [`Weights`] for those that are F32
    /// always.
    pub dtype: DType,
}

/// The tensors of a checkpoint, by name, for the parts of the decoder to take.
///
/// Names are the checkpoint's, except for the experts', which are stacked and fused. With `E`
/// routed experts of width `m` and hidden size `h`, layer `I` has
///
/// | name | shape |
/// |---|---|
/// | `layers.I.ffn.experts.w13` | `[E, 2m, h]`, an expert's rows of `w1` (gate), then of `w3` (up) |
/// | `layers.I.ffn.experts.w2` | `[E, h, m]` |
/// | `layers.I.ffn.shared_experts.w13` | `[2m, h]`, rows of `w1`, then of `w3` |
/// | `layers.I.ffn.shared_experts.w2` | `[h, m]` |
///
/// All matrices are `[out, in]`. Matrices that multiply activations are of the dtype asked for, and
/// so is `embed.weight`. In F32 always, whatever is stored, because the decoder computes with them
/// in F32: every norm, `head.weight`, `hc_*`, `attn_sink`, `ffn.gate.weight` and `.bias`,
/// `attn.compressor.*`, `engram.q_weight` and `.k_weight`.
#[derive(Debug)]
pub struct Weights {
    pub(super) tensors: HashMap<String, Tensor>,
    pub(super) tables: HashMap<usize, EngramTable>,
}

impl Weights {
    /// Loads the checkpoint in `dir`: `model.safetensors`, or the shards that
    /// `model.safetensors.index.json` lists.
    ///
    /// A tensor may be stored plain (F32, BF16, F16), and a matrix of a linear layer also as
    /// `F8_E4M3` with a scale per 32 x 32 tile or per 32 columns of a row, or as packed E2M1 (I8, U8
    /// or F4) with a scale per 32 columns of a row. Scales are `F8_E8M0`, U8 (raw exponents) or
    /// plain. Vision tensors and draft layers are skipped.
    ///
    /// Dequantises on all threads of the rayon pool, one resulting tensor after the other, so that
    /// for a device other than the CPU the host holds one at a time. `progress` is called from the
    /// workers, never by two at once, with growing counts; it must not wait for the pool itself.
    ///
    /// # Errors
    ///
    /// The checkpoint cannot be read, or does not fit `config`: then all differences are listed, with
    /// all scales that are not finite. One of them is that no routed expert is stored as
    /// [`Config::expert_dtype`](crate::Config::expert_dtype) has it. If there are no differences, all tensors with scales or values
    /// that are not finite. Or a field of `config` was set to what no file may hold, the tensors do
    /// not fit the memory, or the device does not take one.
    pub fn load(
        dir: &Path,
        config: &crate::Config,
        options: &LoadOptions,
        progress: &(dyn Fn(LoadProgress) + Sync),
    ) -> Result<Self, WeightsError> {
        if !matches!(options.dtype, DType::F32 | DType::BF16) {
            return Err(WeightsError::HeldDtype(options.dtype));
        }
        config.check_bounds()?;
        let checkpoint = Checkpoint::open(dir)?;
        plausible(config, &checkpoint)?;
        let manifest = Manifest::new(config);
        let Resolved {
            sources,
            tables,
            bad_scales,
        } = resolve(&manifest, &checkpoint, config.expert_dtype)?;
        size::check(&manifest, options, dir)?;

        let all = || sources.iter().flatten();
        let total = LoadProgress {
            tensors_total: all().count(),
            bytes_total: all().map(Stored::bytes).sum(),
            ..LoadProgress::default()
        };
        let meter = Meter::new(total, progress);
        // In a matrix with a bad scale whole tiles are no numbers, whatever is stored: one problem.
        let scales = bad_scales.iter().filter_map(Problem::tensor);
        let scales: HashSet<String> = scales.map(str::to_owned).collect();
        let explained = |problem: &Problem| {
            let matrix = problem.tensor();
            matrix.is_some_and(|matrix| scales.contains(&stored::scale_name(matrix)))
        };
        let mut problems = bad_scales;
        let mut tensors = HashMap::with_capacity(manifest.targets.len());
        for (target, parts) in manifest.targets.into_iter().zip(&sources) {
            let dtype = if target.always_f32 {
                DType::F32
            } else {
                options.dtype
            };
            let tensor = match dtype {
                DType::BF16 => build::<bf16>(&target, parts, &options.device, &meter),
                _ => build::<f32>(&target, parts, &options.device, &meter),
            };
            match tensor {
                Ok(tensor) => drop(tensors.insert(target.name, tensor)),
                Err(Unbuilt::Values(mut found)) => {
                    found.retain(|problem| !explained(problem));
                    problems.append(&mut found);
                }
                Err(Unbuilt::Device(source)) => {
                    let tensor = target.name;
                    return Err(WeightsError::Device { tensor, source });
                }
            }
        }
        Problems::refuse(problems, dir)?;
        Ok(Self { tensors, tables })
    }

    /// Hands a tensor over.
    ///
    /// # Errors
    ///
    /// There is no tensor of that name, or it was taken before.
    pub fn take(&mut self, name: &str) -> Result<Tensor, WeightsError> {
        self.tensors
            .remove(name)
            .ok_or_else(|| WeightsError::NotHeld(name.into()))
    }

    /// Hands the n-gram table of a layer over.
    ///
    /// # Errors
    ///
    /// The layer owns no table, or it was taken before.
    pub fn take_table(&mut self, layer: usize) -> Result<EngramTable, WeightsError> {
        self.tables
            .remove(&layer)
            .ok_or(WeightsError::NoTable(layer))
    }

    /// Names of the tensors not taken yet, sorted.
    pub fn names(&self) -> Vec<&str> {
        let names: BTreeSet<&str> = self.tensors.keys().map(String::as_str).collect();
        names.into_iter().collect()
    }
}

/// Refuses a checkpoint with far too few tensors for its configuration, before each is named.
fn plausible(config: &crate::Config, checkpoint: &Checkpoint) -> Result<(), WeightsError> {
    let (layers, experts) = (config.layers.len(), config.num_experts);
    // Three matrices of every expert.
    let needed = layers.saturating_mul(experts).saturating_mul(3);
    let found = checkpoint.tensors.len();
    if needed <= found.saturating_mul(SLACK_FACTOR).saturating_add(SLACK) {
        return Ok(());
    }
    Err(WeightsError::TooFew {
        dir: checkpoint.dir.clone(),
        unread: checkpoint::has_unread_file(&checkpoint.dir),
        found,
        needed,
        layers,
        experts,
    })
}

/// Why a tensor is not there.
enum Unbuilt {
    /// Parts with values that are not finite.
    Values(Vec<Problem>),
    Device(candle_core::Error),
}

/// Dequantises the parts into one buffer and makes it a tensor.
fn build<T: Element>(
    target: &Target,
    parts: &[Stored],
    device: &Device,
    meter: &Meter<'_>,
) -> Result<Tensor, Unbuilt> {
    let values = target.shape.iter().product();
    let mut buffer = T::zeros(values);
    let problems: Vec<Problem> = buffer
        .par_chunks_exact_mut(values / parts.len())
        .zip(parts)
        .filter_map(|(out, part)| {
            let first = decode(part, out);
            meter.add_tensor(part.bytes());
            first.map(|first| part.not_finite(first))
        })
        .collect();
    if !problems.is_empty() {
        return Err(Unbuilt::Values(problems));
    }
    Tensor::from_vec(buffer, target.shape.as_slice(), device).map_err(Unbuilt::Device)
}

/// Dequantises a part. Returns row and column of the first value that is not finite; rows are
/// looked at while they are in the cache.
fn decode<T: Element>(part: &Stored, out: &mut [T]) -> Option<[usize; 2]> {
    let columns = part.columns;
    let rows_per_task = TASK_VALUES.div_ceil(columns);
    out.par_chunks_mut(rows_per_task * columns)
        .enumerate()
        .filter_map(|(task, out)| {
            let mut first = None;
            for (row, out) in out.chunks_exact_mut(columns).enumerate() {
                let row = task * rows_per_task + row;
                part.decode_row(row, out);
                if first.is_none() && !T::all_finite(out) {
                    let column = out.iter().position(|value| !value.finite());
                    first = column.map(|column| [row, column]);
                }
            }
            first
        })
        .min()
}
