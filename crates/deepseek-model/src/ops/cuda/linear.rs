//! Products of activations with weight matrices: by cuBLAS, and of a few bf16 rows with f32 matrices by
//! a kernel that reads both as they are.
#![allow(unsafe_code)]

use candle_core::{DType, Result, Tensor};
use replay_cuda::kernel::Kernel;

use super::{
    grouped::grouped_product,
    launch::{count, expect, grid, kernel, kernel_args, output, run, tensors, threads},
};
use crate::ops::Act;

const FEW_PRODUCTS: Kernel = kernel!("linear", LINEAR, "few_products");
const WIDEN: Kernel = kernel!("linear", LINEAR, "widen");

/// Rows up to which the kernel is faster than a copy in f32 and cuBLAS: it takes 4 at a time, and reads
/// the matrix as often.
const FEW_ROWS: usize = 8;

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
    let widens = x.dtype() == DType::BF16 && weight.dtype() == DType::F32;
    if widens && groups == 1 && rows <= FEW_ROWS {
        return few_products(x, weight)?.to_dtype(act.dtype());
    }
    let x = if widens {
        widen(x)?
    } else {
        x.to_dtype(weight.dtype())?
    };
    let y = if groups == 1 {
        x.matmul(&weight.t()?)?
    } else {
        grouped_product(&x, weight, groups)?
    };
    y.to_dtype(act.dtype())
}

kernel_args! {
    struct FewProductsArgs {
        x: u64, weight: u64, out: u64, rows: u32, inner: u32, width: u32, pad: u32,
    }
}

/// `x` `[rows, inner]` (bf16) by `weight` `[width, inner]` (f32): `[rows, width]`, f32.
fn few_products(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let op = "few-products";
    let ((rows, inner), width) = (x.dims2()?, weight.dim(0)?);
    expect(op, "x", x, DType::BF16, &[rows, inner])?;
    expect(op, "weight", weight, DType::F32, &[width, inner])?;
    let out = output(&[rows, width], DType::F32, x.device())?;
    let tensors = tensors(op, &[("x", x), ("weight", weight)], &[("out", &out)])?;
    let warps = 4;
    let grid = grid(width.div_ceil(warps), 32 * warps as u32, 0)?;
    let (rows, inner, width) = (count(rows)?, count(inner)?, count(width)?);
    // SAFETY: a warp for each column, which the kernel compares with the width, as it compares rows and
    // channels with the counts here: those of the tensors.
    unsafe {
        run(FEW_PRODUCTS, &tensors, grid, |a| FewProductsArgs {
            x: a[0],
            weight: a[1],
            out: a[2],
            rows,
            inner,
            width,
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
