//! The device, one test at a time, and programs to capture on it.

use std::ops::Deref;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::time::Duration;

use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{DType, Device, Tensor};
use replay_graph::Result;

use crate::streams::set_event_tracking;

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// One for all tests: kernels are compiled for the GPU when they are loaded, which takes a while.
static DEVICE: OnceLock<Device> = OnceLock::new();

/// The device, and the right to be the only test that uses it.
pub(crate) struct Gpu {
    pub(crate) device: Device,
    /// `None` where another thread waits with it.
    _alone: Option<MutexGuard<'static, ()>>,
}

/// The device as a program finds it: uses tracked by events, nothing queued, nothing captured.
///
/// # Panics
///
/// If there is no GPU: a test that does nothing shows nothing.
pub(crate) fn gpu() -> Gpu {
    let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let device = DEVICE
        .get_or_init(|| Device::new_cuda_with_stream(0).expect("this test needs a CUDA GPU"))
        .clone();
    let gpu = Gpu {
        device,
        _alone: Some(alone),
    };
    // What a test that failed may have left behind.
    let _ = gpu.stream().context().check_err();
    set_event_tracking(&gpu, true);
    gpu.synchronize().unwrap();
    gpu
}

impl Deref for Gpu {
    type Target = Device;

    fn deref(&self) -> &Device {
        &self.device
    }
}

impl Gpu {
    pub(crate) fn stream(&self) -> std::sync::Arc<CudaStream> {
        self.device
            .as_cuda_device()
            .expect("a CUDA device")
            .cuda_stream()
    }

    /// Free bytes of the device once all work is done.
    pub(crate) fn free_bytes(&self) -> usize {
        self.device.synchronize().unwrap();
        let (free, _) = self.stream().context().mem_get_info().unwrap();
        free
    }

    pub(crate) fn tensor(&self, dims: &[usize], seed: u64) -> Tensor {
        let n = dims.iter().product();
        Tensor::from_vec(values(n, seed), dims, &self.device).unwrap()
    }

    /// Checks that eager work is as good as ever.
    #[track_caller]
    pub(crate) fn works(&self) {
        let x = Tensor::new(&[1f32, 2.0, 3.0], &self.device).unwrap();
        let y = x.affine(2.0, 1.0).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(y, [3.0, 5.0, 7.0]);
    }
}

/// Whether every access costs many times more, as under a sanitizer.
fn is_small() -> bool {
    std::env::var_os("REPLAY_GPU_SMALL").is_some()
}

/// So many rounds, or few: still several launches, each with inputs of its own.
pub(crate) fn rounds(n: u64) -> std::ops::RangeInclusive<u64> {
    1..=if is_small() { n.min(4) } else { n }
}

/// The cases, or the first two.
pub(crate) fn cases<T>(all: &[T]) -> &[T] {
    if is_small() { &all[..2] } else { all }
}

/// So many of a size that nothing but time depends on, or a sixty-fourth.
pub(crate) fn large(n: usize) -> usize {
    if is_small() { n / 64 } else { n }
}

/// Numbers in -1..1, the same for the same seed.
pub(crate) fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

/// A stack of small layers, as of a decode step.
pub(crate) struct Layers {
    weights: Vec<(Tensor, Tensor)>,
}

impl Layers {
    pub(crate) fn new(gpu: &Gpu, n: usize, width: usize) -> Self {
        let layer = |i: u64| {
            let weight = gpu.tensor(&[width, width], 2 * i + 1);
            (weight, gpu.tensor(&[width], 2 * i + 2))
        };
        Self {
            weights: (0..n as u64).map(layer).collect(),
        }
    }

    /// One layer: a product, and a few small kernels that allocate as candle does.
    pub(crate) fn layer(&self, i: usize, x: &Tensor) -> Result<Tensor> {
        let (weight, bias) = &self.weights[i];
        let y = x.matmul(weight)?.broadcast_add(bias)?.tanh()?;
        Ok((x + (y * 0.5)?)?)
    }

    pub(crate) fn run(&self, layers: std::ops::Range<usize>, x: &Tensor) -> Result<Tensor> {
        let mut x = x.clone();
        for i in layers {
            x = self.layer(i, &x)?;
        }
        Ok(x)
    }
}

/// The bits of a tensor, for comparison without rounding, NaN included.
pub(crate) fn bits(tensor: &Tensor) -> Vec<u32> {
    let flat = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
    let values = flat.to_vec1::<f32>().unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

/// Runs `body` on a thread of its own and fails if it takes longer than ten seconds, a minute where
/// all is slow: a hang is a failure that would otherwise never be reported.
#[track_caller]
pub(crate) fn within_ten_seconds(body: impl FnOnce(&Gpu) + Send + 'static) {
    let gpu = gpu();
    // Loading kernels may take a while, once.
    let warm = Layers::new(&gpu, 1, 64);
    bits(&warm.run(0..1, &gpu.tensor(&[16, 64], 0)).unwrap());
    let (done, finished) = mpsc::channel();
    let device = gpu.device.clone();
    let thread = std::thread::spawn(move || {
        let gpu = Gpu {
            device,
            _alone: None,
        };
        body(&gpu);
        // Nobody listens any more once the time is up.
        let _ = done.send(());
    });
    let seconds = if is_small() { 60 } else { 10 };
    match finished.recv_timeout(Duration::from_secs(seconds)) {
        Ok(()) => {}
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("still running after {seconds} s"),
        Err(mpsc::RecvTimeoutError::Disconnected) => {
            std::panic::resume_unwind(thread.join().expect_err("it sent nothing"))
        }
    }
}

/// Allocates and frees a GiB at a time on a device of its own, until told to stop.
pub(crate) struct Churn {
    stop: mpsc::Sender<()>,
    thread: std::thread::JoinHandle<u32>,
}

impl Churn {
    pub(crate) fn start() -> Self {
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let device = Device::new_cuda_with_stream(0).expect("this test needs a CUDA GPU");
            let mut rounds = 0;
            while stopped.try_recv() == Err(mpsc::TryRecvError::Empty) {
                let x = Tensor::full(f32::NAN, large(1 << 28), &device).unwrap();
                device.synchronize().unwrap();
                drop(x);
                rounds += 1;
            }
            rounds
        });
        Self { stop, thread }
    }

    /// Stops, and checks that there was something to disturb.
    pub(crate) fn stop(self) {
        self.stop.send(()).unwrap();
        assert!(self.thread.join().unwrap() > 0);
    }
}
