//! How a capture is to be done.

use crate::FixedBuffers;

/// What happens at a break.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CaptureMode {
    /// The segment ends, the break runs eagerly at each launch, and another segment begins.
    #[default]
    Piecewise,
    /// The break is captured like all else: one segment, and what the break decides is decided once,
    /// at capture.
    Full,
}

/// How a capture is to be done.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CaptureOptions {
    /// What happens at breaks.
    pub mode: CaptureMode,
    /// What errors call the graph.
    pub label: String,
    /// What an error tells to lower when memory runs out.
    pub knob: &'static str,
    /// Runs the program once eagerly first, so that kernels are loaded and small constants uploaded.
    /// Needed unless the same program has just run on this thread with these options.
    pub warm_up: bool,
    /// Compares, at each launch, the addresses of what breaks give with those at capture. On by
    /// default, in release builds too: for each tensor it takes a look at its storage, where uses are
    /// tracked by events one event, and a comparison.
    /// Without it a tensor that has moved goes unnoticed, and later segments read stale memory.
    pub check_addresses: bool,
    /// Buffers that break outputs may lie in, beside those that [`Scope::fixed`] is told of.
    ///
    /// [`Scope::fixed`]: crate::Scope::fixed
    pub buffers: Vec<FixedBuffers>,
}

impl CaptureOptions {
    /// The defaults, for a graph that errors call `label`.
    pub fn new(label: impl Into<String>) -> Self {
        Self {
            mode: CaptureMode::default(),
            label: label.into(),
            knob: "the number of rows that graphs are captured for",
            warm_up: true,
            check_addresses: true,
            buffers: Vec::new(),
        }
    }

    /// Sets what happens at breaks.
    #[must_use]
    pub fn mode(mut self, mode: CaptureMode) -> Self {
        self.mode = mode;
        self
    }

    /// Lets break outputs lie in these buffers.
    #[must_use]
    pub fn buffers(mut self, buffers: &FixedBuffers) -> Self {
        self.buffers.push(buffers.clone());
        self
    }
}

impl Default for CaptureOptions {
    fn default() -> Self {
        Self::new("graph")
    }
}
