//! The grouped products on Hopper's own tensor instructions.
#![allow(unsafe_code)]

use candle_core::{
    DType, Device, Result, Tensor,
    cuda_backend::{
        WrapErr, cudarc::driver::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
    },
};
use replay_cuda::kernel::Kernel;

use super::{Rows, Sorted};
use crate::{
    device::{KernelTarget, Version},
    ops::{
        Experts,
        cuda::{
            ffn::clamp,
            launch::{count, expect, grid, kernel, kernel_args, output, ptx, run, tensors},
        },
    },
};

/// The products in tiles of some shape, and the same with the swiglu of their results.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    plain: Kernel,
    swiglu: Kernel,
    /// Places of a tile.
    pub(super) rows: usize,
    /// Heights that a tile may have, the greatest first: rows of an expert's matrix.
    heights: &'static [usize],
    /// Stages of shared memory, each of [`STEP`] values of every place and row.
    stages: usize,
    threads: u32,
    /// Blocks of a multiprocessor, as far as its shared memory goes.
    blocks: usize,
}

/// Where experts have few rows each, so that memory decides: small tiles, for which all multiprocessors
/// read all the time.
const LOW: Shape = Shape {
    plain: kernel!("experts_hopper_few", EXPERTS_HOPPER_FEW, "hopper_low"),
    swiglu: kernel!(
        "experts_hopper_few",
        EXPERTS_HOPPER_FEW,
        "hopper_low_swiglu"
    ),
    rows: 32,
    heights: &[64],
    stages: 9,
    threads: 256,
    blocks: 2,
};

/// Where they have more, and memory still decides. Heights are whole warps' rows; below 128 the places of a
/// tile would be as many as its rows.
const TALL: Shape = Shape {
    plain: kernel!("experts_hopper_few", EXPERTS_HOPPER_FEW, "hopper_tall"),
    swiglu: kernel!(
        "experts_hopper_few",
        EXPERTS_HOPPER_FEW,
        "hopper_tall_swiglu"
    ),
    rows: 96,
    heights: &[192, 176, 160, 144, 128],
    stages: 6,
    threads: 512,
    blocks: 1,
};

/// Where they have so many that products decide.
const MANY: Shape = Shape {
    plain: kernel!("experts_hopper", EXPERTS_HOPPER, "hopper_gemm"),
    swiglu: kernel!("experts_hopper", EXPERTS_HOPPER, "hopper_gemm_swiglu"),
    rows: 128,
    heights: &[256],
    stages: 4,
    threads: 384,
    blocks: 1,
};

/// Choices of an expert, on average, below which hardly one has more than a low tile has places. The matrix
/// of one that has is read twice.
const FEW: usize = 16;

/// Values that are multiplied at a time.
const STEP: usize = 64;

impl Shape {
    /// The one for so many choices of an expert, on average. If that is more than a tall tile has places, most
    /// matrices are loaded twice, and products no longer wait for the memory.
    pub(super) fn of(of_expert: usize) -> Self {
        match of_expert {
            ..FEW => LOW,
            n if n <= TALL.rows => TALL,
            _ => MANY,
        }
    }

    /// Every stage with two barriers, from the first multiple of 1024 on.
    const fn shared(self) -> usize {
        self.stages * ((self.rows + self.heights[0]) * STEP * 2 + 2 * 8) + 1024
    }
}

/// Whether the build is for Hopper, and so has the kernels. Kernels for `sm_90a` run on nothing else, so
/// the device need not be asked, neither for its capability nor for its shared memory.
fn built() -> bool {
    let arch = KernelTarget::of(ptx::EXPERTS_HOPPER).arch;
    arch.is_some_and(|arch| arch.capability == Version::new(9, 0) && arch.suffix == Some('a'))
}

/// Whether the kernels can make the products: in bf16, of widths in whole steps and of aligned rows.
pub(super) fn fits(experts: &Experts, x: &Tensor) -> bool {
    let tensors = [x, &experts.w13, &experts.w2];
    let whole = |t: &Tensor| t.dims().last().is_some_and(|n| n.is_multiple_of(STEP));
    // Memory that a device hands out is aligned to far more than 16 bytes.
    let aligned = |t: &Tensor| t.layout().start_offset().is_multiple_of(8);
    let fit = |t: &Tensor| t.dtype() == DType::BF16 && whole(t) && aligned(t);
    tensors.into_iter().all(fit) && built()
}

impl Shape {
    /// Each choice's result, by place, of choices that were sorted for tiles of as many rows.
    pub(super) fn results(
        self,
        experts: &Experts,
        x: &Tensor,
        k: usize,
        sorted: &Sorted,
    ) -> Result<Tensor> {
        let rows = Rows::OfChoices { k };
        let product = self.multiply(sorted, x, rows, &experts.w13, Some(experts.limit))?;
        self.multiply(sorted, &product, Rows::Sorted, &experts.w2, None)
    }
}

kernel_args! {
    struct GroupedGemmArgs {
        x: u64, order: u64, weights: u64, tiles: u64, out: u64,
        k: u32, inner: u32, width: u32, slots: u32, column_tiles: u32, limit: f32, height: u32,
        pad: u32,
    }
}

