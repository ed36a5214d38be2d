//! Launches of the row copies.

use candle_core::Tensor;

use super::args::{CopyArgs, MAX_COPIES, RowCopy};
use super::launch::{Grid, Kernel, launch};
use crate::copies::{RowCopies, RowMap};
use crate::tiling::{TileSize, cut};
use crate::{Error, Operand, Result};

/// Copies rows on the device, up to [`MAX_COPIES`] tensors in one launch.
pub(crate) fn copy_rows(copies: &RowCopies<'_>) -> Result<()> {
    let kernel = match copies.map() {
        RowMap::Gather => Kernel::GATHER,
        RowMap::Scatter => Kernel::SCATTER,
        RowMap::Write => Kernel::WRITE,
    };
    // SAFETY:
    // - Kernel: all three take a `CopyArgs`, and any number of threads; there is a block for each
    //   tile that `first_tile` counts.
    // - Extents: each `src` and `dst` is the address of a contiguous tensor, `src_rows` and
    //   `dst_rows` are its rows and `row_units << unit_log2` its row's bytes, so the kernel, which
    //   compares every listed row with these counts, stays within; `n_rows` is the length of the list
    //   or the rows of `dst`. `rows` has `n_list` entries. Units divide all addresses.
    // - Writes: `dst` is an output, which `RowCopies` marks as written.
    unsafe {
        launch(kernel, copies.arguments(), |addresses| {
            let pairs: Vec<_> = copies.pairs().enumerate().collect();
            let chunks = pairs.chunks(MAX_COPIES);
            chunks
                .map(|pairs| arguments(copies, pairs, addresses))
                .collect()
        })
    }
}

/// The argument of one launch for some of the pairs. Addresses are those of the list, of the sources
/// and of the outputs.
fn arguments(
    copies: &RowCopies<'_>,
    pairs: &[(usize, (&Tensor, &Tensor))],
    addresses: &[u64],
) -> Result<(CopyArgs, Grid)> {
    let op = copies.map().op();
    let count = |n: usize, operand| u32::try_from(n).map_err(|_| Error::TooLarge { op, operand });
    let n_list = count(copies.rows().elem_count(), Operand::Rows)?;
    let mut args = CopyArgs {
        rows: addresses[0],
        n_list,
        ..CopyArgs::default()
    };
    let mut tiles = 0u32;
    for &(i, (source, output)) in pairs {
        let operand = Operand::Output(i);
        let row_elements: usize = output.dims()[1..].iter().product();
        let row_bytes = row_elements * output.dtype().size_in_bytes();
        let src_rows = count(source.dims()[0], Operand::Source(i))?;
        let dst_rows = count(output.dims()[0], operand)?;
        let n_rows = match copies.map() {
            RowMap::Gather | RowMap::Write => n_list,
            RowMap::Scatter => dst_rows,
        };
        if row_bytes == 0 || n_rows == 0 || dst_rows == 0 {
            continue;
        }
        let (src, dst) = (addresses[1 + i], addresses[1 + copies.pairs().len() + i]);
        let too_large = Error::TooLarge { op, operand };
        let Some(tiling) = cut(row_bytes, n_rows, src | dst, TileSize::DEFAULT) else {
            return Err(too_large);
        };
        args.copies[args.n_copies as usize] = RowCopy {
            src,
            dst,
            src_rows,
            dst_rows,
            n_rows,
            row_units: tiling.row_units,
            unit_log2: tiling.unit_log2,
            first_tile: tiles,
            tiles_per_row: tiling.tiles_per_row,
            tile_units: tiling.tile_units,
            rows_per_tile: tiling.rows_per_tile,
            pad: 0,
        };
        args.n_copies += 1;
        // The most blocks of a grid.
        tiles = match tiles.checked_add(tiling.tiles) {
            Some(tiles) if i32::try_from(tiles).is_ok() => tiles,
            _ => return Err(too_large),
        };
    }
    Ok((
        args,
        Grid {
            blocks: tiles,
            threads: TileSize::DEFAULT.threads,
            shared_bytes: 0,
        },
    ))
}
