//! Runs steps: in CUDA graphs where there is one, else eagerly.

mod decode;
mod lists;

use replay_graph::CaptureReport;

use crate::{
    CacheOptions, KvCache, Model, Result, SequenceId, SequenceOptions, StepOutput, StepRequest,
};
use decode::DecodeGraphs;

/// Which steps run in CUDA graphs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Graphs {
    /// None.
    Off,
    /// Steps in which every request decodes one token: one graph around the whole forward, padded to
    /// the next captured number of requests. All other steps run eagerly, and so does everything on
    /// a CPU.
    #[default]
    Full,
}

/// How a [`Runner`] runs steps.
#[derive(Debug, Clone, Default)]
pub struct RunnerOptions {
    /// Which steps run in CUDA graphs.
    pub graphs: Graphs,
    /// Numbers of requests that decode graphs are captured for; empty for the powers of two below
    /// the most sequences of the cache, and that number.
    pub capture_sizes: Vec<u32>,
}

/// How a step ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StepMode {
    /// Operation by operation.
    Eager,
    /// In one graph, padded to so many rows.
    Full {
        /// Rows of the graph.
        padded_rows: usize,
    },
}

/// A model with the cache of its sequences, and the graphs that read both.
///
/// The cache cannot be taken out: graphs know its tensors by address.
#[derive(Debug)]
pub struct Runner<'m> {
    // Dropped first: it reads what comes after it.
    decode: Option<DecodeGraphs>,
    cache: KvCache,
    model: &'m Model,
}

impl<'m> Runner<'m> {
    /// A runner with an empty cache. Captures nothing yet.
    ///
    /// # Errors
    /// As [`Model::new_cache`]; or a capture size is 0 or above the sequences of the cache.
    pub fn new(model: &'m Model, cache: CacheOptions, options: &RunnerOptions) -> Result<Self> {
        let max_sequences = cache.max_sequences;
        let cache = model.new_cache(cache)?;
        let decode = match options.graphs {
            Graphs::Full if model.device().is_cuda() => {
                let sizes = decode::sizes(&options.capture_sizes, max_sequences)?;
                Some(DecodeGraphs::new(model, &cache, sizes)?)
            }
            Graphs::Full | Graphs::Off => None,
        };
        Ok(Self {
            decode,
            cache,
            model,
        })
    }

    /// Captures all graphs, the largest first; `progress` is told how many are done, of how many.
    /// Until then steps run eagerly.
    ///
    /// # Errors
    /// If the device cannot capture, or its memory runs out; graphs captured before stay.
    pub fn capture(&mut self, progress: impl FnMut(usize, usize)) -> Result<CaptureReport> {
        match &mut self.decode {
            Some(decode) => decode.capture(self.model, &self.cache, progress),
            None => Ok(CaptureReport::default()),
        }
    }

    /// The cache, to look at.
    pub fn cache(&self) -> &KvCache {
        &self.cache
    }

    /// As [`KvCache::add`].
    ///
    /// # Errors
    /// As there.
    pub fn add(&mut self, options: SequenceOptions) -> Result<SequenceId> {
        self.cache.add(options)
    }

    /// As [`KvCache::remove`].
    ///
    /// # Errors
    /// As there.
    pub fn remove(&mut self, id: SequenceId) -> Result<()> {
        self.cache.remove(id)
    }

    /// As [`Model::forward`]; gives how the step ran beside what came of it.
    ///
    /// # Errors
    /// As there, and if a graph cannot be launched.
    pub fn forward(&mut self, requests: &[StepRequest<'_>]) -> Result<(StepOutput, StepMode)> {
        let cache = &mut self.cache;
        match &mut self.decode {
            Some(decode) if decode.takes(cache, requests) => {
                let model = self.model;
                model.step(requests, cache, |cache| decode.run(model, cache, requests))
            }
            _ => Ok((self.model.forward(requests, cache)?, StepMode::Eager)),
        }
    }
}
