//! The break at the cut: the layers after the last KV source, on the rows that are kept.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use candle_core::Tensor;
use replay_core::{GraphMode, Planner, ReplayLaunch, RowCount, StepPlan};

use crate::kept::{Kept, Step};
use crate::{
    Backend, BreakableGraph, CacheConfig, CaptureMode, CaptureReport, DeviceCapture, Error,
    FixedBuffers, GraphCache, Progress, Result, Scope,
};

/// The replay layers of a model, as the break runs them. `C` is what is lent to each launch.
///
/// Inputs and outputs are the model's own: per-row tensors `[rows, ...]` in an order that it chooses.
/// The first output row belongs to the first input row, and so on.
pub trait ReplayLayers<C>: 'static {
    /// The plan of the step that is being run.
    fn plan<'c>(&self, context: &'c C) -> &'c StepPlan;

    /// Makes the KV that the cut writes, of every row of the batch. Captured, before the break.
    ///
    /// # Errors
    ///
    /// What the model's operations fail with.
    fn write_batch_kv(&mut self, inputs: &[Tensor]) -> Result<()>;

    /// Told in each break what has been done; once for each phase, also where there was nothing to do.
    /// Not captured.
    ///
    /// # Errors
    ///
    /// What the model's operations fail with.
    fn break_phase(&mut self, _done: BreakPhase) -> Result<()> {
        Ok(())
    }

    /// What must wait until the rows have run, such as writing the cut's window KV over older rows that
    /// they read. Captured, after the break.
    ///
    /// # Errors
    ///
    /// What the model's operations fail with.
    fn after_break(&mut self) -> Result<()> {
        Ok(())
    }

    /// Runs the layers on the whole batch, the cut with all that it writes. Captured, in graphs that
    /// do not break.
    ///
    /// # Errors
    ///
    /// What the model's operations fail with.
    fn run_batch(&mut self, context: &mut C, inputs: &[Tensor]) -> Result<Vec<Tensor>>;

    /// Runs the layers on the rows that run in the cut, whose KV has been written: `inputs` holds
    /// those rows alone. Gives the tensors of [`StepPlan::output_rows`], or `None` when no row
    /// reaches the end. Not captured. [`resume_replay_layers`](crate::resume_replay_layers) helps.
    ///
    /// # Errors
    ///
    /// What the model's operations fail with.
    fn run_rows(&mut self, context: &mut C, inputs: &[Tensor]) -> Result<Option<Vec<Tensor>>>;

    /// Writes what [`run_padded`](Self::run_padded) reads beside its inputs, such as positions and
    /// slots, into buffers of its own. Rows past those that run are padding: they write to no slot.
    /// Not captured.
    ///
    /// # Errors
    ///
    /// What the model's operations fail with.
    fn prepare(&mut self, context: &mut C, padded_rows: RowCount) -> Result<()>;

    /// What [`ReplayBreak::upload_ahead`] gave for this launch, if the context carries it; asked once, in the
    /// break.
    fn take_ahead(&mut self, _context: &mut C) -> Option<Ahead> {
        None
    }

    /// Runs the layers on `padded_rows` rows of fixed inputs. Captured, in a graph of its own, and run
    /// once before that; padding has zero in its rows.
    ///
    /// # Errors
    ///
    /// What the model's operations fail with.
    fn run_padded(&mut self, inputs: &[Tensor]) -> Result<Vec<Tensor>>;
}

/// Numbers of one launch that its break needs not upload: they are on the device already.
#[derive(Debug)]
pub struct Ahead {
    /// Rows of the graph that they were made for.
    padded_rows: RowCount,
    /// Row lists, padded to as many.
    running: Tensor,
    output: Tensor,
}

/// What a break does, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BreakPhase {
    /// The rows that are kept have been gathered.
    Gathered,
    /// The layers have run on them.
    Run,
    /// The results are where their rows were.
    Scattered,
}

/// Runs replay layers where a graph breaks, and knows none of their tensors by name.
///
/// Where the model's graph breaks, as [`Planner::graph_breaks`] says of its size both when it is
/// captured and when its steps are planned, the segment before the break writes the KV of every row.
/// The break gathers the rows that are kept, runs the layers on them, eagerly or in a graph of their
/// own, and scatters what they give over fixed buffers, with zero for the other rows. A graph that
/// does not break runs the layers on the whole batch.
///
/// A clone is another handle to the same.
pub struct ReplayBreak<B: Backend = DeviceCapture>(Rc<Shared<B>>);

struct Shared<B: Backend> {
    planner: Planner,
    outputs: FixedBuffers,
    graphs: Option<RefCell<ReplayGraphs<B>>>,
}

/// The graphs that the replay layers themselves run in.
struct ReplayGraphs<B: Backend> {
    cache: GraphCache<Vec<Tensor>, (), (), B>,
    inputs: FixedBuffers,
    target: B::Target,
}

impl<B: Backend> ReplayBreak<B> {
    /// A break whose results go to `outputs`, which hold as many rows as the largest model graph. The
    /// layers run eagerly.
    pub fn new(planner: Planner, outputs: FixedBuffers) -> Self {
        Self(Rc::new(Shared {
            planner,
            outputs,
            graphs: None,
        }))
    }

