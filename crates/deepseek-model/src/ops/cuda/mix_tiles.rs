//! Products of many bf16 rows with an f32 matrix of few rows, on tensor cores: by segments of the channels, which
//! the caller adds up.
#![allow(unsafe_code)]

use candle_core::{DType, Result, Tensor};
use replay_cuda::kernel::Kernel;

use super::launch::{count, expect, grid, kernel, kernel_args, output, run, tensors};

const MIX_TILES: Kernel = kernel!("mix_tensor", MIX_TENSOR, "mix_tiles");

/// Rows of a block.
pub(super) const ROWS: usize = 64;

/// Rows of the matrix that a block takes, channels that it takes at a time, and its threads.
const COLUMNS: usize = 24;
const STAGE: usize = 64;
const THREADS: u32 = 128;

kernel_args! {
    struct MixTilesArgs {
        streams: u64, project: u64, sums: u64,
        rows: u32, columns: u32, width: u32, segments: u32, column_parts: u32, segment: u32,
    }
}

/// Whether the kernel takes these rows, of the matrix's width in all: bf16, in whole stages, and aligned to 16
/// bytes like the f32 matrix.
pub(super) fn fits(matrix: &Tensor, rows: &Tensor) -> bool {
    // Memory that a device hands out is aligned to far more than 16 bytes.
    let aligned = rows.layout().start_offset().is_multiple_of(8)
        && matrix.layout().start_offset().is_multiple_of(4);
    let width = matrix.dims().last();
    rows.dtype() == DType::BF16
        && matrix.dtype() == DType::F32
        && width.is_some_and(|width| width.is_multiple_of(STAGE))
        && aligned
}

/// Of `rows` `[rows, width]` (bf16) and `matrix` `[columns, width]` (f32), for which the kernel
/// [`fits`]: for every `segment` channels, a multiple of 64, each row's products and, behind them, its sum of
/// squares. `[segments · rows, columns + 1]` (f32).
pub(super) fn sums(matrix: &Tensor, rows: &Tensor, segment: usize) -> Result<Tensor> {
    let op = "mix-tiles";
    let (n_rows, (columns, width)) = (rows.dim(0)?, matrix.dims2()?);
    expect(op, "rows", rows, DType::BF16, &[n_rows, width])?;
    expect(op, "matrix", matrix, DType::F32, &[columns, width])?;
    if segment == 0 || !segment.is_multiple_of(STAGE) || !fits(matrix, rows) {
        candle_core::bail!(
            "{op}: expected aligned rows and segments in multiples of {STAGE}, got rows of {width} in segments \
             of {segment}"
        );
    }
    let segments = width.div_ceil(segment);
    let sums = output(&[segments * n_rows, columns + 1], DType::F32, rows.device())?;
    let read = [("rows", rows), ("matrix", matrix)];
    let tensors = tensors(op, &read, &[("sums", &sums)])?;
    let column_parts = columns.div_ceil(COLUMNS);
    let blocks = n_rows.div_ceil(ROWS) * segments * column_parts;
    let grid = grid(blocks, THREADS, 0)?;
    let (rows, columns, width) = (count(n_rows)?, count(columns)?, count(width)?);
    let (segments, column_parts) = (count(segments)?, count(column_parts)?);
    let segment = count(segment)?;
    // SAFETY: a block for every group of columns of every segment of every group of rows, none of which
    // is empty; the kernel compares rows, columns and channels with the counts here, which are those of
    // the tensors. Rows are whole stages and aligned, as was seen above.
    unsafe {
        run(MIX_TILES, &tensors, grid, |a| MixTilesArgs {
            streams: a[0],
            project: a[1],
            sums: a[2],
            rows,
            columns,
            width,
            segments,
            column_parts,
            segment,
        })
    }?;
    Ok(sums)
}
