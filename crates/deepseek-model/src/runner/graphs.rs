//! Whole steps as graphs, by their rows.

use std::{rc::Rc, sync::Arc};

use candle_core::{Device, Tensor};
use replay_core::{CaptureSizes, GraphMode, ReplayPlan, RowCount, StepPlan};
use replay_graph::{CacheConfig, CaptureMode, CaptureReport, Error as GraphError, GraphCache};

use super::{StepMode, layout::Limits, program::Program, replay::BreakStep};
use crate::{
    KvCache, Model, Result, StepOutput, StepRequest,
    cache::PageLists,
    forward::{read_rows, select},
    profile::Profile,
    replay::{Replay, ReplayPlanner, stats},
};

/// Graphs of steps in one mode.
pub(super) struct StepGraphs {
    // Dropped first: they read what comes after them.
    graphs: GraphCache<Tensor, BreakStep>,
    program: Program,
    mode: CaptureMode,
    planner: ReplayPlanner,
    device: Device,
    /// Tokens of the longest sequence.
    longest: usize,
}

impl StepGraphs {
    pub(super) fn new(
        model: &Arc<Model>,
        cache: &KvCache,
        (mode, sizes, limits): (CaptureMode, CaptureSizes, Limits),
        planner: ReplayPlanner,
        profile: Option<Rc<Profile>>,
    ) -> Result<Self> {
        let device = model.device().clone();
        let mut config = CacheConfig::default().max_graphs(usize::MAX);
        config.knob = "the capture sizes, or the largest of them";
        let planner_of_program = match mode {
            CaptureMode::Full => None,
            CaptureMode::Piecewise => planner.planner(),
        };
        Ok(Self {
            program: Program::new(
                model,
                cache,
                limits,
                planner_of_program,
                (config.clone(), profile),
            )?,
            graphs: GraphCache::new(sizes, config),
            mode,
            planner,
            device,
            longest: limits.tokens,
        })
    }

    pub(super) fn mode(&self) -> CaptureMode {
        self.mode
    }

    /// The graphs that there are, and the memory that they took.
    pub(super) fn captured(&self) -> CaptureReport {
        self.graphs.captured().plus(self.program.captured_replay())
    }

    /// How many graphs there will be.
    pub(super) fn count(&self) -> usize {
        self.graphs.sizes().as_slice().len() + self.program.replay_sizes()
    }

    /// Captures all sizes, those of the replay layers first: a step that finds its graph finds
    /// theirs. The captured runs have pad rows only, so they write to no slot. After an error none is
    /// left, of the replay layers neither.
    pub(super) fn capture(&mut self, mut done: impl FnMut()) -> Result<CaptureReport> {
        let report = self.try_capture(&mut done);
        if report.is_err() {
            // The graphs are gone even if a driver that has just failed fails at returning their
            // memory; why the capture failed is what matters.
            let _ = self.graphs.clear(&self.device);
            let _ = self.program.clear_replay();
        }
        report
    }

    fn try_capture(&mut self, done: &mut impl FnMut()) -> Result<CaptureReport> {
        let program = &self.program;
        program.lists.borrow_mut().clear()?;
        let report = program.capture_replay(&mut *done)?;
        // The break of a pass over pad rows has no row to keep.
        let padded_rows = self.graphs.sizes().largest();
        let mut step = BreakStep {
            plan: match self
                .planner
                .plan(GraphMode::Piecewise { padded_rows }, &[], &[])?
            {
                Some(replay) => replay.plan,
                None => StepPlan::new(),
            },
            rows: Rc::new(program.model().pack(&[], &[])),
            ahead: None,
        };
        let whole = self.graphs.capture_all(
            &self.device,
            &[(self.mode, ())],
            &mut step,
            |descriptor, scope| {
                let output = program.run(scope, descriptor.rows);
                output.map_err(GraphError::program)
            },
            |_| done(),
        )?;
        Ok(report.plus(whole))
    }

