//! RMS norm.

use candle_core::{Result, Tensor};
use rayon::prelude::*;

use super::{Act, cuda, f32s, fp::inverse_rms, from_f32s, view::ROWS_PER_TASK};

/// `x · weight / sqrt(mean(x²) + eps)` over the last axis, in f32, stored once.
///
/// `x` is `[rows, width]`, `weight` is `[width]`.
pub(crate) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64, act: Act) -> Result<Tensor> {
    if x.device().is_cuda() {
        return cuda::rms_norm(x, weight, eps);
    }
    let (values, weight) = (f32s(x)?, f32s(weight)?);
    let width = weight.len();
    let mut out = vec![0f32; values.len()];
    out.par_chunks_mut(width)
        .zip(values.par_chunks(width))
        .with_min_len(ROWS_PER_TASK)
        .for_each(|(out, x)| norm_row(out, x, &weight, eps as f32, act));
    from_f32s(out, x.shape())
}

/// One row of [`rms_norm`].
pub(crate) fn norm_row(out: &mut [f32], x: &[f32], weight: &[f32], eps: f32, act: Act) {
    let inv = inverse_rms(x, eps);
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = act.store(x * inv * weight);
    }
}
