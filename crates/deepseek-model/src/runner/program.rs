//! The forward of a step whose numbers are on the device, at fixed addresses.

use std::{cell::RefCell, rc::Rc, sync::Arc};

use candle_core::Tensor;
use replay_core::{Planner, RowCount};
use replay_graph::{
    BufferSpec, CacheConfig, CaptureMode, CaptureReport, FixedBuffers, ReplayBreak, Scope,
};

use super::{
    layout::{Layout, Limits},
    lists::StepLists,
    replay::{BreakStep, DecoderReplayLayers},
};
use crate::{
    KvCache, Model, Result,
    cache::{CacheStorage, PageLists},
    layers::StepContext,
    model::held_dtype,
    ops::KvStart,
    profile::{Mark, Profile},
};

/// What is captured, with all that it reads.
pub(super) struct Program {
    model: Arc<Model>,
    storage: CacheStorage,
    profile: Option<Rc<Profile>>,
    pub(super) lists: Rc<RefCell<StepLists>>,
    /// Looked-up values of each engram table, `[rows, columns · head_dim]`.
    engram: Vec<Tensor>,
    /// The layers that a break runs on the rows that are kept; without it all layers run on the
    /// whole batch.
    replay: Option<Replay>,
}

struct Replay {
    at_cut: ReplayBreak,
    layers: Rc<RefCell<DecoderReplayLayers>>,
    first: usize,
    sizes: usize,
}

impl Program {
    /// Takes memory for the lists and buffers.
    pub(super) fn new(
        model: &Arc<Model>,
        cache: &KvCache,
        limits: Limits,
        planner: Option<&Planner>,
        (config, profile): (CacheConfig, Option<Rc<Profile>>),
    ) -> Result<Self> {
        let replay_layers = planner.map_or(0, |planner| planner.config().layers.count());
        let layout = Layout::of_steps(model.config(), limits, replay_layers as usize);
        let lists = StepLists::new(layout, model.device())?;
        let lists = Rc::new(RefCell::new(lists));
        let replay = planner
            .map(|planner| {
                let profile = profile.clone();
                Replay::new(model, cache, limits, &lists, planner, (config, profile))
            })
            .transpose()?;
        Ok(Self {
            model: model.clone(),
            storage: cache.storage.clone(),
            profile,
            lists,
            engram: model.engram_buffers(limits.rows)?,
            replay,
        })
    }

    pub(super) fn model(&self) -> &Model {
        &self.model
    }

    /// How many sizes the replay layers are captured for.
    pub(super) fn replay_sizes(&self) -> usize {
        self.replay.as_ref().map_or(0, |replay| replay.sizes)
    }

    pub(super) fn capture_replay(&self, mut done: impl FnMut()) -> Result<CaptureReport> {
        let Some(replay) = &self.replay else {
            return Ok(CaptureReport::default());
        };
        // A capture is a run, and there may be sequences already: its rows write to no slot.
        replay.layers.borrow_mut().kept.clear()?;
        Ok(replay.at_cut.capture_graphs(&replay.layers, |_| done())?)
    }

    /// Uploads what the break of the step's launch reads, if it has one, and lets the step carry it.
    pub(super) fn upload_ahead(&self, step: &mut BreakStep) -> Result<()> {
        if let Some(replay) = &self.replay {
            step.ahead = replay.at_cut.upload_ahead(&replay.layers, step)?;
        }
        Ok(())
    }

    /// Drops the graphs of the replay layers.
    pub(super) fn clear_replay(&self) -> Result<()> {
        let replay = self.replay.as_ref();
        Ok(replay.map_or(Ok(()), |replay| replay.at_cut.clear_graphs())?)
    }

    /// The graphs of the replay layers that there are, and the memory that they took.
    pub(super) fn captured_replay(&self) -> CaptureReport {
        let replay = self.replay.as_ref();
        replay.map_or_else(CaptureReport::default, |replay| replay.at_cut.captured())
    }

