//! Planners of small models.

use std::num::NonZeroU32;

use replay_core::{LayerSchedule, Planner, PlannerConfig, ReplayLayers, ReplayPolicy, Window};

/// Replay layers of a model whose cut is layer 3, with `depth` layers after it.
pub(crate) fn layers(depth: u32) -> ReplayLayers {
    ReplayLayers::from_schedule(&LayerSchedule {
        num_layers: 4 + depth,
        kv_sources: &[1, 3],
        compress_ratios: &[0, 4, 0, 1],
        engram_layers: &[0],
    })
    .expect("a model that can replay")
}

/// A planner of such a model.
pub(crate) fn planner(policy: ReplayPolicy, window: u32, depth: u32, sampled_rows: u32) -> Planner {
    Planner::new(PlannerConfig {
        window: Window::new(window).expect("a window"),
        layers: layers(depth),
        policy,
        sampled_rows: NonZeroU32::new(sampled_rows).expect("at least one sampled row"),
    })
}

/// The tiny model of the hazards: window 8, layers 3 to 5 replay, one sampled row.
pub(crate) fn tiny(policy: ReplayPolicy) -> Planner {
    planner(policy, 8, 2, 1)
}
