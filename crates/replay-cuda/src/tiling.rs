//! Cuts row copies into tiles, one for each block of a launch.

/// How one tensor's rows are cut. All counts are of units of `1 << unit_log2` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tiling {
    /// The widest power of two, up to 16 bytes, that divides addresses and row length.
    pub(crate) unit_log2: u32,
    /// Units of a row; at least 1.
    pub(crate) row_units: u32,
    /// Tiles of one row; 1 for narrow tensors.
    pub(crate) tiles_per_row: u32,
    /// Units of a wide row's tile, but for the last.
    pub(crate) tile_units: u32,
    /// Rows of a tile; 1 for wide tensors.
    pub(crate) rows_per_tile: u32,
    /// Tiles in all.
    pub(crate) tiles: u32,
}

/// The most units of a tile, and how many threads copy them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TileSize {
    pub(crate) units: u32,
    pub(crate) threads: u32,
}

impl TileSize {
    /// A row of 5,120 bf16 is one tile. Measured on an H200: larger tiles make scatter slower, since
    /// blocks that copy and blocks that only write zeros balance less well.
    pub(crate) const DEFAULT: Self = Self {
        units: 640,
        threads: 256,
    };
}

/// The longest row, in units: the kernels' counts within a row stay within u32.
const MAX_ROW_UNITS: usize = 1 << 30;

/// Cuts `n_rows` rows of `row_bytes` bytes, which are at least one each. `addresses` are those of all
/// that is read and written, or-ed together. `None` if the rows are too long or too many.
pub(crate) fn cut(row_bytes: usize, n_rows: u32, addresses: u64, size: TileSize) -> Option<Tiling> {
    let unit_log2 = (row_bytes as u64 | addresses).trailing_zeros().min(4);
    let row_units = Some(row_bytes >> unit_log2).filter(|units| *units <= MAX_ROW_UNITS)? as u32;
    if row_units <= size.units / 2 {
        let rows_per_tile = size.units / row_units;
        let tiles = n_rows.div_ceil(rows_per_tile);
        let (tiles_per_row, tile_units) = (1, rows_per_tile * row_units);
        return Some(Tiling {
            unit_log2,
            row_units,
            tiles_per_row,
            tile_units,
            rows_per_tile,
            tiles,
        });
    }
    // Tiles of one row are of nearly the same length, each a whole number of warps.
    let even = row_units.div_ceil(row_units.div_ceil(size.units));
    let tile_units = even.next_multiple_of(32);
    let tiles_per_row = row_units.div_ceil(tile_units);
    let tiles = n_rows.checked_mul(tiles_per_row)?;
    Some(Tiling {
        unit_log2,
        row_units,
        tiles_per_row,
        tile_units,
        rows_per_tile: 1,
        tiles,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The units that the tiles of a launch copy, as the kernels count them.
    fn walk(tiling: &Tiling, n_rows: u32) -> Vec<(u32, u32)> {
        let mut copied = Vec::new();
        for tile in 0..tiling.tiles {
            if tiling.rows_per_tile == 1 {
                let row = tile / tiling.tiles_per_row;
                let begin = (tile - row * tiling.tiles_per_row) * tiling.tile_units;
                let end = (begin + tiling.tile_units).min(tiling.row_units);
                copied.extend((begin..end).map(|unit| (row, unit)));
            } else {
                let first = tile * tiling.rows_per_tile;
                let units = tiling.rows_per_tile.min(n_rows - first) * tiling.row_units;
                let place = |unit| (first + unit / tiling.row_units, unit % tiling.row_units);
                copied.extend((0..units).map(place));
            }
        }
        copied
    }

    proptest! {
        /// Every unit is copied once, no unit is split, and accesses are aligned.
        #[test]
        fn every_unit_is_in_one_tile(
            row_bytes in prop_oneof![1usize..300, 15_000usize..70_000],
            n_rows in 0u32..60,
            address in 0u64..64,
            units in prop_oneof![Just(64u32), Just(1024), Just(4096)],
        ) {
            let tiling = cut(row_bytes, n_rows, address, TileSize { units, threads: 32 }).unwrap();
            let unit = 1 << tiling.unit_log2;
            prop_assert_eq!(tiling.row_units as usize * unit, row_bytes);
            prop_assert_eq!(address as usize % unit, 0);
            let mut copied = walk(&tiling, n_rows);
            copied.sort_unstable();
            let expected = (0..n_rows).flat_map(|r| (0..tiling.row_units).map(move |u| (r, u)));
            prop_assert!(copied.into_iter().eq(expected));
        }
    }

    /// The seven layer inputs of the V4.1-Flash model: what their rows are cut into.
    #[test]
    fn layer_inputs() {
        let tiles = |row_bytes| {
            let tiling = cut(row_bytes, 2560, 0, TileSize::DEFAULT).unwrap();
            (
                1 << tiling.unit_log2,
                tiling.tiles_per_row,
                tiling.rows_per_tile,
            )
        };
        assert_eq!(tiles(40_960), (16, 4, 1)); // streams
        assert_eq!(tiles(10_240), (16, 1, 1)); // hidden
        assert_eq!(tiles(64), (16, 1, 160)); // mixes [4, 4]
        assert_eq!(tiles(16), (16, 1, 640)); // mixes [4]
        assert_eq!(tiles(8), (8, 1, 640)); // positions
        assert_eq!(tiles(4), (4, 1, 640)); // ids
    }

    /// Rows that no count of the kernels holds are refused.
    #[test]
    fn limits() {
        assert_eq!(cut(1 << 36, 1, 0, TileSize::DEFAULT), None);
        assert_eq!(cut(1 << 20, u32::MAX, 0, TileSize::DEFAULT), None);
        assert!(cut(1 << 34, 1, 0, TileSize::DEFAULT).is_some());
    }
}
