//! What a run needs, part by part, and whether it fits.

use std::num::NonZeroU32;

use candle_core::DType;

use super::{
    error::MemoryError,
    fits::largest_below,
    graphs::GraphBytes,
    workspace::{LIBRARIES, StepSize, workspace_bytes},
};
use crate::{
    CacheError, CacheOptions, Config, Error, GenerateOptions, KvBudget, ModelOptions, ReplaySizes,
    Result, RunnerOptions, model::held_dtype, replay::ReplayPlanner, runner::Sizes,
    weights::held_bytes,
};

/// Memory of a device, part by part, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Of the weights; the n-gram tables stay in their files.
    pub weights: u64,
    /// Of the KV cache.
    pub kv: u64,
    /// Of captured graphs, with the lists and buffers that they read.
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
        let others = prompts.len().saturating_sub(1);
        let rows = all.min(generate.chunk.get()).saturating_add(others);
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
            runner: generate.runner_options(config, prompts.iter().copied()),
        }
    }

    /// What each part takes.
    ///
    /// # Errors
    /// As [`CacheOptions::bytes`]; or the weights are more than can be addressed. What a
    /// [`Runner`](crate::Runner) would refuse is refused here too, before anything is loaded: a policy
    /// that the model cannot run, and, also on a CPU, sizes of graphs and a trim threshold that make no
    /// sense.
    pub fn estimate(&self) -> Result<MemoryUse> {
        let dtype = self.place.dtype;
        let kv = self.cache.bytes(self.config, dtype)?;
        let weights = held_bytes(self.config, dtype)?.ok_or(MemoryError::Unaddressable)?;
        ReplayPlanner::new(self.config, self.cache.policy, self.cache.sampled_rows)?;
        let sizes = Sizes::new(&self.runner, self.config, &self.cache)?;
        if !self.place.gpu {
            return Ok(MemoryUse {
                weights,
                kv,
                ..MemoryUse::default()
            });
        }
        let workspace = workspace_bytes(self.config, dtype, self.step).saturating_add(LIBRARIES);
        let graphs = GraphBytes::new(self.config, dtype, &sizes);
        // The run before a capture takes its tensors from where those of eager steps come and go.
        let warm_up = graphs.run.saturating_sub(workspace);
        let graphs = [graphs.run, graphs.kept, graphs.fixed, warm_up];
        Ok(MemoryUse {
            weights,
            kv,
            graphs: graphs.into_iter().fold(0, u64::saturating_add),
            workspace,
        })
    }

    /// Rows of the largest step of this kind whose tensors fit into so many bytes.
    fn rows_within(&self, bytes: u64) -> usize {
        let all_read = self.step.logit_rows == self.step.rows;
        let workspace = |rows| {
            let step = StepSize {
                rows,
                logit_rows: if all_read { rows } else { self.step.logit_rows },
                ..self.step
            };
            workspace_bytes(self.config, self.place.dtype, step).saturating_add(LIBRARIES)
        };
        largest_below(self.step.rows, |rows| workspace(rows) <= bytes)
    }

    /// Whether all of it fits into `limit` bytes. If so, what each part takes.
    ///
    /// # Errors
    /// [`MemoryError`], with the part that is to blame: the first that alone, or beside those that it
    /// cannot do without, is too large. Or as [`Self::estimate`].
    pub fn check(&self, limit: u64) -> Result<MemoryUse> {
        let need = self.estimate()?;
        let over = |parts: &[u64]| parts.iter().fold(0, |a: u64, b| a.saturating_add(*b)) > limit;
        if !over(&[need.total()]) {
            return Ok(need);
        }
        if over(&[need.weights]) {
            return Err(MemoryError::Weights {
                needed: need.weights,
                limit,
            }
            .into());
        }
        if over(&[need.weights, need.workspace]) {
            let (rows, fits) = (self.step.rows, self.rows_within(limit - need.weights));
            return Err(MemoryError::Workspace {
                limit,
                need,
                rows,
                fits,
            }
            .into());
        }
        if !over(&[need.weights, need.workspace, need.kv]) {
            return Err(MemoryError::Graphs { limit, need }.into());
        }
        // Graphs can be done without, so what would fit is said of a run that has none.
        let budget = KvBudget {
            bytes: limit - need.weights - need.workspace,
            max_sequences: self.cache.max_sequences,
            min_tokens: self.cache.max_tokens,
            page_tokens: CacheOptions::PAGE_TOKENS,
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
            page_tokens: CacheOptions::PAGE_TOKENS,
            policy: self.policy,
            sampled_rows: NonZeroU32::MIN,
        }
    }

    /// The options of the runner, with no larger graph than steps of prompts of these lengths need, and
    /// none for longer sequences.
    pub(crate) fn runner_options(
        &self,
        config: &Config,
        prompts: impl ExactSizeIterator<Item = usize> + Clone,
    ) -> RunnerOptions {
        let mut runner = self.runner.clone();
        let reach = prompts.clone().map(|len| self.reach(config, len)).max();
        runner.max_sequence_tokens = runner.max_sequence_tokens.or(reach);
        if runner.max_captured_tokens.is_none() && runner.capture_sizes.is_empty() {
            let most = self.chunk.get().saturating_add(prompts.len());
            let prefill = prompts.fold(0, usize::saturating_add);
            let most = u32::try_from(prefill.min(most)).unwrap_or(u32::MAX);
            let most = most.min(RunnerOptions::MAX_CAPTURED_TOKENS);
            // Sizes that were asked for have a graph to be launched in.
            let kept = match &runner.replay_sizes {
                ReplaySizes::Of(sizes) => sizes.iter().copied().max().unwrap_or(0),
                ReplaySizes::Ladder | ReplaySizes::Eager => 0,
            };
            runner.max_captured_tokens = Some(most.max(kept));
        }
        runner
    }

    /// Tokens that a sequence with a prompt of this length has at its end, at most.
    fn reach(&self, config: &Config, prompt: usize) -> usize {
        let end = prompt.saturating_add(self.max_new_tokens);
        end.min(config.max_positions)
    }
}
