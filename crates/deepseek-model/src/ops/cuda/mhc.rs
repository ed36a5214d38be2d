//! Hyper-connections.
#![allow(unsafe_code)]

use candle_core::{DType, Result, Tensor};
use replay_cuda::kernel::Kernel;

use super::{
    launch::{
        ByAct, by_act, count, expect, grid, kernel, kernel_args, output, run, tensors, wide_threads,
    },
    mix_tiles,
};
use crate::ops::{Mix, mhc::MAX_STREAMS};

const MIX_SUMS: ByAct = by_act!("mix", MIX, "mix_sums");
const MIX: Kernel = kernel!("mix", MIX, "mix");
const EXPAND: ByAct = by_act!("mhc", MHC, "expand");
const EXPAND_MORE: ByAct = by_act!("mhc", MHC, "expand_more");

/// Streams that `expand` takes; `expand_more` takes more.
const FEW_STREAMS: usize = 4;

kernel_args! {
    struct MixSumsArgs {
        streams: u64, project: u64, sums: u64,
        rows: u32, columns: u32, width: u32, segments: u32, block_rows: u32, column_parts: u32,
    }
}

/// How `mix_sums` shares the sums of a site out: the constants of its source, and what it leaves open.
mod part {
    /// Channels of a warp.
    pub(super) const SEGMENT: usize = 512;
    /// Columns of a warp.
    pub(super) const COLUMNS: usize = 4;
    /// Rows that a warp takes at a time.
    pub(super) const ROWS: usize = 4;
    /// The most warps of a block.
    pub(super) const WARPS: usize = 7;
    /// Up to so many rows, blocks are small, so that they are many: the weights are read by as many
    /// multiprocessors as there are.
    pub(super) const FEW_ROWS: usize = 64;
    /// Warps of a small block.
    pub(super) const FEW_WARPS: usize = 2;
    /// Rows of a block at most where there are more: its weights serve so many.
    pub(super) const BLOCK_ROWS: usize = 64;
    /// Blocks that keep a large device busy; with fewer rows than that takes, each has fewer.
    pub(super) const ENOUGH_BLOCKS: usize = 320;
}

/// Rows from which on [`mix_tiles`] makes the sums. With fewer, the second of its blocks of rows is not half full.
const TILE_ROWS: usize = mix_tiles::ROWS * 3 / 2;

/// Channels of its blocks: fewer up to so many rows, where they alone do not make blocks enough for a GPU. With
/// the 20 long segments of the released model, an H200 has one block for each multiprocessor then, of 4 warps.
const SHORT_SEGMENT: usize = 320;
const SHORT_ROWS: usize = 512;
const LONG_SEGMENT: usize = 1024;

/// Threads of a block of `mix`, which takes a row.
const MIX_THREADS: u32 = 128;

/// The projection of a site and the sum of squares of every row, before the norm, by segments of the
/// channels: their number, and `[segments · rows, columns + 1]`.
fn sums(site: &Mix, streams: &Tensor) -> Result<(usize, Tensor)> {
    let (rows, n, h) = streams.dims3()?;
    let (columns, width, project) = ((2 + n) * n, n * h, site.project.weight());
    expect("mix", "project", project, DType::F32, &[columns, width])?;
    if rows >= TILE_ROWS && mix_tiles::fits(project, streams) {
        let segment = if rows <= SHORT_ROWS {
            SHORT_SEGMENT
        } else {
            LONG_SEGMENT
        };
        let streams = streams.reshape((rows, width))?;
        let sums = mix_tiles::sums(project, &streams, segment)?;
        return Ok((width.div_ceil(segment), sums));
    }
    let segments = width.div_ceil(part::SEGMENT);
    let sums = output(
        &[segments * rows, columns + 1],
        DType::F32,
        streams.device(),
    )?;
    mix_sums(project, streams, segments, &sums)?;
    Ok((segments, sums))
}

/// [`sums`] of any rows.
fn mix_sums(project: &Tensor, streams: &Tensor, segments: usize, sums: &Tensor) -> Result<()> {
    let (rows, (columns, width)) = (streams.dim(0)?, project.dims2()?);
    let read = [("streams", streams), ("project", project)];
    let tensors = tensors("mix-sums", &read, &[("sums", sums)])?;
    let (warps, block_rows) = if rows <= part::FEW_ROWS {
        (part::FEW_WARPS, part::ROWS)
    } else {
        let rows = (rows * segments / part::ENOUGH_BLOCKS).next_multiple_of(part::ROWS);
        (part::WARPS, rows.clamp(part::ROWS, part::BLOCK_ROWS))
    };
    // One more for the squares.
    let column_parts = (columns.div_ceil(part::COLUMNS) + 1).div_ceil(warps);
    let blocks = rows.div_ceil(block_rows) * segments * column_parts;
    let (kernel, grid) = (
        MIX_SUMS.of(streams.dtype())?,
        grid(blocks, 32 * warps as u32, 0)?,
    );
    let (rows, columns, width) = (count(rows)?, count(columns)?, count(width)?);
    let (segments, column_parts) = (count(segments)?, count(column_parts)?);
    // SAFETY: a warp for every unit of columns of every segment of every group of rows; the kernel
    // compares rows, columns and channels with the counts here, which are those of the tensors.
    unsafe {
        run(kernel, &tensors, grid, |a| MixSumsArgs {
            streams: a[0],
            project: a[1],
            sums: a[2],
            rows,
            columns,
            width,
            segments,
            block_rows: block_rows as u32,
            column_parts,
        })
    }
}

