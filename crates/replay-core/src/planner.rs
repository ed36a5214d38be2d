//! From a batch to its plan.

use core::num::NonZeroU32;

use crate::plan::LayerPlan;
use crate::tails::{Tail, Tails};
use crate::{
    CaptureSizes, GraphMode, PlanError, ReplayBatch, ReplayLaunch, ReplayLayers, ReplayPlan,
    ReplayPolicy, Request, RowCount, StepPlan, ThresholdError, TrimThreshold, Window,
};

/// What a planner needs to know of the model and of its use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlannerConfig {
    /// The sliding window.
    pub window: Window,
    /// The replay layers.
    pub layers: ReplayLayers,
    /// Which rows run in them.
    pub policy: ReplayPolicy,
    /// `R`: at the end of a prompt, how many rows' outputs are read. 1 for sampling, the window for
    /// a drafter that reads a window of hidden rows.
    pub sampled_rows: NonZeroU32,
}

/// Plans steps: which rows run in which replay layer, and in which graph.
///
/// ```
/// use std::num::NonZeroU32;
/// use replay_core::{
///     LayerSchedule, Planner, PlannerConfig, ReplayLayers, ReplayPlan, ReplayPolicy, Request, Rows,
///     Window,
/// };
///
/// let layers = ReplayLayers::from_schedule(&LayerSchedule {
///     num_layers: 6,
///     kv_sources: &[1, 3],
///     compress_ratios: &[0, 4, 0, 1],
///     engram_layers: &[],
/// })?;
/// let planner = Planner::new(PlannerConfig {
///     window: Window::new(8)?,
///     layers,
///     policy: ReplayPolicy::PromptTail,
///     sampled_rows: NonZeroU32::MIN,
/// });
///
/// // A decode row, and a prompt of 20 tokens in one chunk.
/// let plan = planner.plan(&[Request::decode(29, 30), Request::prefill(20, 0..20)])?;
/// assert!(matches!(plan.decision(), ReplayPlan::EagerTrim(_)));
///
/// let layer = plan.layer(1);
/// assert_eq!(layer.running.rows(), Rows::Listed(&[0, 13, 14, 15, 16, 17, 18, 19, 20]));
/// assert_eq!(layer.running.query_start_loc(), [0, 1, 9]);
/// assert_eq!(layer.kv_start, [0, 12]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planner {
    config: PlannerConfig,
    tails: Tails,
    threshold: TrimThreshold,
    sizes: Option<CaptureSizes>,
}

impl Planner {
    /// A planner with the default trim threshold and no graphs of the replay layers.
    pub fn new(config: PlannerConfig) -> Self {
        Self {
            tails: Tails {
                policy: config.policy,
                window: config.window.get(),
                sampled_rows: config.sampled_rows.get(),
                depth: config.layers.depth(),
            },
            threshold: TrimThreshold::for_window(config.window),
            sizes: None,
            config,
        }
    }

    /// Lets piecewise graphs of at least `padded_rows` rows break.
    ///
    /// # Errors
    ///
    /// [`ThresholdError`] when that is not above the window.
    pub fn with_trim_threshold(mut self, padded_rows: u32) -> Result<Self, ThresholdError> {
        self.threshold = TrimThreshold::new(padded_rows, self.config.window)?;
        Ok(self)
    }

    /// Runs replay batches in graphs of these sizes.
    #[must_use]
    pub fn with_capture_sizes(mut self, sizes: CaptureSizes) -> Self {
        self.sizes = Some(sizes);
        self
    }

    /// What the planner was made from.
    pub const fn config(&self) -> &PlannerConfig {
        &self.config
    }

    /// From which size on piecewise graphs break.
    pub const fn trim_threshold(&self) -> TrimThreshold {
        self.threshold
    }

    /// The sizes of the graphs of the replay layers.
    pub const fn capture_sizes(&self) -> Option<&CaptureSizes> {
        self.sizes.as_ref()
    }

    /// How many rows at the end of a prompt run in replay layer `layer` (`StepTail`: at the end of a
    /// chunk); `None` when all do.
    ///
    /// # Panics
    ///
    /// If there is no such layer.
    pub fn tail_rows(&self, layer: u32) -> Option<RowCount> {
        assert!(
            layer <= self.tails.depth,
            "replay layer {layer} of {}",
            self.config.layers.count()
        );
        self.tails.running(layer).len().map(RowCount::new)
    }

    /// What enters each replay layer of an eager step, and what runs in it, from the cut on.
    pub(crate) fn tails_in_layers(&self) -> impl Iterator<Item = (Tail, Tail)> {
        let mut entering = Tail::All;
        (0..self.config.layers.count()).map(move |layer| {
            let running = self.tails.running(layer);
            (core::mem::replace(&mut entering, running), running)
        })
    }

