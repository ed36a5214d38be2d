//! Rotary embedding, and rounding to the formats of the cache.
#![allow(unsafe_code)]

use candle_core::{DType, Result, Tensor};
use replay_cuda::kernel::Kernel;

use super::launch::{
    ByAct, by_act, count, expect, kernel, kernel_args, output, run, tensors, threads,
};
use crate::ops::Rounding;

const ROPE_TABLE: Kernel = kernel!("rope", ROPE, "rope_table");
const ROTATE: ByAct = by_act!("rope", ROPE, "rotate");

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
        rows: u32, heads: u32, dim: u32, pairs: u32, format: u32, sign: f32,
    }
}

/// Rotates every head of `x` `[rows, heads · head_dim]` by the angles `table` `[rows, pairs, 2]`, or
/// back, and rounds the result to a cache format if one is given.
pub(in crate::ops) fn rotate_heads(
    x: &Tensor,
    head_dim: usize,
    table: &Tensor,
    rounding: Option<Rounding>,
    back: bool,
) -> Result<Tensor> {
    let op = "rotate-heads";
    let (rows, width) = x.dims2()?;
    let pairs = table.dims3()?.1;
    expect(op, "table", table, DType::F32, &[rows, pairs, 2])?;
    let group = rounding.map_or(2, Rounding::group);
    if !width.is_multiple_of(head_dim) || !head_dim.is_multiple_of(group) || 2 * pairs > head_dim {
        candle_core::bail!(
            "{op}: rows of {width} channels are not heads of {head_dim} that rotate {pairs} pairs and are whole groups of {group}"
        );
    }
    let out = output(&[rows, width], x.dtype(), x.device())?;
    let tensors = tensors(op, &[("x", x), ("table", table)], &[("out", &out)])?;
    let kernel = ROTATE.of(x.dtype())?;
    let heads = width / head_dim;
    let grid = threads(rows * heads * 32)?;
    let (rows, heads, dim, pairs) = (count(rows)?, count(heads)?, count(head_dim)?, count(pairs)?);
    let format = match rounding {
        None => 0,
        Some(Rounding::MxFp8) => 1,
        Some(Rounding::MxFp4) => 2,
        Some(Rounding::NvFp4) => 3,
    };
    // SAFETY: a warp for each of the rows x heads heads, which the kernel compares with; heads are
    // even, and whole groups of the format.
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
            sign: if back { -1.0 } else { 1.0 },
        })
    }?;
    Ok(out)
}
