//! What every layer of a step reads.

use candle_core::Tensor;
use replay_core::Window;

use crate::{
    Config,
    cache::LayerCache,
    ops::{Act, RopeFrequencies, Rounding},
};

/// Receives intermediate tensors by name, such as `layers.3.attn_out`.
pub type Observer<'a> = &'a (dyn Fn(&str, &Tensor) + Sync);

/// The surroundings of a layer in one step.
pub(crate) struct StepContext<'a> {
    pub(crate) config: &'a Config,
    pub(crate) act: Act,
    pub(crate) window: Window,
    /// Whether cached values are rounded as the released cache stores them.
    pub(crate) round_cache: bool,
    /// `[window-only, compressed]`.
    pub(crate) frequencies: &'a [RopeFrequencies; 2],
    /// Cache storage of every layer.
    pub(crate) layers: &'a [LayerCache],
    /// Pages of each request's compressed entries.
    pub(crate) pages: Vec<&'a [u32]>,
    /// Table rows `[rows, columns]` of each engram table, row-major.
    pub(crate) table_rows: Vec<Vec<i64>>,
    pub(crate) observer: Option<Observer<'a>>,
}

impl StepContext<'_> {
    /// The cache format, unless rounding is switched off.
    pub(crate) fn rounding(&self, format: Rounding) -> Option<Rounding> {
        self.round_cache.then_some(format)
    }

    /// Shows a tensor to the observer, if there is one.
    pub(crate) fn note(&self, name: impl FnOnce() -> String, tensor: &Tensor) {
        if let Some(observer) = self.observer {
            observer(&name(), tensor);
        }
    }
}
