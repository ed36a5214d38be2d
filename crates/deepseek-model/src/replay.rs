//! The decoder's side of bounded replay: which rows a step keeps, and its layers as
//! [`replay_graph`] runs them.

use std::{num::NonZeroU32, rc::Rc};

use candle_core::Tensor;
use replay_core::{
    LayerRows, LayerSchedule, Planner, PlannerConfig, ReplayLayers, ReplayPolicy, Request, RowSet,
    StepPlan, Window,
};
use replay_cuda::scatter_rows;
use replay_graph::ReplayDecoder;

use crate::{
    Config, Error, LayerStats, Result, StepRequest, StepStats,
    cache::Sequence,
    layers::{DecoderLayer, Entered, RowState, StepContext},
    rows::Rows,
};

/// Plans every step of a cache, under its one policy.
#[derive(Debug, Clone)]
pub(crate) struct ReplayPlanner {
    policy: ReplayPolicy,
    /// None under `Off`, which any model can run.
    planner: Option<Planner>,
}

impl ReplayPlanner {
    /// # Errors
    /// If the model cannot replay and the policy is not `Off`.
    pub(crate) fn new(
        config: &Config,
        policy: ReplayPolicy,
        sampled_rows: NonZeroU32,
    ) -> Result<Self> {
        if policy == ReplayPolicy::Off {
            return Ok(Self {
                policy,
                planner: None,
            });
        }
        let planner = Planner::new(PlannerConfig {
            window: Window::new(config.sliding_window as u32)?,
            layers: replay_layers(config)?,
            policy,
            sampled_rows,
        });
        Ok(Self {
            policy,
            planner: Some(planner),
        })
    }

    pub(crate) fn policy(&self) -> ReplayPolicy {
        self.policy
    }

    /// The first position of the prefill chunk `start..end` whose output is sure to be there; `end`
    /// if none is.
    pub(crate) fn first_output(&self, start: usize, end: usize, prompt_len: usize) -> usize {
        let Some(planner) = &self.planner else {
            return start;
        };
        let config = planner.config();
        let sampled = config.sampled_rows.get() as usize;
        let kept = sampled.max(config.window.get() as usize);
        let first = match self.policy {
            ReplayPolicy::Off => start,
            ReplayPolicy::StepTail => end.saturating_sub(kept),
            ReplayPolicy::PromptTail => prompt_len.saturating_sub(kept),
            ReplayPolicy::Exact => prompt_len.saturating_sub(sampled),
        };
        first.clamp(start, end)
    }

    /// The plan of a step, and the model's layer it starts at; `None` under `Off`.
    pub(crate) fn plan(
        &self,
        requests: &[StepRequest<'_>],
        sequences: &[&Sequence],
    ) -> Result<Option<Replay>> {
        let Some(planner) = &self.planner else {
            return Ok(None);
        };
        let requests: Vec<_> = requests
            .iter()
            .zip(sequences)
            .map(|(request, sequence)| Request {
                query_len: request.tokens.len() as u32,
                seq_len: (sequence.len + request.tokens.len()) as u32,
                prompt_len: sequence.options.prompt_len as u32,
                replay_start: 0,
                prefilling: sequence.len < sequence.options.prompt_len,
                keeps_rows: sequence.options.keeps_rows,
            })
            .collect();
        let first_layer = planner.config().layers.first() as usize;
        Ok(Some(Replay {
            plan: planner.plan(&requests)?,
            first_layer,
        }))
    }
}

/// Where replay starts in this model.
///
/// # Errors
/// The one reason why it cannot.
fn replay_layers(config: &Config) -> Result<ReplayLayers> {
    let ids = |has: fn(usize, &crate::config::LayerSchedule) -> bool| -> Vec<u32> {
        let layers = config.layers.iter().enumerate();
        layers
            .filter(|(i, layer)| has(*i, layer))
            .map(|(i, _)| i as u32)
            .collect()
    };
    let ratios: Vec<u32> = config
        .layers
        .iter()
        .map(|layer| layer.ratio as u32)
        .collect();
    Ok(ReplayLayers::from_schedule(&LayerSchedule {
        num_layers: config.layers.len() as u32,
        kv_sources: &ids(|i, layer| layer.kv_source == Some(i)),
        compress_ratios: &ratios,
        engram_layers: &ids(|_, layer| layer.engram.is_some()),
    })?)
}

/// A step's plan.
#[derive(Debug)]
pub(crate) struct Replay {
    plan: StepPlan,
    first_layer: usize,
}

impl Replay {
    /// The model's layer that is replay layer 0.
    pub(crate) fn first_layer(&self) -> usize {
        self.first_layer
    }

