//! Which rows a prompt will run, before it does.

use std::num::NonZeroU32;

use anyhow::Result;
use deepseek_model::{Config, LayerStats, ReplayPolicy, StepMode, StepStats};
use replay_core::{Planner, PlannerConfig, Request, RowSet, Window};

use super::cost::{Cost, Phases, Step};

/// Of each chunk of a prompt that runs eagerly: rows of each layer.
pub(crate) fn chunks(
    config: &Config,
    policy: ReplayPolicy,
    length: usize,
    chunk: usize,
) -> Result<Vec<StepStats>> {
    let planner = Planner::new(PlannerConfig {
        window: Window::new(config.sliding_window as u32)?,
        layers: config.replay_layers()?,
        policy,
        sampled_rows: NonZeroU32::MIN,
    });
    let layers = config.layers.len();
    let first = planner.config().layers.first() as usize;
    let starts = (0..length).step_by(chunk);
    let stats = starts.map(|start| {
        let rows = chunk.min(length - start);
        let positions = start as u32..(start + rows) as u32;
        let plan = planner.plan(&[Request::prefill(length as u32, positions)])?;
        let whole = LayerStats {
            written: vec![rows],
            run: vec![rows],
        };
        let count = |rows: &RowSet<'_>| vec![rows.n_rows().as_usize()];
        let mut of_layers = vec![whole; first];
        of_layers.extend(plan.layers().map(|rows| LayerStats {
            written: count(&rows.entering),
            run: count(&rows.running),
        }));
        of_layers.truncate(layers);
        Ok(StepStats {
            query_rows: vec![rows],
            layers: of_layers,
        })
    });
    stats.collect()
}

/// Work of such a prompt.
pub(crate) fn work(
    cost: &Cost,
    config: &Config,
    policy: ReplayPolicy,
    (length, chunk): (usize, usize),
) -> Result<Phases> {
    let mut all = Phases::default();
    for (i, stats) in chunks(config, policy, length, chunk)?.iter().enumerate() {
        let start = i * chunk;
        let phases = cost.step(&Step {
            starts: &[start],
            stats,
            read: usize::from(start + chunk >= length),
            mode: StepMode::Eager,
        });
        for (all, phase) in all.iter_mut().zip(phases) {
            *all += phase;
        }
    }
    Ok(all)
}
