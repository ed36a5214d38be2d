//! Where replay may start in a model, or the one reason why it may not.

/// The facts of a model's layers that decide whether it can replay, under the names of its
/// configuration. Layers count from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSchedule<'a> {
    /// `num_hidden_layers`.
    pub num_layers: u32,
    /// `kv_source_layer_ids`: the layers that write compressed KV, in the order of the layers.
    pub kv_sources: &'a [u32],
    /// `compress_ratios`: rows per compressed KV entry of each layer; a layer past the list has 0.
    pub compress_ratios: &'a [u32],
    /// `engram_layer_ids`: the layers that add an n-gram memory to the residual streams.
    pub engram_layers: &'a [u32],
}

/// The replay layers of a model: the *cut*, which is the last KV source, and every layer after it.
///
/// ```
/// use replay_core::{LayerSchedule, ReplayLayers};
///
/// let mut ratios = [0; 40];
/// ratios[20] = 1;
/// let layers = ReplayLayers::from_schedule(&LayerSchedule {
///     num_layers: 40,
///     kv_sources: &[2, 8, 14, 20],
///     compress_ratios: &ratios,
///     engram_layers: &[1, 6],
/// })?;
/// assert_eq!((layers.first(), layers.count(), layers.depth()), (20, 20, 19));
/// # Ok::<(), replay_core::Unsupported>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReplayLayers {
    first: u32,
    depth: u32,
}

impl ReplayLayers {
    /// Layers of a model at most: far above any model's, and few enough to plan each by itself.
    pub const MAX_MODEL_LAYERS: u32 = 4096;

    /// Finds the cut.
    ///
    /// Past the cut a row is touched by other rows through window attention alone, which is what
    /// lets rows be dropped. Each reason for a refusal breaks that premise, or leaves no layer for
    /// which it would pay.
    ///
    /// # Errors
    ///
    /// The first [`Unsupported`] reason that holds, in the order of the variants.
    pub fn from_schedule(schedule: &LayerSchedule<'_>) -> Result<Self, Unsupported> {
        let num_layers = schedule.num_layers;
        let &cut = schedule.kv_sources.last().ok_or(Unsupported::NoKvSource)?;
        let from = |layers: &[u32], bound: u32| layers.iter().copied().find(|&l| l >= bound);

        if let Some(layer) = from(schedule.kv_sources, num_layers) {
            return Err(Unsupported::SourceOutOfRange { layer, num_layers });
        }
        if let Some(layer) = from(schedule.kv_sources, cut + 1) {
            return Err(Unsupported::SourceAfterCut { cut, layer });
        }
        if cut == 0 {
            return Err(Unsupported::CutIsFirstLayer);
        }
        if cut + 1 == num_layers {
            return Err(Unsupported::CutIsLastLayer { cut });
        }
        if let Some(layer) = from(schedule.engram_layers, cut) {
            return Err(Unsupported::EngramAfterCut { cut, layer });
        }
        match schedule.compress_ratios.get(cut as usize) {
            Some(&ratio) if ratio > 1 => Err(Unsupported::CutCompresses { cut, ratio }),
            _ if num_layers > Self::MAX_MODEL_LAYERS => {
                Err(Unsupported::TooManyLayers { num_layers })
            }
            _ => Ok(Self {
                first: cut,
                depth: num_layers - 1 - cut,
            }),
        }
    }

    /// The cut: index in the model of the first replay layer.
    pub const fn first(self) -> u32 {
        self.first
    }

    /// Number of replay layers, the cut among them; at least 2.
    pub const fn count(self) -> u32 {
        self.depth + 1
    }

    /// `D`: number of layers after the cut; at least 1.
    pub const fn depth(self) -> u32 {
        self.depth
    }
}

/// Why a model cannot replay. Exactly one reason is given, with the facts it rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unsupported {
    /// No layer writes the long-range KV, so there is no layer to cut at.
    #[error("no replay: the model has no KV-source layer")]
    NoKvSource,
    /// The list of sources names a layer that the model lacks.
    #[error("no replay: KV source {layer} is not one of the {num_layers} layers")]
    SourceOutOfRange {
        /// The layer named as a source.
        layer: u32,
        /// Layers of the model.
        num_layers: u32,
    },
    /// A layer past the last listed source is a source too: it writes long-range KV from every row,
    /// so no row may be missing before it.
    #[error("no replay: layer {layer} is a KV source but comes after {cut}, the last one listed")]
    SourceAfterCut {
        /// The last source listed.
        cut: u32,
        /// The source past it.
        layer: u32,
    },
    /// The cut is layer 0, so every layer would be a replay layer and rows would be dropped before
    /// any layer has seen them.
    #[error("no replay: the last KV source is layer 0, before which no layer reads the prompt")]
    CutIsFirstLayer,
    /// No layer follows the cut, so nothing would be saved.
    #[error("no replay: the last KV source is layer {cut}, the last of the model")]
    CutIsLastLayer {
        /// The last source.
        cut: u32,
    },
    /// An n-gram memory at or past the cut mixes neighbouring rows outside the window attention.
    #[error("no replay: engram layer {layer} is not before the last KV source, layer {cut}")]
    EngramAfterCut {
        /// The last source.
        cut: u32,
        /// The engram layer.
        layer: u32,
    },
    /// The last source folds several rows into one entry, so entries depend on where chunks end.
    #[error("no replay: the last KV source, layer {cut}, compresses {ratio} rows into one entry")]
    CutCompresses {
        /// The last source.
        cut: u32,
        /// Rows per compressed entry.
        ratio: u32,
    },
    /// More layers than are planned one by one.
    #[error(
        "no replay: expected at most {} layers, got {num_layers}",
        ReplayLayers::MAX_MODEL_LAYERS
    )]
    TooManyLayers {
        /// Layers of the model.
        num_layers: u32,
    },
}