    /// A break whose layers run in graphs of the planner's capture sizes, once
    /// [`capture_graphs`](Self::capture_graphs) has made them. Kept rows are gathered into `inputs`,
    /// which hold the largest size.
    ///
    /// # Errors
    ///
    /// If the inputs hold fewer rows.
    pub fn with_graphs(
        planner: Planner,
        outputs: FixedBuffers,
        inputs: FixedBuffers,
        target: B::Target,
        config: CacheConfig,
    ) -> Result<Self> {
        let graphs = match planner.capture_sizes() {
            None => None,
            Some(sizes) => {
                let rows = sizes.largest().as_usize();
                if rows > inputs.max_rows() {
                    let max_rows = inputs.max_rows();
                    return Err(Error::TooManyRows { rows, max_rows });
                }
                Some(RefCell::new(ReplayGraphs {
                    cache: GraphCache::new(sizes.clone(), config),
                    inputs,
                    target,
                }))
            }
        };
        Ok(Self(Rc::new(Shared {
            planner,
            outputs,
            graphs,
        })))
    }

    /// Captures the graphs of the layers, the largest first. Call it before steps that matter: a
    /// capture runs the layers, with whatever [`ReplayLayers::run_padded`] writes. No step captures by
    /// itself; one whose graph is missing runs the layers eagerly.
    ///
    /// # Errors
    ///
    /// As [`GraphCache::capture_all`]: graphs captured before it stay.
    pub fn capture_graphs<C, L: ReplayLayers<C>>(
        &self,
        layers: &Rc<RefCell<L>>,
        progress: impl FnMut(Progress<'_>),
    ) -> Result<CaptureReport> {
        let Some(graphs) = &self.0.graphs else {
            return Ok(CaptureReport::default());
        };
        let ReplayGraphs {
            cache,
            inputs,
            target,
        } = &mut *graphs.borrow_mut();
        let kinds = [(CaptureMode::Full, ())];
        let run = |rows: RowCount| {
            let inputs = inputs.all_rows(rows.as_usize())?;
            layers.borrow_mut().run_padded(&inputs)
        };
        cache.capture_all(target, &kinds, &mut (), |d, _| run(d.rows), progress)
    }

    /// The graphs of the layers that there are; see [`GraphCache::captured`].
    pub fn captured(&self) -> CaptureReport {
        let graphs = self.0.graphs.as_ref().map(RefCell::borrow);
        graphs.map_or_else(CaptureReport::default, |graphs| graphs.cache.captured())
    }

    /// Drops the graphs of the layers, which run eagerly from then on.
    ///
    /// # Errors
    ///
    /// As [`GraphCache::clear`]; the graphs are dropped all the same.
    pub fn clear_graphs(&self) -> Result<()> {
        let Some(graphs) = &self.0.graphs else {
            return Ok(());
        };
        let ReplayGraphs { cache, target, .. } = &mut *graphs.borrow_mut();
        cache.clear(target)
    }

    /// Uploads what the break of the next launch reads, and [prepares](ReplayLayers::prepare) it, before that is
    /// launched: in the break the device would stand still for every copy from the host. `context` is what will be
    /// lent to that launch, and must carry the result there ([`ReplayLayers::take_ahead`]).
    ///
    /// `None` where the break does not launch a graph, so that there is nothing to do ahead.
    ///
    /// # Errors
    ///
    /// If memory does not hold the lists, and what the layers fail with.
    pub fn upload_ahead<C, L: ReplayLayers<C>>(
        &self,
        layers: &Rc<RefCell<L>>,
        context: &mut C,
    ) -> Result<Option<Ahead>> {
        let (Some(graphs), Some(step)) = (
            &self.0.graphs,
            Step::that_breaks(layers.borrow().plan(context)),
        ) else {
            return Ok(None);
        };
        let ReplayLaunch::Graph { padded_rows } = step.launch else {
            return Ok(None);
        };
        let mut graphs = graphs.borrow_mut();
        let Some(graph) = graphs.get(padded_rows) else {
            return Ok(None);
        };
        let n = padded_rows.as_usize();
        let fixed = graph.inputs.all_rows(n)?;
        let Some(first) = fixed.first() else {
            return Ok(None);
        };
        let (running, output) = (
            step.running.upload(n, first.device())?,
            step.output.upload(n, first.device())?,
        );
        layers.borrow_mut().prepare(context, padded_rows)?;
        Ok(Some(Ahead {
            padded_rows,
            running,
            output,
        }))
    }

    /// Runs the layers in the forward that is captured as `scope`, on a graph of `padded_rows` rows.
    ///
    /// * `inputs` - `[padded_rows, ...]` each.
    ///
    /// Gives `[padded_rows, ...]` each: of a graph that breaks rows of the fixed outputs, in which
    /// only those of [`StepPlan::output_rows`] are not zero.
    ///
    /// # Errors
    ///
    /// If the step's plan does not fit the graph, and what the layers and the capture fail with.
    pub fn run<C, L>(
        &self,
        scope: &mut Scope<'_, C, B>,
        padded_rows: RowCount,
        layers: &Rc<RefCell<L>>,
        inputs: Vec<Tensor>,
    ) -> Result<Vec<Tensor>>
    where
        C: 'static,
        L: ReplayLayers<C>,
    {
        let mode = match scope.mode() {
            CaptureMode::Piecewise => GraphMode::Piecewise { padded_rows },
            CaptureMode::Full => GraphMode::Full { padded_rows },
        };
        if !self.0.planner.graph_breaks(mode) {
            return layers.borrow_mut().run_batch(scope.context(), &inputs);
        }
        layers.borrow_mut().write_batch_kv(&inputs)?;
        scope.fixed(&self.0.outputs);
        let outputs = self.0.outputs.all_rows(padded_rows.as_usize())?;
        let (shared, in_break) = (self.0.clone(), layers.clone());
        let outputs = scope.eager_break(move |context| {
            shared.run_break(context, &in_break, &inputs, &outputs)?;
            Ok(outputs.clone())
        })?;
        layers.borrow_mut().after_break()?;
        Ok(outputs)
    }
}

impl<B: Backend> Shared<B> {
    fn run_break<C, L: ReplayLayers<C>>(
        &self,
        context: &mut C,
        layers: &Rc<RefCell<L>>,
        inputs: &[Tensor],
        outputs: &[Tensor],
    ) -> Result<()> {
        let step = {
            let layers = layers.borrow();
            Step::of(layers.plan(context))?
        };
        let max_rows = outputs.first().map_or(usize::MAX, |t| t.dims()[0]);
        if step.n_batch_rows > max_rows {
            let rows = step.n_batch_rows;
            return Err(Error::TooManyRows { rows, max_rows });
        }
        let mut graphs = self.graphs.as_ref().map(RefCell::borrow_mut);
        let graph = match (step.launch, &mut graphs) {
            (ReplayLaunch::Graph { padded_rows }, Some(graphs)) => graphs.get(padded_rows),
            _ => None,
        };
        let ahead = layers.borrow_mut().take_ahead(context);
        let ahead = ahead.filter(|ahead| {
            step.launch
                == ReplayLaunch::Graph {
                    padded_rows: ahead.padded_rows,
                }
        });
        let results = match (step.launch, graph) {
            (ReplayLaunch::Skip, _) => {
                layers.borrow_mut().break_phase(BreakPhase::Gathered)?;
                None
            }
            (_, Some(graph)) => {
                Some(graph.run(context, layers, inputs, &step.running, ahead.as_ref())?)
            }
            (ReplayLaunch::Eager | ReplayLaunch::Graph { .. }, None) => {
                let kept = step.running.take(inputs)?;
                layers.borrow_mut().break_phase(BreakPhase::Gathered)?;
                layers.borrow_mut().run_rows(context, &kept)?
            }
        };
        layers.borrow_mut().break_phase(BreakPhase::Run)?;
        match results {
            None => self
                .outputs
                .set_zero(max_rows.min(self.outputs.max_rows()))?,
            Some(values) => {
                self.outputs.check(&values)?;
                step.output
                    .put(&values, outputs, ahead.map(|ahead| ahead.output))?;
            }
        }
        layers.borrow_mut().break_phase(BreakPhase::Scattered)
    }
}

impl<B: Backend> ReplayGraphs<B> {
    /// The graph of `padded_rows` rows, if it has been captured.
    fn get(&mut self, padded_rows: RowCount) -> Option<ReplayGraph<'_, B>> {
        Some(ReplayGraph {
            graph: self.cache.get(padded_rows, CaptureMode::Full, ())?,
            inputs: &self.inputs,
            padded_rows,
        })
    }
}

