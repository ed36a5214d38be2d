//! Products of activations with weight matrices.

use candle_core::{Result, Tensor};

use super::{
    Act, cuda, f32s, from_f32s,
    gemm::{Mat, Threads, matmul_nt},
};

/// A weight matrix `[out, in]`, applied as `y = x · Wᵀ`.
///
/// Not candle-nn's `Linear`: with it a decode step of the demo model took 5.9 ms, and 2.0 ms without,
/// in two runs one after the other. Prefill took the same.
#[derive(Debug, Clone)]
pub(crate) struct Linear(Tensor);

impl Linear {
    /// Takes a contiguous `[out, in]` matrix: f32 on the CPU, f32 or bf16 on a device.
    pub(crate) fn new(weight: Tensor) -> Self {
        Self(weight)
    }

    /// The matrix `[out, in]`.
    pub(super) fn weight(&self) -> &Tensor {
        &self.0
    }

    /// Whether the product with `x` `[rows, in]` is made by a kernel of our own, and so may run beside another
    /// product: cuBLAS has one workspace for all that it does on a stream.
    pub(crate) fn has_own_kernel(&self, x: &Tensor) -> Result<bool> {
        if x.device().is_cuda() {
            return cuda::has_own_kernel(x, self.weight());
        }
        Ok(true)
    }

    /// `x` `[rows, in]` to `[rows, out]`.
    pub(crate) fn forward(&self, x: &Tensor, act: Act) -> Result<Tensor> {
        grouped_linear(x, self.weight(), 1, act)
    }
}

/// Splits the columns of `x` `[rows, groups · in]` into equal parts, multiplies part `g` by rows
/// `g · out ..` of `weight` `[groups · out, in]`, and joins the results: `[rows, groups · out]`.
pub(crate) fn grouped_linear(
    x: &Tensor,
    weight: &Tensor,
    groups: usize,
    act: Act,
) -> Result<Tensor> {
    let (rows, x_width) = x.dims2()?;
    let (w_rows, inner) = weight.dims2()?;
    if x_width != groups * inner || w_rows % groups != 0 {
        candle_core::bail!(
            "cannot multiply [{rows}, {x_width}] by {groups} groups of [{w_rows}, {inner}]"
        );
    }
    if x.device().is_cuda() {
        return cuda::grouped_linear(x, weight, groups, act);
    }
    let (values, weights) = (f32s(x)?, f32s(weight)?);
    let out_width = w_rows / groups;
    let mut out = vec![0f32; rows * w_rows];
    for g in 0..groups {
        let a = Mat::new(
            &values[(g * inner).min(values.len())..],
            rows,
            inner,
            x_width,
        );
        let b = Mat::dense(
            &weights[g * out_width * inner..][..out_width * inner],
            out_width,
            inner,
        );
        let start = (g * out_width).min(out.len());
        matmul_nt(&mut out[start..], w_rows, a, b, Threads::All);
    }
    act.store_all(&mut out);
    from_f32s(out, (rows, w_rows))
}
