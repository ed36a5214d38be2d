//! The model's replay layers as a captured step runs them: all in its graph, or in a break of it.

use std::{cell::RefCell, rc::Rc, sync::Arc};

use candle_core::Tensor;
use replay_core::{RowCount, StepPlan};
use replay_graph::{Ahead, BreakPhase, Error as GraphError, ReplayLayers, Result as GraphResult};

use super::lists::StepLists;
use crate::{
    Model, Result,
    cache::{CacheStorage, PageLists},
    layers::{DecoderLayer, Entered, RowState, StepContext},
    ops::KvStart,
    profile::{Mark, Profile},
    replay::{resume, subset},
    rows::Rows,
};

/// What each launch of a captured step lends to its break.
#[derive(Debug)]
pub(super) struct BreakStep {
    pub(super) plan: StepPlan,
    /// All rows of the batch, without padding.
    pub(super) rows: Rc<Rows>,
    /// What was uploaded before the launch.
    pub(super) ahead: Option<Ahead>,
}

/// The layers from the cut on, over lists and buffers at fixed addresses.
#[derive(Debug)]
pub(super) struct DecoderReplayLayers {
    pub(super) model: Arc<Model>,
    pub(super) storage: CacheStorage,
    pub(super) profile: Option<Rc<Profile>>,
    /// The model's layer that is replay layer 0, the cut.
    pub(super) first: usize,
    /// Lists of the whole batch.
    pub(super) batch: Rc<RefCell<StepLists>>,
    /// Lists of the rows that are kept.
    pub(super) kept: StepLists,
    /// Window KV that the cut makes of every row, `[most rows, D]`.
    pub(super) cut_kv: Tensor,
    /// Which tensors come to the cut, and how wide they are.
    pub(super) shape: RowState,
    /// Rows of the pass that is being captured.
    pub(super) passing: Option<Rc<Rows>>,
}

impl DecoderReplayLayers {
    fn layers(&self) -> &[DecoderLayer] {
        &self.model.layers[self.first..]
    }

    fn context(&self, requests: usize) -> Result<StepContext<'_>> {
        let pages = self.batch.borrow().pages(requests)?;
        Ok(self.context_with(pages))
    }

    fn context_with<'a>(&'a self, pages: PageLists<'a>) -> StepContext<'a> {
        // No engram lies behind the cut: such a model cannot replay.
        let mut ctx = self.model.context(&self.storage, pages, Vec::new());
        ctx.profile = self.profile.as_deref();
        ctx
    }

    fn mark(&self, mark: Mark) -> GraphResult<()> {
        match &self.profile {
            Some(profile) => profile.mark(mark),
            None => Ok(()),
        }
    }

    /// The rows of this pass, and how many requests they can be of.
    fn passing(&self) -> Result<(Rc<Rows>, usize)> {
        let rows = self.passing.clone();
        let rows = rows.expect("a pass announces its rows before it runs the layers");
        let requests = rows.on_device()?.spans.dim(0)?;
        Ok((rows, requests))
    }

    fn write_kv(&self, inputs: &[Tensor]) -> Result<()> {
        let (rows, requests) = self.passing()?;
        let state = self.shape.with(inputs.to_vec());
        let ctx = self.context(requests)?;
        ctx.mark(Mark::Encoded)?;
        let entered = self.layers()[0].enter(&ctx, state, &rows)?;
        self.cut_kv.slice_set(&entered.kv, 0, 0)?;
        ctx.mark(Mark::KvWritten)
    }

    fn store_kv(&self) -> Result<()> {
        let (rows, requests) = self.passing()?;
        let kv = self.cut_kv.narrow(0, 0, rows.len())?;
        self.layers()[0].store(&self.context(requests)?, &kv, &rows)
    }

    fn whole(&self, inputs: &[Tensor]) -> Result<Tensor> {
        let (rows, requests) = self.passing()?;
        let ctx = self.context(requests)?;
        let mut state = self.shape.with(inputs.to_vec());
        for layer in 0..self.layers().len() {
            let kv_start = self.batch.borrow().kv_start(layer + 1, requests)?;
            let (index, kv_start) = (self.first + layer, KvStart::Device(&kv_start));
            state = self.model.pass(&ctx, index, state, &rows, kv_start)?;
        }
        let hidden = self.model.finish(&ctx, &state)?;
        ctx.mark(Mark::Scattered)?;
        Ok(hidden)
    }

    /// The kept rows as they come to the rest of the cut, with the KV of `n_rows` rows of the batch.
    fn entered(&self, ctx: &StepContext<'_>, kept: &[Tensor], n_rows: usize) -> Result<Entered> {
        let state = self.shape.with(kept.to_vec());
        Ok(Entered {
            normed: self.layers()[0].input(ctx, &state)?,
            state,
            kv: self.cut_kv.narrow(0, 0, n_rows)?,
        })
    }

    fn exact_rows(&self, step: &BreakStep, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        let ctx = self.context(step.rows.spans().len())?;
        let entered = self.entered(&ctx, inputs, step.rows.len())?;
        let left = resume(&step.plan, self.layers(), &ctx, entered, step.rows.clone())?;
        left.map(|state| self.model.finish(&ctx, &state))
            .transpose()
    }

    fn padded_rows(&self, inputs: &[Tensor]) -> Result<Tensor> {
        let batch = self.batch.borrow();
        let (most, n_requests) = (batch.most_rows(), self.kept.most_requests());
        let n = inputs[0].dim(0)?;
        let (all, kept) = (
            batch.rows(most, n_requests)?,
            self.kept.rows(n, n_requests)?,
        );
        let ctx = self.context_with(batch.pages(n_requests)?);
        let entered = self.entered(&ctx, inputs, most)?;
        let kv_start = batch.kv_start(1, n_requests)?;
        let kv_start = KvStart::Device(&kv_start);
        let mut state = self.layers()[0].run(&ctx, entered, (&all, &kept), kv_start)?;
        for layer in 1..self.layers().len() {
            let kv_start = batch.kv_start(layer + 1, n_requests)?;
            let (index, kv_start) = (self.first + layer, KvStart::Device(&kv_start));
            state = self.model.pass(&ctx, index, state, &kept, kv_start)?;
        }
        self.model.finish(&ctx, &state)
    }
}

