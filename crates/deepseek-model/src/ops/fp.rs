//! Small floating-point loops, shaped so that the compiler vectorises them.

/// Lanes of a partial sum: enough to hide the latency of an addition.
const LANES: usize = 16;

/// `Σ x²`.
#[inline]
pub(crate) fn sum_squares(xs: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let chunks = xs.chunks_exact(LANES);
    let tail: f32 = chunks.remainder().iter().map(|x| x * x).sum();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += x * x;
        }
    }
    lanes.iter().sum::<f32>() + tail
}

/// Largest magnitude; 0 for an empty slice.
#[inline]
pub(crate) fn max_abs(xs: &[f32]) -> f32 {
    xs.iter().fold(0f32, |m, x| m.max(x.abs()))
}

/// `1 / (1 + e^-x)`.
#[inline]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `ln(1 + e^x)`, without overflow and exact for large `x`.
#[inline]
pub(crate) fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// `1 / sqrt(mean(x²) + eps)`; NaN where the squares have no finite sum.
///
/// The inverse of an infinite root is 0: a row that overflows would come out of its norm as zeros,
/// like any other row, and its logits as numbers. NaN reaches the checks of router, indexer and
/// sampler.
#[inline]
pub(crate) fn inverse_rms(xs: &[f32], eps: f32) -> f32 {
    let mean = sum_squares(xs) / xs.len() as f32 + eps;
    if mean.is_finite() {
        1.0 / mean.sqrt()
    } else {
        f32::NAN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Zeros would be normalised values like any other.
    #[test]
    fn a_row_without_a_finite_sum_of_squares_has_no_inverse() {
        for x in [1.5e19, 1e30, f32::INFINITY, f32::NAN] {
            assert!(inverse_rms(&[x; 192], 1e-20).is_nan(), "{x}");
        }
        assert!(inverse_rms(&[1e18; 192], 1e-20) > 0.0);
        assert!(inverse_rms(&[0.0; 192], 1e-20).is_finite());
    }
}
