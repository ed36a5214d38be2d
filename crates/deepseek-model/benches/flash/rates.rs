//! What the device can do: how fast it copies, and how fast it multiplies.

#[cfg(feature = "cuda")]
#[path = "rates/cuda.rs"]
mod bytes;
#[cfg(not(feature = "cuda"))]
#[path = "rates/host.rs"]
mod bytes;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use replay_graph::Marks;
use serde::Serialize;

pub(crate) use bytes::name;

use super::spread::Spread;

/// Operations between two marks: launching takes no part of the time of that many.
const AT_ONCE: usize = 8;
/// Measurements of each; the first warms up.
const RUNS: usize = 12;

/// Rates of the device.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Rates {
    /// Bytes read and written a second by a copy within the device.
    pub(crate) copy: Spread,
    /// Floating-point operations a second of a product of bf16 matrices (f32 on a CPU), as large as
    /// pays.
    pub(crate) matmul: Spread,
}

/// Measures both.
pub(crate) fn measure(device: &Device, tiny: bool) -> Result<Rates> {
    let bytes: usize = if tiny { 1 << 20 } else { 2 << 30 };
    let mut copy = bytes::copier(device, bytes)?;
    let copy = timed(device, &mut || copy())?.map(|s| 2.0 * bytes as f64 / s);
    let n: usize = if tiny { 128 } else { 8192 };
    let dtype = if device.is_cpu() {
        DType::F32
    } else {
        DType::BF16
    };
    let matrix = || Tensor::randn(0f32, 1.0, (n, n), device)?.to_dtype(dtype);
    // As the decoder's linear layers: x · wᵀ.
    let (x, w) = (matrix()?, matrix()?.t()?);
    let mut product = || {
        x.matmul(&w)?;
        Ok(())
    };
    let matmul = timed(device, &mut product)?.map(|s| 2.0 * (n as f64).powi(3) / s);
    Ok(Rates { copy, matmul })
}

/// Seconds of one operation.
fn timed(device: &Device, run: &mut dyn FnMut() -> Result<()>) -> Result<Spread> {
    let marks = Marks::new(2, device)?;
    let mut times = Vec::new();
    for _ in 0..RUNS {
        // While the device does this one, the others are queued behind it.
        run()?;
        marks.mark(0)?;
        for _ in 0..AT_ONCE {
            run()?;
        }
        marks.mark(1)?;
        times.push(marks.between(0, 1)?.as_secs_f64() / AT_ONCE as f64);
    }
    Ok(Spread::of(times.into_iter().skip(1)))
}
