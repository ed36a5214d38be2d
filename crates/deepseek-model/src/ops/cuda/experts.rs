//! The routed experts: choices sorted by expert, two grouped products, and the sum.
//!
//! The products are kernels of our own. `candle_nn::moe::moe_gemm` (0.11) has none for f32, wants the
//! list sorted already, reads tensors from the start of their storage wherever they begin, ignores
//! bounds of ids, and in its variant for many rows scans with thrust, which allocates and waits for
//! the stream: a capture fails on that. Its two variants also multiply in other fragments, so that a
//! row would depend on the rest of its batch.
#![allow(unsafe_code)]

mod hopper;

use candle_core::{DType, Result, Tensor};
use replay_cuda::kernel::Kernel;

use super::launch::{
    BLOCK, ByAct, by_act, count, expect, grid, kernel, kernel_args, output, run, tensors,
    wide_threads,
};
use crate::ops::Experts;

const SORT: Kernel = kernel!("experts", EXPERTS, "sort_choices");
const GEMM_16: ByAct = by_act!("experts", EXPERTS, "grouped_gemm_16");
const GEMM_64: ByAct = by_act!("experts", EXPERTS, "grouped_gemm_64");
const COMBINE: ByAct = by_act!("ffn", FFN, "combine");

/// The choices of a batch by expert, for the kernels that will take them.
#[derive(Debug)]
pub(crate) struct SortedChoices {
    products: Products,
    lists: Sorted,
}

/// The kernels of the products, whose tiles decide how choices are listed.
#[derive(Clone, Copy, Debug)]
enum Products {
    Hopper(hopper::Shape),
    Tiles(Tiling),
}

/// Choices of each expert on average, in a batch that has any.
fn sizes(experts: &Experts, x: &Tensor, ids: &Tensor) -> Result<usize> {
    let op = "routed-experts";
    let (dtype, (rows, h)) = (x.dtype(), x.dims2()?);
    let (count, two_m, _) = experts.w13.dims3()?;
    let (m, k) = (two_m / 2, ids.dims2()?.1);
    if count == 0 || m == 0 || h == 0 || k == 0 {
        candle_core::bail!("{op}: {k} of {count} experts of {h} x {m}: expected at least one each");
    }
    expect(op, "w13", &experts.w13, dtype, &[count, 2 * m, h])?;
    expect(op, "w2", &experts.w2, dtype, &[count, h, m])?;
    expect(op, "ids", ids, DType::U32, &[rows, k])?;
    Ok(rows * k / count)
}

/// As [`crate::ops::sort_choices`].
pub(in crate::ops) fn sort_choices(
    experts: &Experts,
    x: &Tensor,
    ids: &Tensor,
) -> Result<SortedChoices> {
    let of_expert = sizes(experts, x, ids)?;
    let (products, tile_rows) = if hopper::fits(experts, x) {
        let shape = hopper::Shape::of(of_expert);
        (Products::Hopper(shape), shape.rows)
    } else {
        let tiling = Tiling::of(x.dtype(), of_expert < FEW)?;
        (Products::Tiles(tiling), tiling.rows)
    };
    let lists = sort_by_expert(ids, experts.w13.dim(0)?, tile_rows)?;
    Ok(SortedChoices { products, lists })
}

/// As [`crate::ops::routed_experts`], but an id that is no expert adds nothing.
pub(in crate::ops) fn routed_experts(
    experts: &Experts,
    x: &Tensor,
    (ids, weights): (&Tensor, &Tensor),
    sorted: &SortedChoices,
    shared: &Tensor,
) -> Result<Tensor> {
    let op = "routed-experts";
    sizes(experts, x, ids)?;
    let (dtype, (rows, h), k) = (x.dtype(), x.dims2()?, ids.dims2()?.1);
    expect(op, "weights", weights, DType::F32, &[rows, k])?;
    expect(op, "shared", shared, dtype, &[rows, h])?;
    expect(op, "place", &sorted.lists.place, DType::U32, &[rows, k])?;
    if rows == 0 {
        return output(&[0, h], dtype, x.device());
    }
    let results = match sorted.products {
        Products::Hopper(shape) => shape.results(experts, x, k, &sorted.lists)?,
        Products::Tiles(tiling) => tiling.results(experts, x, k, &sorted.lists)?,
    };
    combine(&results, &sorted.lists.place, weights, shared)
}

