//! Every operation on a GPU against its CPU implementation.
//!
//! The operations are private to the crate, so these are unit tests, of names that begin with
//! `gpu_`: they need a GPU, and `cargo xtask test-gpu` runs them.

mod attention;
mod compress;
mod experts;
mod index;
mod linear;
mod mixing;
mod pointwise;
mod rotation;
mod route;

use candle_core::{DType, Device, Tensor};

use crate::{
    ops::Act,
    pcg::{Pcg64, SeedSequence},
};

/// The GPU of this machine.
pub(super) fn gpu() -> Device {
    Device::new_cuda(0).expect("a GPU")
}

/// Whether to leave out the largest cases, as under a sanitizer.
pub(super) fn small() -> bool {
    std::env::var_os("REPLAY_GPU_SMALL").is_some()
}

/// Numbers that are the same in every run.
pub(super) struct Draw(Pcg64);

impl Draw {
    pub(super) fn new() -> Self {
        Self(Pcg64::new(&SeedSequence::new(41)))
    }

    /// A number below `end`.
    pub(super) fn below(&mut self, end: usize) -> usize {
        self.0.next_u64() as usize % end
    }

    /// A value of -1 to 1, as it would be stored under `act`.
    pub(super) fn value(&mut self, act: Act) -> f32 {
        act.store(2.0 * self.0.unit() as f32 - 1.0)
    }

    /// The numbers below `end` in some order.
    pub(super) fn shuffled(&mut self, end: usize) -> Vec<u32> {
        let mut numbers: Vec<u32> = (0..end as u32).collect();
        (1..end).for_each(|i| numbers.swap(i, self.below(i + 1)));
        numbers
    }

    /// Such values, on the CPU.
    pub(super) fn values(&mut self, dims: &[usize], act: Act) -> Tensor {
        let n = dims.iter().product();
        let values: Vec<f32> = (0..n).map(|_| self.value(act)).collect();
        Tensor::from_vec(values, dims, &Device::Cpu).unwrap()
    }
}

/// A CPU tensor of activations as the device holds it.
pub(super) fn on(device: &Device, act: Act, tensor: &Tensor) -> Tensor {
    let tensor = tensor.to_device(device).unwrap();
    tensor.to_dtype(act.dtype()).unwrap()
}

/// A CPU tensor of f32 or u32 on the device.
pub(super) fn plain(device: &Device, tensor: &Tensor) -> Tensor {
    tensor.to_device(device).unwrap()
}

/// All values, as f32.
pub(super) fn values(tensor: &Tensor) -> Vec<f32> {
    let tensor = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
    tensor.to_vec1().unwrap()
}

/// A table `[rows, width]` of which only the rows that were written are numbers.
pub(super) struct Sparse {
    values: Vec<f32>,
    width: usize,
}

impl Sparse {
    pub(super) fn new(rows: usize, width: usize) -> Self {
        let values = vec![f32::NAN; rows * width];
        Self { values, width }
    }

    /// Draws a row, unless it was before.
    pub(super) fn draw(&mut self, row: usize, mut draw: impl FnMut() -> f32) {
        for value in &mut self.values[row * self.width..(row + 1) * self.width] {
            if value.is_nan() {
                *value = draw();
            }
        }
    }

    pub(super) fn tensor(&self) -> Tensor {
        let rows = self.values.len() / self.width;
        Tensor::from_vec(self.values.clone(), (rows, self.width), &Device::Cpu).unwrap()
    }
}

/// Compares shapes, and values to `tolerance` of the largest magnitude there is.
pub(super) fn assert_close(what: &str, got: &Tensor, expected: &Tensor, tolerance: f32) {
    assert_eq!(got.dims(), expected.dims(), "{what}");
    let (got, expected) = (values(got), values(expected));
    let scale = expected.iter().fold(1e-6f32, |m, x| m.max(x.abs()));
    for (i, (g, e)) in got.iter().zip(&expected).enumerate() {
        let off = (g - e).abs();
        assert!(
            off <= tolerance * scale,
            "{what}: value {i}: expected {e}, got {g}"
        );
    }
}

/// As [`assert_close`], but values may be infinite or no numbers, each where the other is; the tolerance
/// is of the largest finite magnitude.
pub(super) fn assert_same(what: &str, got: &Tensor, expected: &Tensor, tolerance: f32) {
    assert_eq!(got.dims(), expected.dims(), "{what}");
    let (got, expected) = (values(got), values(expected));
    let finite = expected.iter().filter(|x| x.is_finite());
    let scale = finite.fold(1e-6f32, |m, x| m.max(x.abs()));
    for (i, (g, e)) in got.iter().zip(&expected).enumerate() {
        let same = if e.is_finite() {
            (g - e).abs() <= tolerance * scale
        } else {
            g == e || (g.is_nan() && e.is_nan())
        };
        assert!(same, "{what}: value {i}: expected {e}, got {g}");
    }
}

/// The activation dtypes, each with a tolerance: bf16 keeps 8 bits, and sums in another order may
/// round to a neighbour.
pub(super) const ACTS: [(Act, f32); 2] = [(Act::F32, 2e-6), (Act::Bf16, 8e-3)];

/// Kernels that ask for much shared memory run where a block can have it, and what no GPU has leads to
/// the plain kernels instead of a failed launch.
#[test]
fn gpu_shared_memory_is_asked_about() {
    let device = gpu();
    let limit = replay_cuda::kernel::shared_limit(&device).unwrap();
    println!("{limit} bytes of a block at most");
    assert!((48 << 10..1 << 24).contains(&limit), "{limit}");
    for (bytes, fits) in [(0, true), (limit, true), (limit + 1, false)] {
        let has = super::launch::has_shared(&device, bytes).unwrap();
        assert_eq!(has, fits, "{bytes} of {limit}");
    }
}
