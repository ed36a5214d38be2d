//! RMS norms.
#![allow(unsafe_code)]

use candle_core::{DType, Result, Tensor};
use replay_cuda::kernel::Grid;

use super::launch::{
    ByAct, by_act, count, expect, grid, kernel_args, output, run, tensors, wide_threads,
};

const RMS_NORM: ByAct = by_act!("norm", NORM, "rms_norm");
const COLLAPSE_NORM: ByAct = by_act!("norm", NORM, "collapse_norm");

/// A block for each of `rows`, with a thread for every 16 bytes of a row of `width` if a block may have
/// as many, and shared memory for the row.
fn row_blocks(rows: usize, dtype: DType, width: usize) -> Result<Grid> {
    let wides = wide_threads(dtype, width);
    let threads = wides.next_multiple_of(32).clamp(32, 1024);
    grid(rows, threads as u32, 16 * wides)
}

kernel_args! {
    struct RmsNormArgs { x: u64, weight: u64, out: u64, width: u32, eps: f32 }
}

/// As [`crate::ops::rms_norm`].
pub(in crate::ops) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let op = "rms-norm";
    let (rows, width) = x.dims2()?;
    expect(op, "weight", weight, DType::F32, &[width])?;
    let out = output(&[rows, width], x.dtype(), x.device())?;
    let tensors = tensors(op, &[("x", x), ("weight", weight)], &[("out", &out)])?;
    let (kernel, grid) = (RMS_NORM.of(x.dtype())?, row_blocks(rows, x.dtype(), width)?);
    let width = count(width)?;
    // SAFETY: one block per row of `x` and `out`, both [rows, width] of the kernel's dtype, with
    // shared memory for a row.
    unsafe {
        run(kernel, &tensors, grid, |a| RmsNormArgs {
            x: a[0],
            weight: a[1],
            out: a[2],
            width,
            eps: eps as f32,
        })
    }?;
    Ok(out)
}

kernel_args! {
    struct CollapseNormArgs {
        streams: u64, pre: u64, weight: u64, out: u64, n: u32, h: u32, eps: f32, pad: u32,
    }
}

/// As [`crate::ops::collapse_norm`].
pub(in crate::ops) fn collapse_norm(
    streams: &Tensor,
    pre: &Tensor,
    weight: &Tensor,
    eps: f64,
) -> Result<Tensor> {
    let op = "collapse-norm";
    let (rows, n, h) = streams.dims3()?;
    expect(op, "pre", pre, DType::F32, &[rows, n])?;
    expect(op, "weight", weight, DType::F32, &[h])?;
    let out = output(&[rows, h], streams.dtype(), streams.device())?;
    let read = [("streams", streams), ("pre", pre), ("weight", weight)];
    let tensors = tensors(op, &read, &[("out", &out)])?;
    let (kernel, grid) = (
        COLLAPSE_NORM.of(streams.dtype())?,
        row_blocks(rows, streams.dtype(), h)?,
    );
    let (n, h) = (count(n)?, count(h)?);
    // SAFETY: one block per row of all tensors, whose shapes were compared, with shared memory for a
    // row of the result.
    unsafe {
        run(kernel, &tensors, grid, |a| CollapseNormArgs {
            streams: a[0],
            pre: a[1],
            weight: a[2],
            out: a[3],
            n,
            h,
            eps: eps as f32,
            pad: 0,
        })
    }?;
    Ok(out)
}