/// Choices of an expert, on average, below which most rows of taller tiles would be pad rows.
const FEW: usize = 16;

/// The tiles of a grouped product: those of the kernel of that name. Results are the same in all, and in
/// those of [`hopper`], so the choice is one of speed.
#[derive(Clone, Copy, Debug)]
struct Tiling {
    kernel: Kernel,
    threads: u32,
    rows: usize,
    columns: usize,
}

impl Tiling {
    fn of(dtype: DType, low: bool) -> Result<Self> {
        let kernel = if low { GEMM_16 } else { GEMM_64 }.of(dtype)?;
        let (threads, columns) = match (dtype, low) {
            (DType::BF16, true) => (128, 64),
            (DType::BF16, false) => (128, 128),
            _ => (256, 64),
        };
        Ok(Self {
            kernel,
            threads,
            rows: if low { 16 } else { 64 },
            columns,
        })
    }

    /// Each choice's result, by place.
    fn results(self, experts: &Experts, x: &Tensor, k: usize, sorted: &Sorted) -> Result<Tensor> {
        let hidden = self.multiply(sorted, x, Rows::OfChoices { k }, &experts.w13)?;
        let product = super::swiglu(&hidden, experts.limit)?;
        self.multiply(sorted, &product, Rows::Sorted, &experts.w2)
    }
}

/// Choices `[rows · k]` by expert, and the tiles of that list.
#[derive(Debug)]
struct Sorted {
    /// u32 `[choices]`: the choice at each place.
    order: Tensor,
    /// u32 `[rows, k]`: the place of each choice.
    place: Tensor,
    /// u32 `[slots, 3]`: expert, first place, places.
    tiles: Tensor,
}

/// The row of the left factor at each place.
#[derive(Clone, Copy)]
enum Rows {
    /// The one that chose, of `[rows, inner]`.
    OfChoices { k: usize },
    /// The one of that place, of `[choices, inner]`.
    Sorted,
}

impl Rows {
    /// How many there are, and how many places each serves.
    fn shape(self, choices: usize) -> (usize, usize) {
        match self {
            Self::OfChoices { k } => (choices / k, k),
            Self::Sorted => (choices, 1),
        }
    }

    /// The list of a kernel, which is the address `order` or none.
    fn list(self, order: u64) -> u64 {
        match self {
            Self::OfChoices { .. } => order,
            Self::Sorted => 0,
        }
    }
}

kernel_args! {
    struct SortArgs {
        ids: u64, order: u64, place: u64, tiles: u64,
        choices: u32, experts: u32, tile_rows: u32, slots: u32,
    }
}

/// Sorts for tiles of up to `tile_rows` places.
fn sort_by_expert(ids: &Tensor, experts: usize, tile_rows: usize) -> Result<Sorted> {
    let (choices, device) = (ids.elem_count(), ids.device());
    // The most tiles that there can be: every expert's last may have one place only.
    let slots = (choices + (tile_rows - 1) * experts.min(choices)) / tile_rows;
    let sorted = Sorted {
        order: output(&[choices], DType::U32, device)?,
        place: output(ids.dims(), DType::U32, device)?,
        tiles: output(&[slots, 3], DType::U32, device)?,
    };
    if choices == 0 {
        return Ok(sorted);
    }
    let written = [
        ("order", &sorted.order),
        ("place", &sorted.place),
        ("tiles", &sorted.tiles),
    ];
    let tensors = tensors("sort-by-expert", &[("ids", ids)], &written)?;
    let grid = grid(experts, BLOCK, experts * size_of::<u32>())?;
    let (choices, experts) = (count(choices)?, count(experts)?);
    let (tile_rows, slots) = (count(tile_rows)?, count(slots)?);
    // SAFETY: one block of 256 threads per expert, with a shared counter for each; `order` and
    // `place` have as many entries as `ids`, and `tiles` as many as there can be. Ids are compared
    // with the number of experts.
    unsafe {
        run(SORT, &tensors, grid, |a| SortArgs {
            ids: a[0],
            order: a[1],
            place: a[2],
            tiles: a[3],
            choices,
            experts,
            tile_rows,
            slots,
        })
    }?;
    Ok(sorted)
}