    /// Writes the values of each engram table, of all rows of a step.
    pub(super) fn write_engram(&self, values: &[Tensor]) -> Result<()> {
        for (fixed, values) in self.engram.iter().zip(values) {
            fixed.slice_set(values, 0, 0)?;
        }
        Ok(())
    }

    /// Runs `padded_rows` rows: the logits `[rows, V]` of all of them in a graph of decode steps, what
    /// the logits are made of, `[rows, h]`, in any other, where few rows are read.
    pub(super) fn run(
        &self,
        scope: &mut Scope<'_, BreakStep>,
        padded_rows: RowCount,
    ) -> Result<Tensor> {
        let (n, model) = (padded_rows.as_usize(), &self.model);
        let first = self.replay.as_ref().map_or(model.layers.len(), |r| r.first);
        let (rows, state) = {
            let lists = self.lists.borrow();
            let requests = lists.most_requests().min(n);
            let rows = Rc::new(lists.rows(n, requests)?);
            let engram = self.engram.iter().map(|values| values.narrow(0, 0, n));
            let engram = engram.collect::<candle_core::Result<_>>()?;
            let ctx = self.context(lists.pages(requests)?, engram);
            let kv_start = lists.kv_start(0, requests)?;
            ctx.mark(Mark::Start)?;
            let mut state = model.embed(&lists.tokens(n)?)?;
            for index in 0..first {
                state = model.pass(&ctx, index, state, &rows, KvStart::Device(&kv_start))?;
            }
            (rows, state)
        };
        let ctx = self.context(self.lists.borrow().pages(1)?, Vec::new());
        let hidden = match &self.replay {
            None => {
                let hidden = model.finish(&ctx, &state)?;
                ctx.mark(Mark::Scattered)?;
                hidden
            }
            Some(Replay { at_cut, layers, .. }) => {
                layers.borrow_mut().passing = Some(rows);
                let outputs = at_cut.run(scope, padded_rows, layers, state.tensors());
                layers.borrow_mut().passing = None;
                outputs?.remove(0)
            }
        };
        match scope.mode() {
            CaptureMode::Full => model.logits(&ctx, &hidden),
            CaptureMode::Piecewise => Ok(hidden),
        }
    }

    fn context<'a>(&'a self, pages: PageLists<'a>, engram: Vec<Tensor>) -> StepContext<'a> {
        let mut ctx = self.model.context(&self.storage, pages, engram);
        ctx.profile = self.profile.as_deref();
        ctx
    }

    /// Logits `[rows, V]` of rows that [`Self::run`] gave, for graphs that leave them to the caller.
    pub(super) fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let ctx = self.context(self.lists.borrow().pages(1)?, Vec::new());
        self.model.logits(&ctx, hidden)
    }
}