/// One of these graphs, with the buffers that it reads.
struct ReplayGraph<'a, B: Backend> {
    graph: &'a mut BreakableGraph<Vec<Tensor>, (), B>,
    inputs: &'a FixedBuffers,
    padded_rows: RowCount,
}

impl<B: Backend> ReplayGraph<'_, B> {
    /// Runs the layers on the given rows of the inputs.
    fn run<C, L: ReplayLayers<C>>(
        self,
        context: &mut C,
        layers: &Rc<RefCell<L>>,
        inputs: &[Tensor],
        rows: &Kept,
        ahead: Option<&Ahead>,
    ) -> Result<Vec<Tensor>> {
        let fixed = self.inputs.all_rows(self.padded_rows.as_usize())?;
        self.inputs.check(inputs)?;
        rows.take_into(inputs, &fixed, ahead.map(|ahead| &ahead.running))?;
        layers.borrow_mut().break_phase(BreakPhase::Gathered)?;
        if ahead.is_none() {
            layers.borrow_mut().prepare(context, self.padded_rows)?;
        }
        Ok(self.graph.launch()?.clone())
    }
}

impl<B: Backend> Clone for ReplayBreak<B> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<B: Backend> fmt::Debug for ReplayBreak<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplayBreak")
            .field("trim_threshold", &self.0.planner.trim_threshold())
            .field("outputs", &self.0.outputs)
            .field("has_graphs", &self.0.graphs.is_some())
            .finish_non_exhaustive()
    }
}