impl ReplayLayers<BreakStep> for DecoderReplayLayers {
    fn plan<'c>(&self, context: &'c BreakStep) -> &'c StepPlan {
        &context.plan
    }

    fn write_batch_kv(&mut self, inputs: &[Tensor]) -> GraphResult<()> {
        self.write_kv(inputs).map_err(GraphError::program)
    }

    fn break_phase(&mut self, done: BreakPhase) -> GraphResult<()> {
        self.mark(match done {
            BreakPhase::Gathered => Mark::Gathered,
            BreakPhase::Run => Mark::Replayed,
            BreakPhase::Scattered => Mark::Scattered,
        })
    }

    fn after_break(&mut self) -> GraphResult<()> {
        self.store_kv().map_err(GraphError::program)
    }

    fn run_batch(&mut self, _: &mut BreakStep, inputs: &[Tensor]) -> GraphResult<Vec<Tensor>> {
        let hidden = self.whole(inputs).map_err(GraphError::program)?;
        Ok(vec![hidden])
    }

    fn run_rows(
        &mut self,
        context: &mut BreakStep,
        inputs: &[Tensor],
    ) -> GraphResult<Option<Vec<Tensor>>> {
        let hidden = self.exact_rows(context, inputs);
        let hidden = hidden.map_err(GraphError::program)?;
        Ok(hidden.map(|hidden| vec![hidden]))
    }

    fn prepare(&mut self, context: &mut BreakStep, _: RowCount) -> GraphResult<()> {
        let kept = subset(&context.rows, &context.plan.layer(0).running);
        let written = self.kept.write(&[], &kept, &PageLists::new([]), &[]);
        written.map_err(GraphError::program)
    }

    fn take_ahead(&mut self, context: &mut BreakStep) -> Option<Ahead> {
        context.ahead.take()
    }

    fn run_padded(&mut self, inputs: &[Tensor]) -> GraphResult<Vec<Tensor>> {
        let hidden = self.padded_rows(inputs).map_err(GraphError::program)?;
        Ok(vec![hidden])
    }
}