kernel_args! {
    struct MixArgs {
        sums: u64, base: u64, scale: u64, pre: u64, post_comb: u64,
        rows: u32, segments: u32, n: u32, width: u32, iterations: u32, eps: f32, norm_eps: f32,
        pad: u32,
    }
}

/// As [`crate::ops::mix`]. A row's coefficients do not depend on the other rows, but for whether they
/// are many.
pub(in crate::ops) fn mix(site: &Mix, streams: &Tensor) -> Result<(Tensor, Tensor)> {
    let op = "mix";
    let (rows, n, h) = streams.dims3()?;
    let (width, device) = (n * h, streams.device());
    expect_streams(op, n)?;
    expect(op, "base", &site.base, DType::F32, &[(2 + n) * n])?;
    expect(op, "scale", &site.scale, DType::F32, &[3])?;
    let (segments, sums) = sums(site, streams)?;
    let pre = output(&[rows, n], DType::F32, device)?;
    let post_comb = output(&[rows, n + n * n], DType::F32, device)?;
    let read = [
        ("sums", &sums),
        ("base", &site.base),
        ("scale", &site.scale),
    ];
    let tensors = tensors(op, &read, &[("pre", &pre), ("post_comb", &post_comb)])?;
    let grid = grid(rows, MIX_THREADS, 0)?;
    let (rows, segments, n) = (count(rows)?, count(segments)?, count(n)?);
    let (width, iterations) = (count(width)?, count(site.iterations)?);
    // SAFETY: one block per row of all tensors, whose shapes were compared or made here; n
    // is 1 to MAX_STREAMS, for which the block has shared memory.
    unsafe {
        run(MIX, &tensors, grid, |a| MixArgs {
            sums: a[0],
            base: a[1],
            scale: a[2],
            pre: a[3],
            post_comb: a[4],
            rows,
            segments,
            n,
            width,
            iterations,
            eps: site.eps as f32,
            norm_eps: site.norm_eps as f32,
            pad: 0,
        })
    }?;
    Ok((pre, post_comb))
}

/// Refuses numbers of streams that the kernels have no code for.
fn expect_streams(op: &str, n: usize) -> Result<()> {
    if (1..=MAX_STREAMS).contains(&n) {
        return Ok(());
    }
    candle_core::bail!("{op}: expected 1 to {MAX_STREAMS} streams, got {n}")
}

kernel_args! {
    struct ExpandArgs {
        y: u64, streams: u64, post_comb: u64, out: u64,
        n: u32, h: u32, row_blocks: u32, pad: u32,
    }
}

/// As [`crate::ops::expand`].
pub(in crate::ops) fn expand(y: &Tensor, streams: &Tensor, post_comb: &Tensor) -> Result<Tensor> {
    let op = "expand";
    let (rows, n, h) = streams.dims3()?;
    expect_streams(op, n)?;
    expect(op, "y", y, streams.dtype(), &[rows, h])?;
    expect(op, "post_comb", post_comb, DType::F32, &[rows, n + n * n])?;
    let out = output(&[rows, n, h], streams.dtype(), streams.device())?;
    let read = [("y", y), ("streams", streams), ("post_comb", post_comb)];
    let tensors = tensors(op, &read, &[("out", &out)])?;
    let kernel = if n <= FEW_STREAMS {
        EXPAND
    } else {
        EXPAND_MORE
    };
    let kernel = kernel.of(streams.dtype())?;
    let block = 128;
    let row_blocks = wide_threads(streams.dtype(), h).div_ceil(block);
    let grid = grid(rows * row_blocks, block as u32, 0)?;
    let (n, h, row_blocks) = (count(n)?, count(h)?, count(row_blocks)?);
    // SAFETY: a thread for every 16 bytes of each row of all tensors, whose shapes were compared; the
    // kernel compares with h. n is one that the kernel has code for.
    unsafe {
        run(kernel, &tensors, grid, |a| ExpandArgs {
            y: a[0],
            streams: a[1],
            post_comb: a[2],
            out: a[3],
            n,
            h,
            row_blocks,
            pad: 0,
        })
    }?;
    Ok(out)
}
