//! The forward of a step whose numbers are on the device, at fixed addresses.

use std::{cell::RefCell, rc::Rc, sync::Arc};

use candle_core::Tensor;
use replay_core::{Planner, RowCount};
use replay_graph::{
    BufferSpec, CacheConfig, CaptureMode, CaptureReport, FixedBuffers, ReplayBreak, Scope,
};

use super::{
    lists::{Limits, StepLists},
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
        let lists = StepLists::of_steps(
            model.config(),
            limits,
            replay_layers as usize,
            model.device(),
        )?;
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
        // Without graphs of their own, the layers read no lists of kept rows.
        let most_kept = sizes.map_or(1, |sizes| sizes.largest().as_usize());
        let kept = Limits {
            rows: most_kept,
            ..limits
        };
        let first = planner.config().layers.first() as usize;
        let shape = model.state_at(first)?;
        let names = ["streams", "pre", "choice", "candidates"];
        let specs = |tensors: &[Tensor]| -> Vec<BufferSpec> {
            let tensors = tensors.iter().enumerate();
            tensors
                .map(|(i, t)| BufferSpec::new(names[i], &t.dims()[1..], t.dtype()))
                .collect()
        };
        let inputs = FixedBuffers::new(&specs(&shape.tensors()), most_kept, device)?;
        let hidden = BufferSpec::new("hidden", [of_model.hidden_size], act);
        let outputs = FixedBuffers::new(&[hidden], limits.rows, device)?;
        let layers = DecoderReplayLayers {
            model: model.clone(),
            storage: cache.storage.clone(),
            profile,
            first,
            batch: batch.clone(),
            kept: StepLists::of_kept_rows(of_model, kept, device)?,
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