    /// Runs the replay layers and `finish` on the rows they leave, and puts the result `[rows, h]`
    /// back at its rows of the batch; zero elsewhere.
    pub(crate) fn run(
        &self,
        layers: &[DecoderLayer],
        ctx: &StepContext<'_>,
        state: RowState,
        all: Rc<Rows>,
        stats: &mut StepStats,
        finish: impl FnOnce(&RowState) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let n_rows = all.len();
        let h = ctx.config.hidden_size;
        let (dtype, device) = (state.streams.dtype(), state.streams.device().clone());
        let mut decoder = ReplayPart {
            layers,
            ctx,
            entering: all,
            stats,
        };
        let left = replay_graph::run_replay_layers(&mut decoder, &self.plan, state)?;
        // Layers that no row reached.
        let none = vec![0; stats.query_rows.len()];
        stats.layers.resize(
            ctx.config.layers.len(),
            LayerStats {
                written: none.clone(),
                run: none,
            },
        );
        let Some(state) = left else {
            return Ok(Tensor::zeros((n_rows, h), dtype, &device)?);
        };
        let hidden = finish(&state)?;
        let output = self.plan.output_rows();
        if output.is_whole() {
            return Ok(hidden);
        }
        let rows: Vec<u32> = output.indices().map(replay_core::RowIdx::get).collect();
        Ok(scatter_rows(&hidden, &rows, n_rows)?)
    }
}

/// The model's replay layers, with the rows in flight.
struct ReplayPart<'a> {
    layers: &'a [DecoderLayer],
    ctx: &'a StepContext<'a>,
    /// Rows that enter the next layer.
    entering: Rc<Rows>,
    stats: &'a mut StepStats,
}

impl ReplayDecoder for ReplayPart<'_> {
    type State = RowState;
    type Entered = Entered;
    type Error = Error;

    fn enter(&mut self, layer: u32, state: RowState, _: &LayerRows<'_>) -> Result<Entered> {
        self.layers[layer as usize].enter(self.ctx, state, &self.entering)
    }

    fn gather(&mut self, entered: Entered, index: &[u32]) -> Result<Entered> {
        entered.gather(index)
    }

    fn run(&mut self, layer: u32, entered: Entered, rows: &LayerRows<'_>) -> Result<RowState> {
        let running = if rows.drops() {
            Rc::new(subset(&self.entering, &rows.running))
        } else {
            self.entering.clone()
        };
        let entering = std::mem::replace(&mut self.entering, running);
        self.stats.layers.push(LayerStats {
            written: entering.counts(),
            run: self.entering.counts(),
        });
        self.layers[layer as usize].run(self.ctx, entered, &entering, &self.entering, rows.kv_start)
    }

    fn skip(&mut self, layer: u32, entered: Entered, _: &LayerRows<'_>) -> Result<()> {
        self.stats.layers.push(LayerStats {
            written: self.entering.counts(),
            run: vec![0; self.entering.spans().len()],
        });
        self.layers[layer as usize].skip(self.ctx, &entered.kv, &self.entering)
    }
}

/// The rows of `set`, which are the last of each request's rows in `outer`.
fn subset(outer: &Rows, set: &RowSet<'_>) -> Rows {
    Rows::pack(
        outer.device(),
        outer.spans().iter().enumerate().map(|(request, span)| {
            let kept = set.n_rows_of(request).get() as usize;
            (span.slot, span.end_pos() - kept, kept)
        }),
    )
}
