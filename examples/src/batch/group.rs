//! Requests of one policy, which share an engine, and what that takes.

use std::num::NonZeroUsize;
use std::sync::Arc;

use anyhow::anyhow;
use deepseek_model::engine::EngineOptions;
use deepseek_model::memory::{Demand, Place, largest_below};
use deepseek_model::sampler::SamplingConfig;
use deepseek_model::tokenizer::Tokenizer;
use deepseek_model::weights::held_bytes;
use deepseek_model::{
    CacheError, CacheOptions, Error, GenerateOptions, ModelOptions, ReplayPolicy, RunnerOptions,
};

use super::request::Request;
use crate::generate::GenerateArgs;
use crate::memory::Remedies;
use crate::model::{Checkpoint, blame};

/// What would help against a lack of memory.
const REMEDIES: Remedies = Remedies {
    cache: "lower --max-running or max_new_tokens",
    no_cache: "raise the limit, or lower --max-running",
    step: "lower --chunk or --max-running",
};

/// Requests that run at once, unless `--max-running` says so.
const RUNNING: NonZeroUsize = NonZeroUsize::new(32).unwrap();

/// Requests of one policy. A cache has one for its life, so groups run one after the other.
pub(super) struct Group {
    policy: ReplayPolicy,
    /// Of the batch, in order; never empty.
    pub(super) indices: Vec<usize>,
}

/// What an engine of a group is made with.
pub(super) struct Plan {
    cache: CacheOptions,
    /// Requests that run at once at most, fewer than are asked for, whose cache the memory of the host would
    /// hold; 0 if none, or of a GPU.
    pub(super) fewer: usize,
    runner: RunnerOptions,
    max_step_tokens: NonZeroUsize,
}

impl Group {
    /// The groups of what is not `done`, in the order in which their policies come first.
    pub(super) fn all(requests: &[Request], done: impl Fn(usize) -> bool) -> Vec<Self> {
        let mut groups: Vec<Self> = Vec::new();
        for (index, request) in requests
            .iter()
            .enumerate()
            .filter(|(index, _)| !done(*index))
        {
            let policy = request.policy;
            match groups.iter_mut().find(|group| group.policy == policy) {
                Some(group) => group.indices.push(index),
                None => groups.push(Self {
                    policy,
                    indices: vec![index],
                }),
            }
        }
        groups
    }

    /// The largest cache that the group needs: as many requests as run at once, the longest there are.
    ///
    /// # Errors
    /// It does not fit the memory, or the model cannot run it; names the flag.
    pub(super) fn plan(
        &self,
        args: &GenerateArgs,
        requests: &[Request],
        checkpoint: &Checkpoint,
        held: &ModelOptions,
    ) -> anyhow::Result<Plan> {
        let positions = checkpoint.config.max_positions;
        let of_group = || self.indices.iter().map(|&index| &requests[index].engine);
        let reach = |prompt: usize, new: usize| prompt.saturating_add(new).min(positions);
        let mut reaches: Vec<usize> = of_group()
            .map(|request| reach(request.prompt.len(), request.max_new_tokens))
            .collect();
        reaches.sort_unstable_by(|a, b| b.cmp(a));
        reaches.truncate(self.running(args));
        let logprobs = of_group().any(|request| request.logprobs.is_some());
        let options = GenerateOptions {
            policy: self.policy,
            chunk: args.step_rows(logprobs),
            // It is in the lengths.
            max_new_tokens: 0,
            stop_ids: Vec::new(),
            sampling: SamplingConfig::GREEDY,
            logprobs,
            runner: args.graphs.options(false),
        };
        let (config, place) = (&checkpoint.config, Place::from(held));
        let demand = |reaches| Demand::of_generation(config, place, &options, reaches);
        let weights = held_bytes(config, place.dtype).ok().flatten();
        let fewer = largest_below(reaches.len(), |running| {
            let cache = demand(&reaches[..running]).cache;
            !place.gpu && cache.fits_host(config, place.dtype, weights.unwrap_or(u64::MAX))
        });
        let demand = demand(&reaches);
        let fits = demand.estimate().map(|_| ());
        fits.map_err(|error| self.blame(args, error, fewer))?;
        args.memory
            .open(&args.model, &held.device, &demand, &REMEDIES)?;
        Ok(Plan {
            cache: demand.cache,
            runner: demand.runner,
            max_step_tokens: options.chunk,
            fewer,
        })
    }

    /// Requests that run at once.
    fn running(&self, args: &GenerateArgs) -> usize {
        let most = args.batch.max_running.unwrap_or(RUNNING);
        most.get().min(self.indices.len())
    }

    /// Names what a failure to set up is due to, and how many requests at once would do, if any.
    pub(super) fn blame(&self, args: &GenerateArgs, error: Error, fewer: usize) -> anyhow::Error {
        if let Some(flag) = args.graphs.to_blame(&error) {
            return anyhow::Error::from(error).context(flag);
        }
        let policy = format!("policy {} (off runs every model)", self.policy);
        let size = format!("--max-running {}", self.running(args));
        let too_large = matches!(error, Error::Cache(CacheError::TooLarge { .. }));
        let error = blame(error, &policy, &size);
        if too_large && fewer > 0 {
            return anyhow!("{error:#} (lower --max-running to {fewer})");
        }
        error
    }
}

impl Plan {
    pub(super) fn options(self, tokenizer: Arc<Tokenizer>, prefix_cache: bool) -> EngineOptions {
        EngineOptions {
            // The server hands in as many as may run, and waits until some do.
            max_waiting: self.cache.max_sequences,
            cache: self.cache,
            runner: self.runner,
            max_step_tokens: self.max_step_tokens,
            prefix_cache,
            tokenizer: Some(tokenizer),
        }
    }
}
