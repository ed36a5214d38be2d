//! What every layer of a step reads.

use candle_core::{Device, Tensor};
use replay_core::Window;

use crate::{
    Config, Result,
    cache::{LayerCache, PageLists},
    ops::{Act, FaultWord, Faults, RopeFrequencies, Rounding, Site},
    profile::{Mark, Profile},
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
    pub(crate) pages: PageLists<'a>,
    /// Where a device reports values that are no numbers.
    pub(crate) faults: Option<&'a FaultWord>,
    pub(crate) device: &'a Device,
    /// Looked-up values of each engram table, `[rows, columns · head_dim]`.
    pub(crate) engram: Vec<Tensor>,
    pub(crate) observer: Option<Observer<'a>>,
    pub(crate) profile: Option<&'a Profile>,
}

impl StepContext<'_> {
    /// The cache format, unless rounding is switched off.
    pub(crate) fn rounding(&self, format: Rounding) -> Option<Rounding> {
        self.round_cache.then_some(format)
    }

    /// Where a kernel of a layer reports.
    pub(crate) fn faults(&self, layer: usize, site: Site) -> Faults<'_> {
        Faults::new(self.faults, layer, site)
    }

    /// Marks the end of a phase, if the step is profiled.
    pub(crate) fn mark(&self, mark: Mark) -> Result<()> {
        match self.profile {
            Some(profile) => Ok(profile.mark(mark)?),
            None => Ok(()),
        }
    }

    /// Shows a tensor to the observer, if there is one.
    pub(crate) fn note(&self, name: impl FnOnce() -> String, tensor: &Tensor) {
        if let Some(observer) = self.observer {
            observer(&name(), tensor);
        }
    }
}
