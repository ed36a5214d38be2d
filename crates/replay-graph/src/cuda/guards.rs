//! The state that a device must be in while it is captured, restored on every way out.

use std::any::Any;
use std::sync::Arc;

use candle_core::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::CudaContext;

use super::raw;

/// Holds a device in the state that captures need, from before the warm-up to after the last segment.
pub(super) struct Guards {
    /// Keeps candle's small uploads, tensor shapes and strides mostly, on the device: the warm-up
    /// fills the store and a capture finds them there. Belongs to this thread.
    _uploads: Box<dyn Any>,
    _tracking: NoEventTracking,
}

impl Guards {
    pub(super) fn set(device: &CudaDevice) -> Self {
        Self {
            _tracking: NoEventTracking::set(device.cuda_stream().context()),
            _uploads: Box::new(device.enable_cuda_graph_htod_cache()),
        }
    }
}

/// Stops cudarc from waiting on events and recording them: those of tensors made before would tie
/// the capture to work outside it.
struct NoEventTracking {
    context: Arc<CudaContext>,
    was_on: bool,
}

impl NoEventTracking {
    fn set(context: &Arc<CudaContext>) -> Self {
        let was_on = context.is_event_tracking();
        raw::set_event_tracking(context, false);
        Self {
            context: context.clone(),
            was_on,
        }
    }
}

impl Drop for NoEventTracking {
    fn drop(&mut self) {
        raw::set_event_tracking(&self.context, self.was_on);
    }
}
