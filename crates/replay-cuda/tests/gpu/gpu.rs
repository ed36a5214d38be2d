//! The GPU, lent to one test at a time.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::time::Duration;

use candle_core::cuda_backend::cudarc::driver::{CudaGraph, CudaStream, sys};
use candle_core::{CudaDevice, Device};
use std::sync::Arc;

/// The GPU, for as long as this is held.
pub(crate) struct Gpu {
    pub(crate) device: Device,
    _alone: MutexGuard<'static, ()>,
}

static ALONE: Mutex<()> = Mutex::new(());

/// The GPU with a stream of its own and without event tracking, as capture needs it.
///
/// # Panics
/// If there is no GPU: a GPU test without one has failed.
pub(crate) fn gpu() -> Gpu {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let device = DEVICE.get_or_init(|| {
        let device = new_device();
        // SAFETY: the tests use this device's one stream only.
        unsafe { cuda(&device).disable_event_tracking() };
        device
    });
    let gpu = Gpu {
        device: device.clone(),
        _alone: alone,
    };
    replay_cuda::load_kernels(&gpu.device).unwrap();
    gpu
}

/// Another device of the same GPU, with a stream of its own and event tracking on, as candle makes
/// it.
pub(crate) fn new_device() -> Device {
    Device::new_cuda_with_stream(0).expect("a GPU test needs a GPU")
}

pub(crate) fn cuda(device: &Device) -> &CudaDevice {
    device.as_cuda_device().unwrap()
}

impl Gpu {
    pub(crate) fn stream(&self) -> Arc<CudaStream> {
        cuda(&self.device).cuda_stream()
    }

    pub(crate) fn synchronize(&self) {
        self.device.synchronize().unwrap();
        // What a destructor could not report.
        self.stream().context().check_err().unwrap();
    }

    /// Captures what `body` queues.
    pub(crate) fn capture(&self, body: impl FnOnce()) -> CudaGraph {
        capture(&self.stream(), body)
    }
}

pub(crate) fn capture(stream: &Arc<CudaStream>, body: impl FnOnce()) -> CudaGraph {
    stream
        .begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        .unwrap();
    body();
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream
        .end_capture(flags)
        .unwrap()
        .expect("a graph was captured");
    stream.context().check_err().unwrap();
    graph
}

/// Whether to leave the largest cases out.
pub(crate) fn small() -> bool {
    std::env::var_os("REPLAY_GPU_SMALL").is_some()
}

/// Ends the process when dropped late: a hang of the GPU cannot be told to a test in any other way.
pub(crate) struct Watchdog(mpsc::Sender<()>);

impl Watchdog {
    pub(crate) fn new(what: &'static str) -> Self {
        let limit = Duration::from_secs(if small() { 120 } else { 10 });
        let (alive, dropped) = mpsc::channel::<()>();
        std::thread::spawn(move || {
            if dropped.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout) {
                eprintln!("{what} hangs: no end after {limit:?}");
                std::process::abort();
            }
        });
        Self(alive)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        // Fails only when the thread has ended the process.
        let _ = self.0.send(());
    }
}
