//! Products of activations with weight matrices, by cuBLAS.

use candle_core::{Result, Tensor};

use super::launch::output;
use crate::ops::Act;

/// As [`crate::ops::grouped_linear`]. The product is one of the matrix's  with f32 sums.
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
    let (rows, (w_rows, inner)) = (x.dim(0)?, weight.dims2()?);
    let y = if groups == 1 {
        x.matmul(&weight.t()?)?
    } else {
        let x = x.reshape((rows, groups, inner))?.transpose(0, 1)?;
        let weight = weight.reshape((groups, w_rows / groups, inner))?;
        let y = x.contiguous()?.matmul(&weight.transpose(1, 2)?)?;
        y.transpose(0, 1)?.contiguous()?.reshape((rows, w_rows))?
    };
    y.to_dtype(act.dtype())
}
