//! What is asked of a runner, and what it says of a step.

use replay_core::ReplayLaunch;
use replay_graph::CaptureMode;

/// Which steps run in CUDA graphs. Others run eagerly, and so does everything on a CPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Graphs {
    /// None.
    Off,
    /// Steps in which every request decodes one token: one graph around the whole forward, padded to
    /// the next captured number of rows.
    Full,
    /// Steps of any requests, up to the largest captured number of rows. Where such a graph has as
    /// many rows as the trim threshold says, it breaks at the cut: the replay layers run on the
    /// rows that are kept, in graphs of their own or eagerly. A smaller one drops no row.
    Piecewise,
    /// Decode steps as under [`Self::Full`], others as under [`Self::Piecewise`].
    #[default]
    FullAndPiecewise,
}

impl Graphs {
    pub(crate) fn has(self, mode: CaptureMode) -> bool {
        match mode {
            CaptureMode::Full => matches!(self, Self::Full | Self::FullAndPiecewise),
            CaptureMode::Piecewise => matches!(self, Self::Piecewise | Self::FullAndPiecewise),
        }
    }
}

/// Numbers of rows that the replay layers are captured for, to be launched in a break.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ReplaySizes {
    /// [`CaptureSizes::ladder`](replay_core::CaptureSizes::ladder) up to a window for each sequence,
    /// or the largest graph.
    #[default]
    Ladder,
    /// None: the layers run eagerly, on exactly the rows that are kept.
    Eager,
    /// These.
    Of(Vec<u32>),
}

/// How a [`Runner`](crate::Runner) runs steps.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RunnerOptions {
    /// Which steps run in CUDA graphs.
    pub graphs: Graphs,
    /// Numbers of rows that graphs are captured for; decode graphs for those of them that are needed
    /// to hold a row for each sequence. Empty: for decode the powers of two and the most sequences of
    /// the cache; for other steps the powers of two below the window, and from there on steps of a
    /// window or an eighth.
    pub capture_sizes: Vec<u32>,
    /// Numbers of rows that the replay layers are captured for; none are where no graph breaks.
    pub replay_sizes: ReplaySizes,
    /// From how many rows on a graph of a step breaks at the cut, above the window; six windows if
    /// not given.
    pub trim_threshold: Option<u32>,
    /// Rows of the largest graph of a step; if not given, the largest of `capture_sizes`, or 2,048
    /// and no more than the cache has tokens.
    pub max_captured_tokens: Option<u32>,
    /// Tokens of the longest sequence whose steps run in graphs: page tables and index scores of graphs
    /// are sized for it, and steps of longer sequences run eagerly. If not given, as many as one
    /// sequence can have of the cache and of the model's positions.
    pub max_sequence_tokens: Option<usize>,
    /// Whether to mark the phases of each step, for [`Runner::profile`](crate::Runner::profile). Costs
    /// some microseconds a step.
    pub profile: bool,
}

impl RunnerOptions {
    /// Rows of the largest graph unless the options say otherwise: longer chunks take so long that
    /// launches cost them next to nothing.
    pub const MAX_CAPTURED_TOKENS: u32 = 2048;
}

/// How a step ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StepMode {
    /// Operation by operation.
    Eager,
    /// A decode step in one graph.
    Full {
        /// Rows of the graph.
        padded_rows: usize,
    },
    /// In a graph that may break at the cut.
    Piecewise {
        /// Rows of the graph.
        padded_rows: usize,
        /// If it broke, how the replay layers ran.
        broke: Option<ReplayLaunch>,
    },
}
