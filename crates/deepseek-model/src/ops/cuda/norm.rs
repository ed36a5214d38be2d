//! RMS norms.
#![allow(unsafe_code)]

use candle_core::{DType, Result, Tensor};
use replay_cuda::kernel::Grid;

use super::launch::{
    ByAct, by_act, count, expect, grid, kernel_args, output, run, tensors, wide_threads,
};

const RMS_NORM: ByAct = by_act!("norm", NORM, "rms_norm");
const COLLAPSE_NORM: ByAct = by_act!("norm", NORM, "collapse_norm");
const EXPAND_NORM: ByAct = by_act!("norm", NORM, "expand_norm");

/// A block for each of `rows`, with a thread for every 16 bytes of a row of `width` up to `most`, and
/// shared memory for the row.
fn row_blocks(rows: usize, dtype: DType, width: usize, most: usize) -> Result<Grid> {
    let wides = wide_threads(dtype, width);
    let threads = wides.next_multiple_of(32).clamp(32, most);
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
    let (kernel, grid) = (
        RMS_NORM.of(x.dtype())?,
        row_blocks(rows, x.dtype(), width, 1024)?,
    );
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
        row_blocks(rows, streams.dtype(), h, 1024)?,
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

/// Whether [`expand_norm`] takes so many streams.
pub(in crate::ops) fn expands_and_norms(streams: &Tensor) -> Result<bool> {
    Ok((1..=4).contains(&streams.dims3()?.1))
}

kernel_args! {
    struct ExpandNormArgs {
        y: u64, streams: u64, post_comb: u64, pre: u64, weight: u64, expanded: u64, out: u64,
        n: u32, h: u32, eps: f32, pad: u32,
    }
}

/// As [`crate::ops::expand_norm`], of streams that [`expands_and_norms`].
pub(in crate::ops) fn expand_norm(
    y: &Tensor,
    streams: &Tensor,
    post_comb: &Tensor,
    pre: &Tensor,
    weight: &Tensor,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    let op = "expand-norm";
    let ((rows, n, h), dtype) = (streams.dims3()?, streams.dtype());
    if !expands_and_norms(streams)? {
        candle_core::bail!("{op}: expected 1 to 4 streams, got {n}");
    }
    expect(op, "y", y, dtype, &[rows, h])?;
    expect(op, "post_comb", post_comb, DType::F32, &[rows, n + n * n])?;
    expect(op, "pre", pre, DType::F32, &[rows, n])?;
    expect(op, "weight", weight, DType::F32, &[h])?;
    let expanded = output(&[rows, n, h], dtype, streams.device())?;
    let out = output(&[rows, h], dtype, streams.device())?;
    let read = [
        ("y", y),
        ("streams", streams),
        ("post_comb", post_comb),
        ("pre", pre),
        ("weight", weight),
    ];
    let tensors = tensors(op, &read, &[("expanded", &expanded), ("out", &out)])?;
    // Few rows have a multiprocessor each; of more, two share one, and one loads while the other sums.
    let most = if rows <= 128 { 640 } else { 320 };
    let (kernel, grid) = (EXPAND_NORM.of(dtype)?, row_blocks(rows, dtype, h, most)?);
    let (n, h) = (count(n)?, count(h)?);
    // SAFETY: one block per row of all tensors, whose shapes were compared, with shared memory for a
    // row of the result; n is one that the kernel has code for.
    unsafe {
        run(kernel, &tensors, grid, |a| ExpandNormArgs {
            y: a[0],
            streams: a[1],
            post_comb: a[2],
            pre: a[3],
            weight: a[4],
            expanded: a[5],
            out: a[6],
            n,
            h,
            eps: eps as f32,
            pad: 0,
        })
    }?;
    Ok((expanded, out))
}
