//! Runs steps: in CUDA graphs where there is one, else eagerly.

mod graphs;
mod lists;
mod options;
mod program;
mod replay;
mod sizes;

use std::{rc::Rc, sync::Arc};

use replay_graph::{CaptureMode, CaptureReport};

pub use options::{Graphs, ReplaySizes, RunnerOptions, StepMode};

use crate::{
    CacheOptions, KvCache, Model, PhaseTimes, Result, SequenceId, SequenceOptions, StepOutput,
    StepRequest, profile::Profile,
};
use graphs::StepGraphs;
pub(crate) use sizes::Sizes;

/// A model with the cache of its sequences, and the graphs that read both.
///
/// The cache cannot be taken out: graphs know its tensors by address.
#[derive(Debug)]
pub struct Runner {
    // Dropped first: they read what comes after them. In the order in which they are asked.
    graphs: Vec<StepGraphs>,
    cache: KvCache,
    model: Arc<Model>,
    profile: Option<Rc<Profile>>,
}

impl Runner {
    /// A runner with an empty cache. Captures nothing yet.
    ///
    /// # Errors
    /// As [`Model::new_cache`]; if a size is 0 or above the largest graph, or the trim threshold is
    /// not above the window; or memory runs out. On a CPU, which has no graphs, the options are
    /// checked all the same.
    pub fn new(
        model: impl Into<Arc<Model>>,
        cache: CacheOptions,
        options: &RunnerOptions,
    ) -> Result<Self> {
        let model = model.into();
        let (max_sequences, max_tokens) = (cache.max_sequences, cache.max_tokens);
        let cache = model.new_cache(cache)?;
        let sizes = Sizes::new(options, model.window, max_sequences, max_tokens)?;
        let planner = cache
            .planner
            .for_graphs(sizes.replay, options.trim_threshold)?;
        let profile = options.profile.then(|| Profile::new(model.device()));
        let profile = profile.transpose()?.map(Rc::new);
        let mut graphs = Vec::new();
        if model.device().is_cuda() {
            let modes = [
                (CaptureMode::Full, sizes.full),
                (CaptureMode::Piecewise, sizes.piecewise),
            ];
            for (mode, sizes) in modes {
                if options.graphs.has(mode) {
                    let (planner, profile) = (planner.clone(), profile.clone());
                    let of_mode = StepGraphs::new(&model, &cache, mode, sizes, planner, profile)?;
                    graphs.push(of_mode);
                }
            }
        }
        Ok(Self {
            graphs,
            cache,
            model,
            profile,
        })
    }

    /// Captures all graphs, the largest of each mode first; `progress` is told how many are done, of
    /// how many. Until then steps run eagerly.
    ///
    /// # Errors
    /// If the device cannot capture, or its memory runs out. Graphs of that mode are then given up,
    /// and its steps run eagerly.
    pub fn capture(&mut self, mut progress: impl FnMut(usize, usize)) -> Result<CaptureReport> {
        let total = self.graphs.iter().map(StepGraphs::count).sum();
        let (mut report, mut done) = (CaptureReport::default(), 0);
        for graphs in &mut self.graphs {
            let of_mode = graphs.capture(|| {
                done += 1;
                progress(done, total);
            })?;
            report = report.plus(of_mode);
        }
        Ok(report)
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
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

    /// As [`KvCache::fill`].
    ///
    /// # Errors
    /// As there.
    pub fn fill(&mut self, value: f32) -> Result<()> {
        self.cache.fill(value)
    }

    /// As [`KvCache::fill_random`].
    ///
    /// # Errors
    /// As there.
    pub fn fill_random(&mut self, seed: u64) -> Result<()> {
        self.cache.fill_random(seed)
    }

    /// As [`KvCache::assume`].
    ///
    /// # Errors
    /// As there.
    pub fn assume(&mut self, id: SequenceId, len: usize) -> Result<()> {
        self.cache.assume(id, len)
    }

    /// As [`Model::forward`]; gives how the step ran beside what came of it.
    ///
    /// # Errors
    /// As there, and if a graph cannot be launched.
    pub fn forward(&mut self, requests: &[StepRequest<'_>]) -> Result<(StepOutput, StepMode)> {
        let (model, cache) = (&self.model, &mut self.cache);
        let mut graphs = self.graphs.iter_mut();
        if let Some(graphs) = graphs.find(|graphs| graphs.takes(cache, requests)) {
            return model.step(requests, cache, |cache| graphs.run(model, cache, requests));
        }
        let watch = (None, self.profile.as_deref());
        let output = model.forward_watched(requests, cache, watch)?;
        Ok((output, StepMode::Eager))
    }

    /// Where the time of the last step went; `None` unless the options ask for a profile. Waits for
    /// the device.
    ///
    /// # Errors
    /// If no step has run, or the last one failed.
    pub fn profile(&self) -> Result<Option<PhaseTimes>> {
        self.profile.as_ref().map(|marks| marks.times()).transpose()
    }
}