impl Shape {
    /// `[choices, width]`: at each place, a row of `x` times the matrix of its expert, of `weights`
    /// `[E, width, inner]`; or `[choices, width / 2]`, the swiglu of that with a limit. Places that no valid
    /// choice has are not written.
    fn multiply(
        self,
        sorted: &Sorted,
        x: &Tensor,
        rows: Rows,
        weights: &Tensor,
        swiglu: Option<f64>,
    ) -> Result<Tensor> {
        let op = "grouped-gemm";
        let (choices, slots) = (sorted.order.elem_count(), sorted.tiles.dim(0)?);
        let (_, width, inner) = weights.dims3()?;
        let (x_rows, k) = rows.shape(choices);
        expect(op, "x", x, DType::BF16, &[x_rows, inner])?;
        let (kernel, out_width, limit) = match swiglu {
            Some(limit) => (self.swiglu, width / 2, clamp(limit)),
            None => (self.plain, width, f32::INFINITY),
        };
        let out = output(&[choices, out_width], DType::BF16, x.device())?;
        let read = [
            ("x", x),
            ("order", &sorted.order),
            ("weights", weights),
            ("tiles", &sorted.tiles),
        ];
        let tensors = tensors(op, &read, &[("out", &out)])?;
        // As many blocks as there is room for, each of which computes one tile after the other.
        let room = self.blocks * multiprocessors(x.device())?;
        let height = self.height(choices, weights.dim(0)?, width, room);
        let column_tiles = width.div_ceil(height);
        let tiles = slots * column_tiles;
        let blocks = tiles.min(room);
        // A block counts on to the first tile that is none.
        count(tiles + blocks)?;
        let grid = grid(blocks, self.threads, self.shared())?;
        let (k, inner, width) = (count(k)?, count(inner)?, count(width)?);
        let (slots, column_tiles, height) = (count(slots)?, count(column_tiles)?, count(height)?);
        // SAFETY: blocks of the kernel's number of threads with the shared memory it lays out; any number of
        // them computes all tiles. Tiles are those of the sort: their experts are of `weights`, for whose
        // number it was given the same count, their places are of `out`, and `order` has choices of rows of
        // `x`. Rows and columns beyond a tile or a matrix are compared. Widths are multiples of 64 and
        // addresses of 16, as `fits` has asked; the height is one that the kernel takes, a multiple of 16.
        unsafe {
            run(kernel, &tensors, grid, |a| GroupedGemmArgs {
                x: a[0],
                order: rows.list(a[1]),
                weights: a[2],
                tiles: a[3],
                out: a[4],
                k,
                inner,
                width,
                slots,
                column_tiles,
                limit,
                height,
                pad: 0,
            })
        }?;
        Ok(out)
    }

    /// The height of tiles with which a block loads least, in as many tiles as the one that has most, if no
    /// expert has more places than a tile. `room` blocks run at a time.
    fn height(self, choices: usize, experts: usize, width: usize, room: usize) -> usize {
        let used = experts.min(choices);
        let loads = |height: usize| {
            let tiles = (used * width.div_ceil(height)).div_ceil(room);
            tiles * (height + (choices / used).min(self.rows))
        };
        let heights = self.heights.iter().copied();
        heights.min_by_key(|height| loads(*height)).unwrap_or(STEP)
    }
}

fn multiprocessors(device: &Device) -> Result<usize> {
    let stream = device.as_cuda_device()?.cuda_stream();
    let asked = stream
        .context()
        .attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    let n = asked.w()?;
    usize::try_from(n).map_err(candle_core::Error::wrap)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpu_hopper_has_its_kernels() {
        let kernels = [
            ("hopper_gemm", ptx::EXPERTS_HOPPER),
            ("hopper_gemm_swiglu", ptx::EXPERTS_HOPPER),
            ("hopper_low", ptx::EXPERTS_HOPPER_FEW),
            ("hopper_low_swiglu", ptx::EXPERTS_HOPPER_FEW),
            ("hopper_tall", ptx::EXPERTS_HOPPER_FEW),
            ("hopper_tall_swiglu", ptx::EXPERTS_HOPPER_FEW),
        ];
        for (name, ptx) in kernels {
            let entry = format!(".entry {name}(");
            assert_eq!(ptx.contains(&entry), built(), "{name}");
        }
    }

    /// Heights by hand: tiles of the block that has most, times their rows and places.
    #[test]
    fn gpu_tiles_are_as_high_as_fills_all_blocks() {
        let of = |shape: Shape, choices, width| shape.height(choices, 16, width, 132);
        // 16 experts of 48 places. Of 4,608 rows: 3 tiles of 192 (720), against 4 of 176 or 160.
        assert_eq!(of(TALL, 768, 4608), 192);
        // Of 5,120: 4 tiles of 160 (832); 5 of 128 (880), 4 of 192 (960).
        assert_eq!(of(TALL, 768, 5120), 160);
        // No tile more, so the least that is enough for one: 8 experts of 2,048 rows, 128 tiles.
        assert_eq!(TALL.height(8, 16, 2048, 132), 128);
        assert_eq!(of(LOW, 6, 4608), 64);
        assert_eq!(of(MANY, 6144, 4608), 256);
    }
}
