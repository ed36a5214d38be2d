//! Products of activations with weight matrices: by cuBLAS, of a few bf16 rows by a kernel that reads both as
//! they are, and of more bf16 rows with few columns of f32, as in a router, on tensor cores.
#![allow(unsafe_code)]

use candle_core::{DType, Result, Tensor};
use replay_cuda::kernel::Kernel;

use super::{
    grouped::grouped_product,
    launch::{
        ByAct, by_act, count, expect, grid, kernel, kernel_args, output, run, tensors, threads,
    },
    mix_tiles,
};
use crate::ops::Act;

const FEW_PRODUCTS: ByAct = by_act!("linear", LINEAR, "few_products");
const FEW_COLUMNS: ByAct = by_act!("linear", LINEAR, "few_columns");
const ADD_PARTS: Kernel = kernel!("linear", LINEAR, "add_parts");
const WIDEN: Kernel = kernel!("linear", LINEAR, "widen");

/// Columns below which a warp for each leaves a large device without work: they get a block each.
const FEW_COLUMNS_BELOW: usize = 1056;

/// Whether the kernels are faster than cuBLAS. They take up to 4 rows at a time, and read the matrix as
/// often; they win where cuBLAS needs a copy of the rows in f32, or where it shares the channels of few
/// columns out and adds the parts up in a launch of its own. It reads large matrices a little faster.
fn are_few(rows: usize, weight: &Tensor) -> Result<bool> {
    const WEIGHTS: usize = 24 << 20;
    Ok(match weight.dtype() {
        DType::F32 => rows <= 8,
        DType::BF16 if weight.dim(0)? < FEW_COLUMNS_BELOW => rows <= 4,
        DType::BF16 => rows == 1 && weight.elem_count() <= WEIGHTS,
        _ => false,
    })
}

/// Who makes a product.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Few,
    Parts,
    Library,
}

impl Way {
    fn of(x: &Tensor, weight: &Tensor, groups: usize) -> Result<Self> {
        let rows = x.dim(0)?;
        if !x.is_contiguous() || !weight.is_contiguous() || x.dtype() != DType::BF16 {
            return Ok(Self::Library);
        }
        if are_few(rows, weight)? {
            return Ok(Self::Few);
        }
        let parts = groups == 1 && mix_tiles::fits(weight, x) && are_parts_few(rows, weight)?;
        Ok(if parts { Self::Parts } else { Self::Library })
    }
}

/// As [`Linear::has_own_kernel`](crate::ops::Linear::has_own_kernel).
pub(in crate::ops) fn has_own_kernel(x: &Tensor, weight: &Tensor) -> Result<bool> {
    Ok(x.dim(0)? == 0 || Way::of(x, weight, 1)? != Way::Library)
}

/// As [`crate::ops::grouped_linear`]. The product is one of the matrix's dtype, with f32 sums.
pub(in crate::ops) fn grouped_linear(
    x: &Tensor,
    weight: &Tensor,
    groups: usize,
    act: Act,
) -> Result<Tensor> {
    let rows = x.dim(0)?;
    if rows == 0 {
        return output(&[0, weight.dim(0)?], act.dtype(), x.device());
    }
    let y = match Way::of(x, weight, groups)? {
        Way::Few => few_products(x, weight, groups)?,
        Way::Parts => add_parts(x, weight)?,
        Way::Library => {
            let x = if x.dtype() == DType::BF16 && weight.dtype() == DType::F32 {
                widen(x)?
            } else {
                x.to_dtype(weight.dtype())?
            };
            if groups == 1 {
                x.matmul(&weight.t()?)?
            } else {
                grouped_product(&x, weight, groups)?
            }
        }
    };
    y.to_dtype(act.dtype())
}

/// Channels of a part of a product that [`add_parts`] adds up: five stages of the kernel.
const PART: usize = 320;

/// Whether the parts of a product with an f32 matrix, one for every [`PART`] channels, are few enough to be
/// written and read again: up to 64 Ki results. cuBLAS splits such products up as well.
fn are_parts_few(rows: usize, weight: &Tensor) -> Result<bool> {
    Ok(rows * weight.dim(0)? <= 64 << 10)
}