kernel_args! {
    struct GroupedGemmArgs {
        x: u64, order: u64, weights: u64, tiles: u64, out: u64,
        k: u32, inner: u32, width: u32, column_tiles: u32,
    }
}

impl Tiling {
    /// `[choices, width]`: at each place, a row of `x` times the matrix of its expert, of `weights`
    /// `[E, width, inner]`. Places that no valid choice has are not written.
    fn multiply(self, sorted: &Sorted, x: &Tensor, rows: Rows, weights: &Tensor) -> Result<Tensor> {
        let op = "grouped-gemm";
        let choices = sorted.order.elem_count();
        let (_, width, inner) = weights.dims3()?;
        let (x_rows, k) = rows.shape(choices);
        expect(op, "x", x, weights.dtype(), &[x_rows, inner])?;
        let out = output(&[choices, width], x.dtype(), x.device())?;
        let read = [
            ("x", x),
            ("order", &sorted.order),
            ("weights", weights),
            ("tiles", &sorted.tiles),
        ];
        let tensors = tensors(op, &read, &[("out", &out)])?;
        let column_tiles = width.div_ceil(self.columns);
        let grid = grid(sorted.tiles.dim(0)? * column_tiles, self.threads, 0)?;
        let (k, inner, width) = (count(k)?, count(inner)?, count(width)?);
        let column_tiles = count(column_tiles)?;
        // SAFETY: blocks of the kernel's number of threads, one for each slot and tile of columns.
        // Tiles are those of the sort: their experts are of `weights`, for whose number it was given
        // the same count, their places are of `out`, and `order` has choices of rows of `x`. Rows and
        // columns beyond a tile or a matrix are compared.
        unsafe {
            run(self.kernel, &tensors, grid, |a| GroupedGemmArgs {
                x: a[0],
                order: rows.list(a[1]),
                weights: a[2],
                tiles: a[3],
                out: a[4],
                k,
                inner,
                width,
                column_tiles,
            })
        }?;
        Ok(out)
    }
}

kernel_args! {
    struct CombineArgs {
        results: u64, place: u64, weights: u64, shared: u64, out: u64,
        k: u32, h: u32, row_blocks: u32, pad: u32,
    }
}

/// The shared expert's result plus the weighted ones of `[choices, h]`, in the order of the choices.
fn combine(results: &Tensor, place: &Tensor, weights: &Tensor, shared: &Tensor) -> Result<Tensor> {
    let op = "combine-experts";
    let ((rows, h), k) = (shared.dims2()?, place.dims2()?.1);
    expect(op, "results", results, shared.dtype(), &[rows * k, h])?;
    let out = output(&[rows, h], shared.dtype(), shared.device())?;
    let read = [
        ("results", results),
        ("place", place),
        ("weights", weights),
        ("shared", shared),
    ];
    let tensors = tensors(op, &read, &[("out", &out)])?;
    let kernel = COMBINE.of(shared.dtype())?;
    let block = 128;
    let row_blocks = wide_threads(shared.dtype(), h).div_ceil(block);
    let grid = grid(rows * row_blocks, block as u32, 0)?;
    let (k, h, row_blocks) = (count(k)?, count(h)?, count(row_blocks)?);
    // SAFETY: a thread for every 16 bytes of a row, whose h values the kernel compares with; places are
    // those of the sort, rows of `results` or NONE.
    unsafe {
        run(kernel, &tensors, grid, |a| CombineArgs {
            results: a[0],
            place: a[1],
            weights: a[2],
            shared: a[3],
            out: a[4],
            k,
            h,
            row_blocks,
            pad: 0,
        })
    }?;
    Ok(out)
}
