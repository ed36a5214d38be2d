//! What a run needs, part by part, and whether it fits.

use std::num::NonZeroU32;

use candle_core::DType;
use replay_core::{CaptureSizes, ReplayPolicy, Window};
use replay_graph::CaptureMode;

use super::{
    error::MemoryError,
    workspace::{LIBRARIES, StepSize, workspace_bytes},
};
use crate::{
    CacheError, CacheOptions, Config, Error, GenerateOptions, KvBudget, ModelOptions, Result,
    RunnerOptions, model::held_dtype, runner::Sizes, weights::held_bytes,
};

/// Memory of a device, part by part, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Of the weights; the n-gram tables stay in their files.
    pub weights: u64,
    /// Of the KV cache.
    pub kv: u64,
    /// Of captured graphs.
    pub graphs: u64,
    /// Of a step's tensors.
    pub workspace: u64,
}

impl MemoryUse {
    /// All parts together.
    pub fn total(&self) -> u64 {
        let parts = [self.weights, self.kv, self.graphs, self.workspace];
        parts.into_iter().fold(0, u64::saturating_add)
    }
}

/// Where a model is held, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Whether on a GPU.
    pub gpu: bool,
    /// Dtype of matrices and activations in its memory.
    pub dtype: DType,
}

impl From<&ModelOptions> for Place {
    fn from(options: &ModelOptions) -> Self {
        Self {
            gpu: options.device.is_cuda(),
            dtype: held_dtype(options),
        }
    }
}

/// What a run needs.
#[derive(Debug, Clone)]
pub struct Demand<'a> {
    /// Of the model.
    pub config: &'a Config,
    /// Where it is held, and how.
    pub place: Place,
    /// Of the cache.
    pub cache: CacheOptions,
    /// The largest step.
    pub step: StepSize,
    /// Which graphs are captured.
    pub runner: RunnerOptions,
}

impl<'a> Demand<'a> {
    /// What a [`Generator`](crate::Generator) needs for prompts of these lengths.
    pub fn of_generation(
        config: &'a Config,
        place: Place,
        generate: &GenerateOptions,
        prompts: &[usize],
    ) -> Self {
        let cache = generate.cache_options(config, prompts.iter().copied());
        let all = prompts
            .iter()
            .fold(0, |sum: usize, &len| sum.saturating_add(len));
        // Prefill rows of some prompts, and a decode row of each of the others.
        let rows = all.min(generate.chunk.get()).saturating_add(prompts.len());
        let longest = prompts.iter().copied().max().unwrap_or(0);
        Self {
            config,
            place,
            cache,
            step: StepSize {
                rows,
                logit_rows: if generate.logprobs {
                    rows
                } else {
                    prompts.len()
                },
                tokens: generate.reach(config, longest),
            },
            runner: generate.runner_options(prompts.iter().copied()),
        }
    }

    /// What each part takes.
    ///
    /// # Errors
    /// As [`CacheOptions::bytes`]; or the weights are more than can be addressed.
    pub fn estimate(&self) -> Result<MemoryUse> {
        let dtype = self.place.dtype;
        let kv = self.cache.bytes(self.config, dtype)?;
        let weights = held_bytes(self.config, dtype)?.ok_or(MemoryError::Unaddressable)?;
        if !self.place.gpu {
            return Ok(MemoryUse {
                weights,
                kv,
                ..MemoryUse::default()
            });
        }
        Ok(MemoryUse {
            weights,
            kv,
            graphs: self.graph_bytes(),
            workspace: workspace_bytes(self.config, dtype, self.step).saturating_add(LIBRARIES),
        })
    }

    /// Whether all of it fits into `limit` bytes. If so, what each part takes.
    ///
    /// # Errors
    /// [`MemoryError`], with what would fit; or as [`Self::estimate`].
    pub fn check(&self, limit: u64) -> Result<MemoryUse> {
        let need = self.estimate()?;
        if need.weights > limit {
            return Err(MemoryError::Weights {
                needed: need.weights,
                limit,
            }
            .into());
        }
        let others = MemoryUse { kv: 0, ..need }.total();
        let budget = KvBudget {
            bytes: limit.saturating_sub(others),
            max_sequences: self.cache.max_sequences,
            min_tokens: self.cache.max_tokens,
            policy: self.cache.policy,
            sampled_rows: self.cache.sampled_rows,
        };
        match CacheOptions::for_budget(self.config, self.place.dtype, budget) {
            Ok(_) => Ok(need),
            Err(Error::Cache(CacheError::NoMemory {
                max_sequences,
                max_tokens,
                fits,
                ..
            })) => Err(MemoryError::Cache {
                limit,
                need,
                sequences: max_sequences,
                tokens: max_tokens,
                fits,
            }
            .into()),
            Err(other) => Err(other),
        }
    }