    /// Whether a graph holds the step. Of a sequence that is not there it says no.
    pub(super) fn takes(&self, cache: &KvCache, requests: &[StepRequest<'_>]) -> bool {
        let fits = |request: &StepRequest<'_>| {
            let (sequence, n) = (cache.sequences.get(request.sequence), request.tokens.len());
            sequence.is_ok_and(|sequence| {
                let decodes = n == 1 && sequence.len >= sequence.options.prompt_len;
                sequence.len.saturating_add(n) <= self.longest
                    && (decodes || self.mode == CaptureMode::Piecewise)
            })
        };
        let rows: usize = requests.iter().map(|request| request.tokens.len()).sum();
        let Ok(rows) = u32::try_from(rows) else {
            return false;
        };
        let descriptor = self.graphs.descriptor(RowCount::new(rows), self.mode, ());
        descriptor.is_some_and(|descriptor| self.graphs.contains(&descriptor))
            && requests.iter().all(fits)
    }

    /// Runs a step that it [takes](Self::takes), which was checked.
    pub(super) fn run(
        &mut self,
        model: &Model,
        cache: &KvCache,
        requests: &[StepRequest<'_>],
    ) -> Result<(StepOutput, StepMode)> {
        let sequences: Vec<_> = requests
            .iter()
            .map(|r| cache.sequences.get(r.sequence))
            .collect::<Result<_, _>>()?;
        let rows = Rc::new(model.pack(requests, &sequences));
        let n_rows = RowCount::new(rows.len() as u32);
        let descriptor = self.graphs.descriptor(n_rows, self.mode, ());
        let padded_rows = descriptor.expect("the step has a graph").rows;
        let mode = match self.mode {
            CaptureMode::Full => GraphMode::Full { padded_rows },
            CaptureMode::Piecewise => GraphMode::Piecewise { padded_rows },
        };
        let replay = self.planner.plan(mode, requests, &sequences)?;
        let stats = stats(&rows, model.config().layers.len(), replay.as_ref());

        let tokens: Vec<u32> = requests.iter().flat_map(|r| r.tokens).copied().collect();
        let pages = PageLists::new(sequences.iter().map(|s| s.pages.as_slice()));
        let kv_start: Vec<u32> = sequences.iter().map(|s| s.kv_start as u32).collect();
        let mut kv_starts: Vec<&[u32]> = vec![&kv_start];
        // Rows of decode read all that their window holds.
        if let (Some(replay), CaptureMode::Piecewise) = (&replay, self.mode) {
            kv_starts.extend(replay.plan.layers().map(|rows| rows.kv_start));
        }
        let mut lists = self.program.lists.borrow_mut();
        lists.write(&tokens, &rows, &pages, &kv_starts)?;
        drop(lists);
        self.program
            .write_engram(&model.engram_values(requests, &sequences)?)?;

        let mode = self.step_mode(padded_rows, replay.as_ref());
        let mut step = BreakStep {
            plan: replay.map(|replay| replay.plan).unwrap_or_default(),
            rows: rows.clone(),
            ahead: None,
        };
        self.program.upload_ahead(&mut step)?;
        let graph = self.graphs.get(n_rows, self.mode, ());
        let output = graph
            .expect("the step has a graph")
            .launch_with(&mut step)?;
        let (read, ranges) = read_rows(requests, &rows);
        let read = select(output, &read)?;
        let logits = match self.mode {
            CaptureMode::Full => read,
            CaptureMode::Piecewise => self.program.logits(&read)?,
        };
        let output = StepOutput {
            logits,
            ranges,
            stats,
        };
        Ok((output, mode))
    }

    fn step_mode(&self, padded_rows: RowCount, replay: Option<&Replay>) -> StepMode {
        let padded_rows = padded_rows.as_usize();
        match self.mode {
            CaptureMode::Full => StepMode::Full { padded_rows },
            CaptureMode::Piecewise => StepMode::Piecewise {
                padded_rows,
                broke: replay.and_then(|replay| match replay.plan.decision() {
                    ReplayPlan::BreakOut(batch) => Some(batch.launch),
                    ReplayPlan::WholeBatch | ReplayPlan::EagerTrim(_) => None,
                }),
            },
        }
    }
}

impl std::fmt::Debug for StepGraphs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StepGraphs")
            .field("mode", &self.mode)
            .field("graphs", &self.graphs)
            .finish_non_exhaustive()
    }
}