    /// Whether a graph breaks at the cut. Asked when the graph is captured and again, by planning,
    /// when it is launched; nothing but the graph enters, so the answers agree.
    pub const fn graph_breaks(&self, mode: GraphMode) -> bool {
        match mode {
            GraphMode::None | GraphMode::Full { .. } => false,
            GraphMode::Piecewise { padded_rows } => {
                !matches!(self.config.policy, ReplayPolicy::Off)
                    && padded_rows.get() >= self.threshold.get()
            }
        }
    }

    /// Plans an eager step.
    ///
    /// # Errors
    ///
    /// [`PlanError`] when the batch contradicts itself, or its plan is too large.
    pub fn plan(&self, requests: &[Request]) -> Result<StepPlan, PlanError> {
        let mut plan = StepPlan::new();
        self.plan_into(requests, &mut plan)?;
        Ok(plan)
    }

    /// Plans an eager step in the buffers of an earlier plan.
    ///
    /// # Errors
    ///
    /// [`PlanError`] when the batch contradicts itself, or its plan is too large; the plan is then empty.
    pub fn plan_into(&self, requests: &[Request], plan: &mut StepPlan) -> Result<(), PlanError> {
        self.plan_step(GraphMode::None, requests, plan)
    }

    /// Plans a step whose layers run in the given graph, in the buffers of an earlier plan. Allocates
    /// nothing once the buffers have held a plan as large.
    ///
    /// # Errors
    ///
    /// [`PlanError`] when the batch contradicts itself or its graph, or its plan is too large; the plan
    /// is then empty.
    pub fn plan_step(
        &self,
        mode: GraphMode,
        requests: &[Request],
        plan: &mut StepPlan,
    ) -> Result<(), PlanError> {
        plan.clear(mode);
        let breaks = self.graph_breaks(mode);
        let may_trim = breaks || mode == GraphMode::None;
        let written = plan
            .push_whole_batch(requests)
            .and_then(|n_rows| fits(mode, n_rows))
            .and_then(|()| self.push_layers(requests, may_trim, plan));
        if let Err(error) = written {
            plan.clear(GraphMode::None);
            return Err(error);
        }

        plan.decision = if breaks {
            ReplayPlan::BreakOut(self.replay_batch(plan))
        } else if plan.is_trimmed() {
            ReplayPlan::EagerTrim(self.replay_batch(plan))
        } else {
            ReplayPlan::WholeBatch
        };
        Ok(())
    }

    fn push_layers(
        &self,
        requests: &[Request],
        may_trim: bool,
        plan: &mut StepPlan,
    ) -> Result<(), PlanError> {
        // A tail that holds even the longest prompt drops nothing. Spares the loops over the requests
        // in all layers when no prompt is being prefilled, and in many when prompts are short.
        let longest = requests
            .iter()
            .map(Request::droppable_prompt)
            .max()
            .unwrap_or(0);
        let (mut ran, mut running) = (Tail::All, 0);
        let (mut had_written, mut kv_starts) =
            (Tail::All, plan.push_kv_starts(requests, Tail::All)?);
        for layer in 0..self.config.layers.count() {
            let entering = running;
            let runs = if may_trim {
                self.tails.running(layer)
            } else {
                Tail::All
            };
            let (runs, written) = (
                runs.within(longest),
                self.tails.written(layer).within(longest),
            );
            if runs != ran {
                (ran, running) = (runs, plan.push_level(entering, requests, runs)?);
            }
            if written != had_written {
                (had_written, kv_starts) = (written, plan.push_kv_starts(requests, written)?);
            }
            plan.layers.push(LayerPlan {
                entering,
                running,
                kv_starts,
            });
        }
        Ok(())
    }

    fn replay_batch(&self, plan: &StepPlan) -> ReplayBatch {
        let n_rows = plan.n_rows();
        let launch = ReplayLaunch::choose(n_rows, plan.is_uniform(), self.sizes.as_ref());
        ReplayBatch {
            n_rows,
            trimmed: plan.is_trimmed(),
            launch,
        }
    }
}

/// Refuses a batch that its graph does not hold.
fn fits(mode: GraphMode, n_rows: u32) -> Result<(), PlanError> {
    match mode.padded_rows() {
        Some(padded) if padded.get() < n_rows => Err(PlanError::GraphTooSmall {
            n_rows,
            padded_rows: padded.get(),
        }),
        _ => Ok(()),
    }
}