    /// Memory of all graphs. They share the memory of what comes and goes in a launch, which is as much
    /// as the largest takes; what a graph keeps between launches is its own, in the pieces in which a
    /// driver gives it out.
    fn graph_bytes(&self) -> u64 {
        const PIECE: u64 = 32 << 20;
        /// What a driver keeps of a graph beside its memory: 2 MiB of one like these.
        const KEPT: u64 = 4 << 20;
        let mut all = Vec::new();
        for (mode, sizes) in self.captured() {
            let rows = sizes.as_slice().iter();
            all.extend(rows.map(|rows| (mode, *rows as usize)));
        }
        let Some(most) = all.iter().map(|(_, rows)| rows).max() else {
            return 0;
        };
        let mapped = |bytes: u64| bytes.checked_next_multiple_of(PIECE).unwrap_or(u64::MAX);
        let shared = workspace_bytes(
            self.config,
            self.place.dtype,
            StepSize {
                rows: *most,
                logit_rows: *most,
                // A graph is captured for the longest sequence that the cache can hold.
                tokens: self.cache.max_tokens.min(self.config.max_positions),
            },
        );
        let kept = |&(mode, rows)| mapped(self.kept_bytes(mode, rows)).saturating_add(KEPT);
        all.iter()
            .map(kept)
            .fold(mapped(shared), u64::saturating_add)
    }

    /// The sizes that graphs are captured for, of each kind; none if they are refused.
    fn captured(&self) -> Vec<(CaptureMode, CaptureSizes)> {
        let options = &self.runner;
        let (sequences, tokens) = (self.cache.max_sequences, self.cache.max_tokens);
        let window = Window::new(self.config.sliding_window as u32);
        let sizes = window
            .map_err(Error::from)
            .and_then(|window| Sizes::new(options, window, sequences, tokens));
        let Ok(sizes) = sizes else {
            return Vec::new();
        };
        let full = options.graphs.has(CaptureMode::Full).then_some(sizes.full);
        let piecewise = options.graphs.has(CaptureMode::Piecewise);
        let (piecewise, replay) = (piecewise.then_some(sizes.piecewise), sizes.replay);
        let replay =
            replay.filter(|_| piecewise.is_some() && self.cache.policy != ReplayPolicy::Off);
        let full = full.map(|sizes| (CaptureMode::Full, sizes));
        let others = piecewise.into_iter().chain(replay);
        let others = others.map(|sizes| (CaptureMode::Piecewise, sizes));
        full.into_iter().chain(others).collect()
    }

    /// What a graph of so many rows keeps: logits, or its result and what a break reads.
    fn kept_bytes(&self, mode: CaptureMode, rows: usize) -> u64 {
        let config = self.config;
        let row = match mode {
            CaptureMode::Full => config.vocab_size * size_of::<f32>(),
            CaptureMode::Piecewise => {
                let streams = (config.hc_mult + 2) * config.hidden_size;
                let blocks = config
                    .candidates
                    .map_or(0, |candidates| candidates.top_blocks);
                let lists = (config.index_topk + blocks) * size_of::<u32>();
                streams * self.place.dtype.size_in_bytes() + lists
            }
        };
        (rows as u64).saturating_mul(row as u64)
    }
}

impl GenerateOptions {
    /// The cache of a generation: room for each prompt and what may follow it.
    pub(crate) fn cache_options(
        &self,
        config: &Config,
        prompts: impl ExactSizeIterator<Item = usize>,
    ) -> CacheOptions {
        let max_sequences = prompts.len();
        let tokens = prompts.map(|len| self.reach(config, len));
        CacheOptions {
            max_sequences,
            max_tokens: tokens.fold(0, usize::saturating_add).max(1),
            policy: self.policy,
            sampled_rows: NonZeroU32::MIN,
        }
    }

    /// Tokens that a sequence with a prompt of this length has at its end, at most.
    fn reach(&self, config: &Config, prompt: usize) -> usize {
        let end = prompt.saturating_add(self.max_new_tokens);
        end.min(config.max_positions)
    }
}
