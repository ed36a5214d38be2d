//! Runs steps: in CUDA graphs where there is one, else eagerly.

mod graphs;
mod layout;
mod lists;
mod options;
mod program;
mod replay;
mod sizes;

use std::{rc::Rc, sync::Arc};

use replay_graph::{CaptureMode, CaptureReport};

pub use options::{Graphs, ReplaySizes, RunnerOptions, StepMode};

use crate::{
    CacheOptions, CachedPrefix, Error, KvCache, Model, PhaseTimes, PrefixOptions, Result,
    SequenceId, SequenceOptions, StepOutput, StepRequest, profile::Profile,
};
use graphs::StepGraphs;
pub(crate) use layout::Layout;
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
    /// Whether the marks are those of a step that ended well, and nothing has run since.
    timed: bool,
}

impl Runner {
    /// A runner with an empty cache. Captures nothing yet.
    ///
    /// # Errors
    /// As [`Model::new_cache`]; if a size is 0 or above the largest graph, or the trim threshold is
    /// not above the window; [`Error::GraphLists`] and [`Error::Capture`] if the host or the device has
    /// no memory for what graphs are launched with. On a CPU, which has no graphs, the options are
    /// checked all the same.
    pub fn new(
        model: impl Into<Arc<Model>>,
        cache: CacheOptions,
        options: &RunnerOptions,
    ) -> Result<Self> {
        let model = model.into();
        let asked = cache;
        let cache = model.new_cache(asked)?;
        let sizes = Sizes::new(options, model.config(), &asked)?;
        let planner = cache
            .planner
            .for_graphs(sizes.replay.clone(), options.trim_threshold)?;
        let profile = options.profile.then(|| Profile::new(model.device()));
        let profile = profile.transpose()?.map(Rc::new);
        let mut graphs = Vec::new();
        if model.device().is_cuda() {
            for mode in [CaptureMode::Full, CaptureMode::Piecewise] {
                if let Some((sizes, limits)) = sizes.of_mode(mode) {
                    let sizes = (mode, sizes.clone(), limits);
                    let (planner, profile) = (planner.clone(), profile.clone());
                    let of_mode = StepGraphs::new(&model, &cache, sizes, planner, profile);
                    graphs.push(of_mode.map_err(|error| match error {
                        Error::GraphLists { .. } => error, // of the host, and says all
                        of_device => not_captured(mode, of_device),
                    })?);
                }
            }
        }
        Ok(Self {
            graphs,
            cache,
            model,
            profile,
            timed: false,
        })
    }

    /// Captures all graphs, the largest of each mode first; `progress` is told how many are done, of
    /// how many. Until then steps run eagerly. There may be sequences already: captures leave them
    /// alone.
    ///
    /// # Errors
    /// [`Error::Capture`] if the device cannot capture, or its memory runs out. The graphs of that mode
    /// are then given up, and its steps run eagerly; the other mode has its graphs all the same. The
    /// runner serves on, and captures can be tried again.
    pub fn capture(&mut self, mut progress: impl FnMut(usize, usize)) -> Result<CaptureReport> {
        // Captures pass the marks of steps.
        self.timed = false;
        let total = self.graphs.iter().map(StepGraphs::count).sum();
        let (mut report, mut done, mut failed) = (CaptureReport::default(), 0, None::<Error>);
        for graphs in &mut self.graphs {
            let of_mode = graphs.capture(|| {
                done += 1;
                progress(done, total);
            });
            match of_mode {
                Ok(of_mode) => report = report.plus(of_mode),
                Err(source) => {
                    let source = not_captured(graphs.mode(), source);
                    match &mut failed {
                        Some(Error::Capture { other, .. }) => *other = Some(Box::new(source)),
                        _ => failed = Some(source),
                    }
                }
            }
        }
        match failed {
            None => Ok(report),
            Some(failed) => Err(failed),
        }
    }

    /// The graphs that there are, counted as [`CaptureReport::already`] there, and the memory that they
    /// took.
    pub fn captured(&self) -> CaptureReport {
        let all = self.graphs.iter().map(StepGraphs::captured);
        all.fold(CaptureReport::default(), CaptureReport::plus)
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

    /// As [`KvCache::add_prompt`].
    ///
    /// # Errors
    /// As there.
    pub fn add_prompt(
        &mut self,
        prompt: &[u32],
        keeps_rows: bool,
        prefix: PrefixOptions,
    ) -> Result<(SequenceId, CachedPrefix)> {
        self.cache.add_prompt(prompt, keeps_rows, prefix)
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
        self.timed = false;
        let output = self.run(requests)?;
        self.timed = true;
        Ok(output)
    }

    fn run(&mut self, requests: &[StepRequest<'_>]) -> Result<(StepOutput, StepMode)> {
        let (model, cache) = (&self.model, &mut self.cache);
        let mut graphs = self.graphs.iter_mut();
        if let Some(graphs) = graphs.find(|graphs| graphs.takes(cache, requests)) {
            return model.step(requests, cache, |cache| graphs.run(model, cache, requests));
        }
        let watch = (None, self.profile.as_deref());
        let output = model.forward_watched(requests, cache, watch)?;
        Ok((output, StepMode::Eager))
    }

    /// Where the time of the last step went; `None` unless the options ask for a profile, and where a
    /// step failed, a capture ran or nothing at all since. Waits for the device.
    ///
    /// # Errors
    /// If the device fails.
    pub fn profile(&self) -> Result<Option<PhaseTimes>> {
        let marks = self.profile.as_ref().filter(|_| self.timed);
        marks.map(|marks| marks.times()).transpose()
    }
}

fn not_captured(mode: CaptureMode, source: Error) -> Error {
    Error::Capture {
        mode,
        source: Box::new(source),
        other: None,
    }
}