kernel_args! {
    struct FewProductsArgs {
        x: u64, weight: u64, out: u64, rows: u32, inner: u32, width: u32, groups: u32,
    }
}

/// `x` `[rows, groups · inner]` (bf16) by `weight` `[width, inner]` (f32 or bf16), of whose rows each group
/// has as many: `[rows, width]`, of the matrix's dtype.
fn few_products(x: &Tensor, weight: &Tensor, groups: usize) -> Result<Tensor> {
    let op = "few-products";
    let (rows, (width, inner)) = (x.dim(0)?, weight.dims2()?);
    if groups == 0 || !width.is_multiple_of(groups) {
        candle_core::bail!("{op}: cannot share {width} rows of a matrix among {groups} groups");
    }
    expect(op, "x", x, DType::BF16, &[rows, groups * inner])?;
    let out = output(&[rows, width], weight.dtype(), x.device())?;
    let tensors = tensors(op, &[("x", x), ("weight", weight)], &[("out", &out)])?;
    let warps = 4;
    let (kernel, blocks) = if width < FEW_COLUMNS_BELOW {
        (FEW_COLUMNS, width)
    } else {
        (FEW_PRODUCTS, width.div_ceil(warps))
    };
    let kernel = kernel.of(weight.dtype())?;
    let grid = grid(blocks, 32 * warps as u32, 0)?;
    let (rows, inner, width) = (count(rows)?, count(inner)?, count(width)?);
    let groups = count(groups)?;
    // SAFETY: a warp or a block for each column, which the kernel compares with the width, as it compares
    // rows and channels with the counts here: those of the tensors. A column's group is one of `groups`,
    // whose channels every row of `x` has.
    unsafe {
        run(kernel, &tensors, grid, |a| FewProductsArgs {
            x: a[0],
            weight: a[1],
            out: a[2],
            rows,
            inner,
            width,
            groups,
        })
    }?;
    Ok(out)
}

kernel_args! {
    struct AddPartsArgs { parts: u64, out: u64, segments: u32, rows: u32, columns: u32, pad: u32 }
}

/// `x` `[rows, inner]` (bf16) by `weight` `[width, inner]` (f32), for which [`mix_tiles`] fits: `[rows, width]`
/// (f32). A row's sums are taken in one order, whatever the number of rows.
fn add_parts(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let op = "add-parts";
    let (rows, (columns, inner)) = (x.dim(0)?, weight.dims2()?);
    let (segments, parts) = (inner.div_ceil(PART), mix_tiles::sums(weight, x, PART)?);
    expect(
        op,
        "parts",
        &parts,
        DType::F32,
        &[segments * rows, columns + 1],
    )?;
    let out = output(&[rows, columns], DType::F32, x.device())?;
    let tensors = tensors(op, &[("parts", &parts)], &[("out", &out)])?;
    let grid = threads(rows * columns)?;
    let (segments, rows, columns) = (count(segments)?, count(rows)?, count(columns)?);
    // SAFETY: a thread for each value of `out`, which the kernel compares with its rows; `parts` has as
    // many for each segment, and one more a row.
    unsafe {
        run(ADD_PARTS, &tensors, grid, |a| AddPartsArgs {
            parts: a[0],
            out: a[1],
            segments,
            rows,
            columns,
            pad: 0,
        })
    }?;
    Ok(out)
}

kernel_args! {
    struct WidenArgs { x: u64, out: u64, count: u64 }
}

/// The values of `x` (bf16) in f32.
fn widen(x: &Tensor) -> Result<Tensor> {
    let op = "widen";
    expect(op, "x", x, DType::BF16, x.dims())?;
    let out = output(x.dims(), DType::F32, x.device())?;
    let tensors = tensors(op, &[("x", x)], &[("out", &out)])?;
    let values = x.elem_count();
    let grid = threads(values.div_ceil(8))?;
    // SAFETY: a thread for every eight values of two tensors of that many, which the kernel compares
    // with.
    unsafe {
        run(WIDEN, &tensors, grid, |a| WidenArgs {
            x: a[0],
            out: a[1],
            count: values as u64,
        })
    }?;
    Ok(out)
}
