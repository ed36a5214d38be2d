//! The decoder's side of bounded replay: which rows a step keeps, and its layers as
//! [`replay_graph`] runs them.

mod walk;

use std::num::NonZeroU32;

use replay_core::{
    CaptureSizes, GraphMode, LayerSchedule, Planner, PlannerConfig, ReplayLayers, ReplayPolicy,
    Request, StepPlan, Unsupported, Window,
};

pub(crate) use walk::{resume, run_replay, subset};

use crate::{Config, LayerStats, Result, StepRequest, StepStats, cache::Sequence, rows::Rows};

/// Plans every step of a cache, under its one policy.
#[derive(Debug, Clone)]
pub(crate) struct ReplayPlanner {
    policy: ReplayPolicy,
    /// Rows at the end of a prompt that are sure to be right.
    sampled_rows: NonZeroU32,
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
                sampled_rows,
                planner: None,
            });
        }
        let planner = Planner::new(PlannerConfig {
            window: Window::new(config.sliding_window as u32)?,
            layers: config.replay_layers()?,
            policy,
            sampled_rows,
        });
        Ok(Self {
            policy,
            sampled_rows,
            planner: Some(planner),
        })
    }

    pub(crate) fn policy(&self) -> ReplayPolicy {
        self.policy
    }

    /// How many rows at the end of a prompt may be read; `None` for all. A bounded policy keeps more,
    /// a window of them: for the window KV, and with results of their own that lack what was dropped
    /// before them.
    pub(crate) fn readable_rows(&self) -> Option<usize> {
        self.planner.as_ref().map(|_| self.sampled_rows())
    }

    /// How many rows at the end of a prompt are right under every policy, and whatever was found in
    /// the cache.
    pub(crate) fn sampled_rows(&self) -> usize {
        self.sampled_rows.get() as usize
    }

    /// The first row of a prompt that runs in the layer at the cut; 0 under `Off`.
    pub(crate) fn first_row_of_cut(&self, prompt_len: usize) -> usize {
        let rows = self.planner.as_ref().and_then(|p| p.tail_rows(0));
        rows.map_or(0, |rows| prompt_len.saturating_sub(rows.as_usize()))
    }

    /// The same, with graphs of these sizes for the replay layers (none: they run eagerly), and
    /// breaks in graphs of at least so many rows.
    ///
    /// # Errors
    /// If the threshold is not above the window.
    pub(crate) fn for_graphs(
        &self,
        sizes: Option<CaptureSizes>,
        threshold: Option<u32>,
    ) -> Result<Self> {
        let mut planner = self.planner.clone();
        if let Some(threshold) = threshold {
            planner = planner
                .map(|planner| planner.with_trim_threshold(threshold))
                .transpose()?;
        }
        if let Some(sizes) = sizes {
            planner = planner.map(|planner| planner.with_capture_sizes(sizes));
        }
        Ok(Self {
            policy: self.policy,
            sampled_rows: self.sampled_rows,
            planner,
        })
    }

    /// What plans; `None` under `Off`.
    pub(crate) fn planner(&self) -> Option<&Planner> {
        self.planner.as_ref()
    }

    /// The plan of a step that runs in `mode`; `None` under `Off`.
    pub(crate) fn plan(
        &self,
        mode: GraphMode,
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
                replay_start: sequence.kv_start as u32,
                prefilling: sequence.len < sequence.options.prompt_len,
                keeps_rows: sequence.options.keeps_rows,
            })
            .collect();
        let mut plan = StepPlan::new();
        planner.plan_step(mode, &requests, &mut plan)?;
        Ok(Some(Replay {
            plan,
            first_layer: planner.config().layers.first() as usize,
        }))
    }
}

/// The model's layer that is replay layer 0, of a model that can replay.
pub(crate) fn first_layer(config: &Config) -> Option<usize> {
    let layers = config.replay_layers().ok()?;
    Some(layers.first() as usize)
}

impl Config {
    /// Where replay starts in this model, and the way from here to `replay_core`'s planner, for
    /// whoever plans the steps of an engine of their own:
    ///
    /// ```
    /// use std::num::NonZeroU32;
    ///
    /// use deepseek_model::{Config, ReplayPolicy};
    /// use replay_core::{Planner, PlannerConfig, Request, Window};
    ///
    /// let config = Config::load("tests/data/bf16-s1".as_ref())?;
    /// let planner = Planner::new(PlannerConfig {
    ///     window: Window::new(config.sliding_window as u32)?,
    ///     layers: config.replay_layers()?,
    ///     policy: ReplayPolicy::PromptTail,
    ///     sampled_rows: NonZeroU32::MIN,
    /// });
    /// let plan = planner.plan(&[Request::prefill(80, 0..80)])?;
    /// assert_eq!(plan.layer(0).running.n_rows().get(), 8); // the window
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The one reason why the model cannot replay.
    pub fn replay_layers(&self) -> Result<ReplayLayers, Unsupported> {
        let ids = |has: fn(usize, &crate::config::LayerSchedule) -> bool| -> Vec<u32> {
            let layers = self.layers.iter().enumerate();
            layers
                .filter(|(i, layer)| has(*i, layer))
                .map(|(i, _)| i as u32)
                .collect()
        };
        // A number that was changed to no u32 must not become another that replays.
        let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let ratios = self.layers.iter().map(|layer| number(layer.ratio));
        ReplayLayers::from_schedule(&LayerSchedule {
            num_layers: number(self.layers.len()),
            kv_sources: &ids(|i, layer| layer.kv_source == Some(i)),
            compress_ratios: &ratios.collect::<Vec<_>>(),
            engram_layers: &ids(|_, layer| layer.engram.is_some()),
        })
    }
}

/// A step's plan.
#[derive(Debug)]
pub(crate) struct Replay {
    pub(crate) plan: StepPlan,
    /// The model's layer that is replay layer 0.
    pub(crate) first_layer: usize,
}

/// How many rows each of `layers` layers runs in a step of these rows.
pub(crate) fn stats(all: &Rows, layers: usize, replay: Option<&Replay>) -> StepStats {
    let query_rows = all.counts();
    let whole = LayerStats {
        written: query_rows.clone(),
        run: query_rows.clone(),
    };
    let Some(replay) = replay else {
        return StepStats {
            query_rows,
            layers: vec![whole; layers],
        };
    };
    let requests = query_rows.len();
    let counts = |rows: &replay_core::RowSet<'_>| {
        let count = |request| rows.n_rows_of(request).as_usize();
        (0..requests).map(count).collect()
    };
    let mut layers = vec![whole; replay.first_layer];
    layers.extend(replay.plan.layers().map(|rows| LayerStats {
        written: counts(&rows.entering),
        run: counts(&rows.running),
    }));
    StepStats { query_rows, layers }
}
