//! Products of activations with weight matrices, by cuBLAS.

use candle_core::{Result, Tensor};

use super::{grouped::grouped_product, launch::output};
use crate::ops::Act;

/// As [`crate::ops::grouped_linear`]. The product is one of the matrix's dtype, with f32 sums.
pub(in crate::ops) fn grouped_linear(
    x: &Tensor,
    weight: &Tensor,
    groups: usize,
    act: Act,
) -> Result<Tensor> {
    if x.dim(0)? == 0 {
        return output(&[0, weight.dim(0)?], act.dtype(), x.device());
    }
    let x = x.to_dtype(weight.dtype())?;
    let y = if groups == 1 {
        x.matmul(&weight.t()?)?
    } else {
        grouped_product(&x, weight, groups)?
    };
    y.to_dtype(act.dtype())
}