impl Replay {
    fn new(
        model: &Arc<Model>,
        cache: &KvCache,
        limits: Limits,
        batch: &Rc<RefCell<StepLists>>,
        planner: &Planner,
        (config, profile): (CacheConfig, Option<Rc<Profile>>),
    ) -> Result<Self> {
        let (of_model, device) = (model.config(), model.device());
        let act = held_dtype(&model.options);
        let sizes = planner.capture_sizes();
        let kept = limits.of_kept(sizes);
        let first = planner.config().layers.first() as usize;
        let shape = model.state_at(first)?;
        let names = ["streams", "pre", "choice", "candidates"];
        let specs = |tensors: &[Tensor]| -> Vec<BufferSpec> {
            let tensors = tensors.iter().enumerate();
            tensors
                .map(|(i, t)| BufferSpec::new(names[i], &t.dims()[1..], t.dtype()))
                .collect()
        };
        let inputs = FixedBuffers::new(&specs(&shape.tensors()), kept.rows, device)?;
        let hidden = BufferSpec::new("hidden", [of_model.hidden_size], act);
        let outputs = FixedBuffers::new(&[hidden], limits.rows, device)?;
        let layers = DecoderReplayLayers {
            model: model.clone(),
            storage: cache.storage.clone(),
            profile,
            first,
            batch: batch.clone(),
            kept: StepLists::new(Layout::of_kept_rows(of_model, kept), device)?,
            cut_kv: Tensor::zeros((limits.rows, of_model.head_dim), act, device)?,
            shape,
            passing: None,
        };
        Ok(Self {
            at_cut: ReplayBreak::with_graphs(
                planner.clone(),
                outputs,
                inputs,
                device.clone(),
                config,
            )?,
            layers: Rc::new(RefCell::new(layers)),
            first,
            sizes: sizes.map_or(0, |sizes| sizes.as_slice().len()),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use replay_core::ReplayPolicy;

    use super::*;
    use crate::{
        CacheOptions, Config, ModelOptions, RunnerOptions, memory::graphs::GraphBytes,
        runner::Sizes,
    };

    fn bytes<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> usize {
        let bytes = |t: &Tensor| t.elem_count() * t.dtype().size_in_bytes();
        tensors.into_iter().map(bytes).sum()
    }

    /// Lists, and buffers of a row each for as many rows as there can be: what is said of them is what
    /// they take, with a list of chosen entries or blocks where a model has none at its cut.
    #[test]
    fn what_is_at_fixed_addresses_was_said() {
        let load = |name: &str| {
            let dir = format!("tests/data/{name}");
            Arc::new(Model::load(dir.as_ref(), ModelOptions::default(), &|_| {}).unwrap())
        };
        for model in ["bf16-s1", "engram-s1"].map(load) {
            for policy in [ReplayPolicy::Off, ReplayPolicy::PromptTail] {
                let options = RunnerOptions {
                    trim_threshold: Some(9),
                    ..RunnerOptions::default()
                };
                let cache = CacheOptions {
                    max_sequences: 5,
                    max_tokens: 1000,
                    page_tokens: CacheOptions::PAGE_TOKENS,
                    policy,
                    sampled_rows: NonZeroU32::MIN,
                };
                let (taken, said) = taken_and_said(&model, &options, cache);
                assert!(
                    taken <= said && said < taken + taken / 50,
                    "{policy}: {taken} of {said}"
                );
            }
        }
    }

    fn taken_and_said(
        model: &Arc<Model>,
        options: &RunnerOptions,
        cache: CacheOptions,
    ) -> (usize, usize) {
        let config: &Config = model.config();
        let sizes = Sizes::new(options, config, &cache).unwrap();
        let cache = model.new_cache(cache).unwrap();
        let planner = cache.planner.for_graphs(sizes.replay.clone(), Some(9));
        let planner = planner.unwrap();
        let mut taken = 0;
        for mode in [CaptureMode::Full, CaptureMode::Piecewise] {
            let (_, limits) = sizes.of_mode(mode).unwrap();
            let planner = planner.planner().filter(|_| mode == CaptureMode::Piecewise);
            let config = (CacheConfig::default(), None);
            let program = Program::new(model, &cache, limits, planner, config).unwrap();
            // A list is there twice while it is written.
            taken += 2 * program.lists.borrow().bytes() + bytes(&program.engram);
            let Some(replay) = &program.replay else {
                continue;
            };
            let layers = replay.layers.borrow();
            let kept = limits.of_kept(sizes.replay.as_ref());
            let hidden = model.config().hidden_size * size_of::<f32>();
            taken += 2 * layers.kept.bytes() + bytes([&layers.cut_kv]) + hidden * limits.rows;
            // The shape is that of one row.
            taken += bytes(&layers.shape.tensors()) * kept.rows;
        }
        let said = GraphBytes::new(config, candle_core::DType::F32, &sizes).fixed;
        (taken, said as usize)
    }
}
