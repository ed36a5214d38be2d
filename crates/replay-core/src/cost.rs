//! What a prefill costs under a policy, counted in row-layers: one row through one layer.
//!
//! The count is in closed form and takes as long for a long prompt as for a short one; tests count the
//! same from plans, chunk by chunk. It says nothing of time where the cost of a row in a layer is not constant (attention grows with
//! the context, and small batches use a device badly).

use alloc::vec::Vec;
use core::num::NonZeroU32;

use crate::Planner;
use crate::tails::{Prefill, Tail};

/// The part that writing a layer's KV has in the cost of one row in that layer, from 0 to 1.
///
/// It depends on the model and the device, so it is measured: the last KV source runs that part for
/// every row, and [`Exact`](crate::ReplayPolicy::Exact) runs it for the rows that enter a layer but
/// do not run in it.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Share(f64);

impl Share {
    /// A share of `value`.
    ///
    /// # Errors
    ///
    /// [`ShareError`] when it is not from 0 to 1.
    pub fn new(value: f64) -> Result<Self, ShareError> {
        if (0.0..=1.0).contains(&value) {
            Ok(Self(value))
        } else {
            Err(ShareError { value })
        }
    }

    /// The share, from 0 to 1.
    pub const fn get(self) -> f64 {
        self.0
    }
}

/// Not a share.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("a share must be from 0 to 1, got {value}")]
pub struct ShareError {
    /// The refused number.
    pub value: f64,
}

/// The row-layers of one cold prompt's prefill.
///
/// ```
/// # use core::num::NonZeroU32;
/// # use replay_core::{LayerSchedule, Planner, PlannerConfig, ReplayLayers, ReplayPolicy, Window};
/// use replay_core::{PrefillCost, Share};
///
/// # let layers = ReplayLayers::from_schedule(&LayerSchedule {
/// #     num_layers: 40, kv_sources: &[20], compress_ratios: &[], engram_layers: &[],
/// # })?;
/// # let planner = Planner::new(PlannerConfig {
/// #     window: Window::new(128)?, layers, policy: ReplayPolicy::PromptTail, sampled_rows: NonZeroU32::MIN,
/// # });
/// // 40 layers cut at 20, a window of 128, and a prompt of 32,768 tokens in chunks of 8,192.
/// let chunk = NonZeroU32::new(8192).expect("not zero");
/// let cost = PrefillCost::of(&planner, 32_768, chunk);
/// assert_eq!(cost.row_layers_off(), 40 * 32_768);
/// assert_eq!(cost.row_layers(), 20 * 32_768 + 20 * 128);
/// assert!(cost.ratio(Share::new(0.02)?) < 0.503);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefillCost {
    prompt_len: u32,
    layers_before_cut: u32,
    layers: Vec<LayerCost>,
}

/// Rows of a whole prefill in one replay layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct LayerCost {
    entering: u64,
    running: u64,
}

impl PrefillCost {
    /// The cost of a cold prompt of `prompt_len` tokens in chunks of `chunk` tokens, the last one
    /// perhaps shorter, each planned as an eager step.
    pub fn of(planner: &Planner, prompt_len: u32, chunk: NonZeroU32) -> Self {
        let prefill = Prefill { prompt_len, chunk };
        let layers = planner.tails_in_layers().map(|(entering, running)| {
            let rows = |tail: Tail| u64::from(tail.running_before(prompt_len, prefill));
            LayerCost {
                entering: rows(entering),
                running: rows(running),
            }
        });
        Self {
            prompt_len,
            layers_before_cut: planner.config().layers.first(),
            layers: layers.collect(),
        }
    }

    /// Row-layers that run.
    pub fn row_layers(&self) -> u64 {
        let before = u64::from(self.layers_before_cut) * u64::from(self.prompt_len);
        before + self.layers.iter().map(|layer| layer.running).sum::<u64>()
    }

    /// Row-layers that would run without replay.
    pub fn row_layers_off(&self) -> u64 {
        (u64::from(self.layers_before_cut) + self.layers.len() as u64) * u64::from(self.prompt_len)
    }

    /// Row-layers of which only the KV is written.
    pub fn kv_row_layers(&self) -> u64 {
        self.layers
            .iter()
            .map(|layer| layer.entering - layer.running)
            .sum()
    }

    /// Rows that run in each replay layer, from the cut on.
    pub fn rows_per_layer(&self) -> impl ExactSizeIterator<Item = u64> {
        self.layers.iter().map(|layer| layer.running)
    }

    /// The projected prefill cost in proportion to the one without replay, 1 for an empty prompt.
    pub fn ratio(&self, kv_write: Share) -> f64 {
        if self.prompt_len == 0 {
            return 1.0;
        }
        let cost = self.row_layers() as f64 + kv_write.get() * self.kv_row_layers() as f64;
        cost / self.row_layers_off() as f64
    }
}
