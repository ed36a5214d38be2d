//! The plan of a step: what its replay layers run on.

use alloc::vec::Vec;
use core::ops::Range;

use crate::{GraphMode, ReplayPlan, RowCount, RowSet, Rows};

/// What the replay layers of a step run on, layer by layer.
///
/// Made by a [`Planner`](crate::Planner); its buffers are reused from step to step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    pub(crate) decision: ReplayPlan,
    pub(crate) mode: GraphMode,
    pub(crate) seq_lens: Vec<u32>,
    /// The distinct row sets, from the whole batch down; each is a subset of the one before.
    pub(crate) levels: Vec<Level>,
    /// Of each level the offsets of the requests, one more than there are requests.
    pub(crate) start_locs: Vec<u32>,
    /// The row lists of the levels, one after the other.
    pub(crate) rows: Vec<u32>,
    /// The distinct lists of KV bounds, each with one bound per request.
    pub(crate) kv_starts: Vec<u32>,
    pub(crate) layers: Vec<LayerPlan>,
}

/// A row set, by its place in the buffers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Level {
    /// The rows' place in `StepPlan::rows`; `None` for the whole batch.
    pub(crate) rows: Option<Range<usize>>,
    pub(crate) n_rows: u32,
}

/// A replay layer, by what it refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LayerPlan {
    /// Level that enters.
    pub(crate) entering: usize,
    /// Level that runs.
    pub(crate) running: usize,
    /// Which list of KV bounds.
    pub(crate) kv_starts: usize,
}

impl StepPlan {
    /// Numbers that the lists of a plan hold at most, over all layers: rows, offsets and KV bounds. In
    /// bytes 1 GiB, which no step on a device comes near.
    pub const MAX_NUMBERS: usize = 1 << 28;

    /// A plan without a request or a layer, to plan into.
    pub fn new() -> Self {
        Self::default()
    }

    /// What the replay layers of the step do.
    pub const fn decision(&self) -> ReplayPlan {
        self.decision
    }

    /// The graph mode that the step was planned for.
    pub const fn graph_mode(&self) -> GraphMode {
        self.mode
    }

    /// Rows that run in the first replay layer; no later one runs more. The whole batch's for
    /// [`ReplayPlan::WholeBatch`].
    pub fn n_rows(&self) -> RowCount {
        self.layers.first().map_or(RowCount::default(), |l| {
            RowCount::new(self.levels[l.running].n_rows)
        })
    }

    /// Rows of the step.
    pub fn n_batch_rows(&self) -> RowCount {
        self.levels
            .first()
            .map_or(RowCount::default(), |level| RowCount::new(level.n_rows))
    }

    /// Requests of the step.
    pub fn n_requests(&self) -> usize {
        self.seq_lens.len()
    }

    /// Replay layers, the cut among them.
    pub fn n_layers(&self) -> u32 {
        self.layers.len() as u32
    }

    /// Whether some row of the step is dropped in some layer.
    pub fn is_trimmed(&self) -> bool {
        self.layers.last().is_some_and(|layer| layer.running != 0)
    }

    /// Whether every layer runs on the same rows, so that one graph can hold them all.
    pub fn is_uniform(&self) -> bool {
        match (self.layers.first(), self.layers.last()) {
            (Some(first), Some(last)) => first.running == last.running,
            _ => true,
        }
    }

    /// What replay layer `layer` runs on; the cut is layer 0.
    ///
    /// # Panics
    ///
    /// If there is no such layer.
    pub fn layer(&self, layer: u32) -> LayerRows<'_> {
        let Some(plan) = self.layers.get(layer as usize) else {
            panic!(
                "expected a replay layer below {}, got {layer}",
                self.n_layers()
            );
        };
        let n = self.n_requests();
        LayerRows {
            entering: self.set(plan.entering),
            running: self.set(plan.running),
            kv_start: &self.kv_starts[plan.kv_starts * n..][..n],
        }
    }

    /// What each replay layer runs on, from the cut on.
    pub fn layers(&self) -> impl ExactSizeIterator<Item = LayerRows<'_>> {
        (0..self.n_layers()).map(|layer| self.layer(layer))
    }

    /// The rows that have an output: those that run in the last layer. Every other row's output is
    /// zero.
    ///
    /// # Panics
    ///
    /// If nothing has been planned.
    pub fn output_rows(&self) -> RowSet<'_> {
        let last = self.n_layers().checked_sub(1);
        self.layer(last.expect("an empty plan has no output rows: nothing was planned"))
            .running
    }

    fn set(&self, level: usize) -> RowSet<'_> {
        let n = self.n_requests() + 1;
        RowSet {
            rows: match &self.levels[level].rows {
                None => Rows::Whole,
                Some(range) => Rows::Listed(&self.rows[range.clone()]),
            },
            query_start_loc: &self.start_locs[level * n..][..n],
            batch_start_loc: &self.start_locs[..n],
            seq_lens: &self.seq_lens,
        }
    }
}

/// What one replay layer of a step runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerRows<'a> {
    /// The rows that come in: the layer writes window KV for each. The whole batch in the cut, and
    /// elsewhere what ran in the layer before.
    pub entering: RowSet<'a>,
    /// The rows that go through the rest of the layer.
    pub running: RowSet<'a>,
    /// Per request, the first position whose window KV the layer's attention may read. See
    /// [`Window::keys`](crate::Window::keys).
    pub kv_start: &'a [u32],
}

impl LayerRows<'_> {
    /// Whether fewer rows run than enter, so that what belongs to the entering rows must be gathered.
    pub fn drops(&self) -> bool {
        self.running.n_rows() < self.entering.n_rows()
    }

    /// Of each request, where its running rows lie among the entering ones.
    pub fn gather_ranges(&self) -> impl ExactSizeIterator<Item = Range<u32>> {
        self.running.ranges_within(&self.entering)
    }

    /// Where the running rows lie among the entering ones: with these indices every per-row tensor
    /// of the entering rows is gathered, in place of what `out` held. It grows to as many numbers as
    /// rows run, also where all do.
    ///
    /// ```
    /// # use core::num::NonZeroU32;
    /// # use replay_core::{LayerSchedule, Planner, PlannerConfig, ReplayLayers, ReplayPolicy, Request, Window};
    /// # let layers = ReplayLayers::from_schedule(&LayerSchedule {
    /// #     num_layers: 6, kv_sources: &[3], compress_ratios: &[], engram_layers: &[],
    /// # })?;
    /// # let planner = Planner::new(PlannerConfig {
    /// #     window: Window::new(8)?, layers, policy: ReplayPolicy::Exact, sampled_rows: NonZeroU32::MIN,
    /// # });
    /// let plan = planner.plan(&[Request::prefill(20, 0..20)])?;
    /// // Layer 1 of 0..=2 is entered by the prompt's last 15 rows and runs on the last 8.
    /// let mut index = Vec::new();
    /// plan.layer(1).gather_into(&mut index);
    /// assert_eq!(index, [7, 8, 9, 10, 11, 12, 13, 14]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn gather_into(&self, out: &mut Vec<u32>) {
        out.clear();
        for range in self.gather_ranges() {
            out.extend(range);
        }
    }
}
