//! Rotary embedding, and rounding to the formats of the cache.
#![allow(unsafe_code)]

use candle_core::{DType, Result, Tensor};
use replay_cuda::kernel::Kernel;

use super::launch::{
    ByAct, by_act, count, expect, kernel, kernel_args, output, run, tensors, threads, wide_threads,
};
use crate::ops::Rounding;

const ROPE_TABLE: Kernel = kernel!("rope", ROPE, "rope_table");
const ROTATE: ByAct = by_act!("rope", ROPE, "rotate");
const ROTATE_TAILS: ByAct = by_act!("rope", ROPE, "rotate_tails");

kernel_args! {
    struct RopeTableArgs { positions: u64, frequencies: u64, table: u64, rows: u32, pairs: u32 }
}

/// Cosine and sine `[rows, pairs, 2]` (f32) of every position `[rows]` (u32) times every frequency
/// `[pairs]` (f32, radians per position).
pub(in crate::ops) fn rope_table(positions: &Tensor, frequencies: &Tensor) -> Result<Tensor> {
    let op = "rope-table";
    let (rows, pairs) = (positions.dims1()?, frequencies.dims1()?);
    expect(op, "positions", positions, DType::U32, &[rows])?;
    expect(op, "frequencies", frequencies, DType::F32, &[pairs])?;
    let table = output(&[rows, pairs, 2], DType::F32, positions.device())?;
    let read = [("positions", positions), ("frequencies", frequencies)];
    let tensors = tensors(op, &read, &[("table", &table)])?;
    let grid = threads(rows * pairs)?;
    let (rows, pairs) = (count(rows)?, count(pairs)?);
    // SAFETY: a thread for each of the rows x pairs angles, which the kernel compares with.
    unsafe {
        run(ROPE_TABLE, &tensors, grid, |a| RopeTableArgs {
            positions: a[0],
            frequencies: a[1],
            table: a[2],
            rows,
            pairs,
        })
    }?;
    Ok(table)
}

kernel_args! {
    struct RotateArgs {
        x: u64, table: u64, out: u64,
        rows: u32, heads: u32, dim: u32, pairs: u32, format: u32, pad: u32,
    }
}

/// Rotates every head of `x` `[rows, heads · head_dim]` by the angles `table` `[rows, pairs, 2]`, and
/// rounds the result to a cache format if one is given.
pub(in crate::ops) fn rotate_heads(
    x: &Tensor,
    head_dim: usize,
    table: &Tensor,
    rounding: Option<Rounding>,
) -> Result<Tensor> {
    let op = "rotate-heads";
    let group = rounding.map_or(2, Rounding::group);
    let (rows, width, pairs) = expect_heads(op, x, head_dim, table, group)?;
    let out = output(&[rows, width], x.dtype(), x.device())?;
    let tensors = tensors(op, &[("x", x), ("table", table)], &[("out", &out)])?;
    let kernel = ROTATE.of(x.dtype())?;
    let heads = width / head_dim;
    let grid = threads(rows * heads * head_dim.div_ceil(64) * 32)?;
    let (rows, heads, dim, pairs) = (count(rows)?, count(heads)?, count(head_dim)?, count(pairs)?);
    let format = match rounding {
        None => 0,
        Some(Rounding::MxFp8) => 1,
        Some(Rounding::MxFp4) => 2,
        Some(Rounding::NvFp4) => 3,
    };
    // SAFETY: a warp for every 64 channels of each of the rows x heads heads, which the kernel compares
    // with; heads are even, and whole groups of the format.
    unsafe {
        run(kernel, &tensors, grid, |a| RotateArgs {
            x: a[0],
            table: a[1],
            out: a[2],
            rows,
            heads,
            dim,
            pairs,
            format,
            pad: 0,
        })
    }?;
    Ok(out)
}

/// Rows, their channels, and the pairs of each head that rotate.
fn expect_heads(
    op: &str,
    x: &Tensor,
    head_dim: usize,
    table: &Tensor,
    group: usize,
) -> Result<(usize, usize, usize)> {
    let (rows, width) = x.dims2()?;
    let pairs = table.dims3()?.1;
    expect(op, "table", table, DType::F32, &[rows, pairs, 2])?;
    if !width.is_multiple_of(head_dim) || !head_dim.is_multiple_of(group) || 2 * pairs > head_dim {
        candle_core::bail!(
            "{op}: rows of {width} channels are not heads of {head_dim} that rotate {pairs} pairs and are whole groups of {group}"
        );
    }
    Ok((rows, width, pairs))
}

kernel_args! {
    struct RotateTailsArgs {
        x: u64, table: u64, rows: u32, heads: u32, dim: u32, pairs: u32, sign: f32, pad: u32,
    }
}

/// Rotates every head of `x` `[rows, heads · head_dim]` where it lies by the angles `table`
/// `[rows, pairs, 2]`, or back: most channels of a head do not rotate, and stay untouched.
pub(in crate::ops) fn rotate_in_place(
    x: &Tensor,
    head_dim: usize,
    table: &Tensor,
    back: bool,
) -> Result<()> {
    let op = "rotate-in-place";
    let (rows, width, pairs) = expect_heads(op, x, head_dim, table, 2)?;
    let tensors = tensors(op, &[("table", table)], &[("x", x)])?;
    let kernel = ROTATE_TAILS.of(x.dtype())?;
    let heads = width / head_dim;
    let grid = threads(rows * heads * wide_threads(x.dtype(), 2 * pairs))?;
    let (rows, heads, dim, pairs) = (count(rows)?, count(heads)?, count(head_dim)?, count(pairs)?);
    // SAFETY: a thread for every 16 bytes of the last 2 pairs channels of each of the rows x heads
    // heads, which the kernel compares with; 2 pairs are at most a head.
    unsafe {
        run(kernel, &tensors, grid, |a| RotateTailsArgs {
            x: a[1],
            table: a[0],
            rows,
            heads,
            dim,
            pairs,
            sign: if back { -1.0 } else { 1.0 },
            pad: 0,
        })
    }
}
