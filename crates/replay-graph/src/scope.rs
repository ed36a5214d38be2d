//! What a program sees of its capture.

use crate::recorder::Recorder;
use crate::{Backend, BreakOutputs, CaptureMode, DeviceCapture, FixedBuffers, Result};

/// Lent to a program while it is captured, and while it runs before for warm-up.
///
/// It cannot leave the thread: a capture is ended where it was begun.
///
/// ```compile_fail
/// fn send<T: Send>(_: T) {}
/// fn program(scope: &mut replay_graph::Scope<'_>) {
///     send(scope);
/// }
/// ```
pub struct Scope<'s, C = (), B: Backend = DeviceCapture> {
    recorder: &'s mut Recorder<C, B>,
    context: &'s mut C,
    warm_up: bool,
}

impl<'s, C, B: Backend> Scope<'s, C, B> {
    pub(crate) fn new(recorder: &'s mut Recorder<C, B>, context: &'s mut C, warm_up: bool) -> Self {
        Self {
            recorder,
            context,
            warm_up,
        }
    }

    /// Ends the segment and launches it, runs `run` eagerly, records it for every later launch, and
    /// begins the next segment. In [`Full`](CaptureMode::Full) mode, `run` is captured like all else.
    ///
    /// What `run` needs it owns: tensors that the segments before wrote (each launch writes them
    /// anew, at the same address), and handles to fixed buffers. What changes from launch to launch
    /// comes with the context. Tensors that later segments read are written into fixed buffers and
    /// given back; what else `run` allocates is its own.
    ///
    /// # Errors
    ///
    /// What `run` fails with, as [`Error::Break`](crate::Error::Break); if an output is at a fresh
    /// address; if the segment cannot be captured or launched. The capture has failed then.
    pub fn eager_break<R: BreakOutputs>(
        &mut self,
        mut run: impl FnMut(&mut C) -> Result<R> + 'static,
    ) -> Result<R> {
        if self.warm_up {
            return self.recorder.warm_break(|| run(self.context));
        }
        match self.mode() {
            CaptureMode::Full => run(self.context),
            CaptureMode::Piecewise => self.recorder.eager_break(self.context, run),
        }
    }

    /// Lets break outputs lie in these buffers, and keeps them for as long as the graph.
    pub fn fixed(&mut self, buffers: &FixedBuffers) {
        self.recorder.pin(buffers);
    }

    /// What the caller lends to this pass.
    pub fn context(&mut self) -> &mut C {
        self.context
    }

    /// What happens at breaks.
    pub fn mode(&self) -> CaptureMode {
        self.recorder.options.mode
    }

    /// Whether this is the eager pass before the capture.
    pub const fn is_warm_up(&self) -> bool {
        self.warm_up
    }
}
