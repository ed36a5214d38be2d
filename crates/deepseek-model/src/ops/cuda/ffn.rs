//! The pointwise parts of the experts.
#![allow(unsafe_code)]

use candle_core::{Result, Tensor};

use super::launch::{
    ByAct, by_act, count, kernel_args, output, run, tensors, threads, wide_threads,
};

const SWIGLU: ByAct = by_act!("ffn", FFN, "swiglu");

kernel_args! {
    struct SwigluArgs { hidden: u64, out: u64, rows: u32, m: u32, limit: f32, pad: u32 }
}

/// As [`crate::ops::swiglu`].
pub(in crate::ops) fn swiglu(hidden: &Tensor, limit: f64) -> Result<Tensor> {
    let op = "swiglu";
    let (rows, two_m) = hidden.dims2()?;
    let m = two_m / 2;
    if two_m != 2 * m {
        candle_core::bail!("{op}: expected gate and up of equal width, got {two_m} columns");
    }
    let out = output(&[rows, m], hidden.dtype(), hidden.device())?;
    let tensors = tensors(op, &[("hidden", hidden)], &[("out", &out)])?;
    let kernel = SWIGLU.of(hidden.dtype())?;
    let grid = threads(rows * wide_threads(hidden.dtype(), m))?;
    let (rows, m) = (count(rows)?, count(m)?);
    let limit = clamp(limit);
    // SAFETY: a thread for every 16 bytes of the rows of m results, which the kernel compares with.
    unsafe {
        run(kernel, &tensors, grid, |a| SwigluArgs {
            hidden: a[0],
            out: a[1],
            rows,
            m,
            limit,
            pad: 0,
        })
    }?;
    Ok(out)
}

/// The limit as kernels take it: 0 switches the clamps off.
pub(super) fn clamp(limit: f64) -> f32 {
    if limit > 0.0 {
        limit as f32
    } else {
        f32::INFINITY
    }
}
