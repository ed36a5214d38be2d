//! Hyper-connections (mHC): how the residual streams are read, mixed and written.

use candle_core::{Result, Tensor};
use rayon::prelude::*;

use super::{
    Act, Linear, cuda, f32s,
    fp::{inverse_rms, sigmoid},
    from_f32s,
    norm::norm_row,
    view::ROWS_PER_TASK,
};

/// Streams of the released model, and the most that this implementation mixes.
pub(crate) const MAX_STREAMS: usize = 8;

/// The weights of one mixing site.
#[derive(Debug, Clone)]
pub(crate) struct Mix {
    /// `[(2 + n) · n, n · h]`.
    pub(crate) project: Linear,
    /// `[(2 + n) · n]`.
    pub(crate) base: Tensor,
    /// `[3]`: one gain each for pre, post and comb.
    pub(crate) scale: Tensor,
    /// `n`.
    pub(crate) streams: usize,
    /// Sinkhorn iterations.
    pub(crate) iterations: usize,
    /// Added to softmax, sigmoid and every divisor.
    pub(crate) eps: f64,
    /// Epsilon of the RMS.
    pub(crate) norm_eps: f64,
}

/// The coefficients of a site for every row: `pre` `[rows, n]`, and `post` and `comb` side by
/// side, `[rows, n + n²]` (`comb[input stream][output stream]`).
///
/// `streams` is `[rows, n, h]`.
pub(crate) fn mix(site: &Mix, streams: &Tensor) -> Result<(Tensor, Tensor)> {
    if streams.device().is_cuda() {
        return cuda::mix(site, streams);
    }
    let n = site.streams;
    let (rows, _, h) = streams.dims3()?;
    let flat = streams.flatten_from(1)?;
    let raw = site.project.forward(&flat, Act::F32)?;
    let (raw, flat, base, scale) = (
        f32s(&raw)?,
        f32s(&flat)?,
        f32s(&site.base)?,
        f32s(&site.scale)?,
    );
    let width = n * h;
    let mut pre = vec![0f32; rows * n];
    let mut rest = vec![0f32; rows * (n + n * n)];
    pre.par_chunks_mut(n)
        .zip(rest.par_chunks_mut(n + n * n))
        .zip(raw.par_chunks((2 + n) * n).zip(flat.par_chunks(width)))
        .with_min_len(ROWS_PER_TASK)
        .for_each(|((pre, rest), (raw, row))| {
            let inv = inverse_rms(row, site.norm_eps as f32);
            let value = |i: usize, part: usize| raw[i] * inv * scale[part] + base[i];
            for (i, pre) in pre.iter_mut().enumerate() {
                *pre = sigmoid(value(i, 0)) + site.eps as f32;
            }
            let (post, comb) = rest.split_at_mut(n);
            for (i, post) in post.iter_mut().enumerate() {
                *post = 2.0 * sigmoid(value(n + i, 1));
            }
            for (i, comb) in comb.iter_mut().enumerate() {
                *comb = value(2 * n + i, 2);
            }
            if n == 4 {
                sinkhorn::<4>(comb, n, site.iterations, site.eps as f32);
            } else {
                sinkhorn::<MAX_STREAMS>(comb, n, site.iterations, site.eps as f32);
            }
        });
    Ok((
        from_f32s(pre, (rows, n))?,
        from_f32s(rest, (rows, n + n * n))?,
    ))
}

/// Makes `comb` (`n x n`, row-major) close to doubly stochastic: softmax over rows, then columns
/// and rows are divided by their sums in turn. `N >= n` fixes the loop lengths; cells beyond `n`
/// are zero and stay zero.
fn sinkhorn<const N: usize>(comb: &mut [f32], n: usize, iterations: usize, eps: f32) {
    let mut m = [[0f32; N]; N];
    for i in 0..n {
        let row = &comb[i * n..(i + 1) * n];
        let top = row.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
        let sum: f32 = row.iter().map(|x| (x - top).exp()).sum();
        for j in 0..n {
            m[i][j] = (row[j] - top).exp() / sum + eps;
        }
    }
    divide_columns(&mut m, eps);
    for _ in 1..iterations {
        for row in &mut m {
            let inv = 1.0 / (row.iter().sum::<f32>() + eps);
            row.iter_mut().for_each(|x| *x *= inv);
        }
        divide_columns(&mut m, eps);
    }
    for i in 0..n {
        comb[i * n..(i + 1) * n].copy_from_slice(&m[i][..n]);
    }
}

#[inline]
fn divide_columns<const N: usize>(m: &mut [[f32; N]; N], eps: f32) {
    let mut inv = [0f32; N];
    for row in m.iter() {
        for (sum, x) in inv.iter_mut().zip(row) {
            *sum += x;
        }
    }
    for sum in &mut inv {
        *sum = 1.0 / (*sum + eps);
    }
    for row in m {
        for (x, inv) in row.iter_mut().zip(&inv) {
            *x *= inv;
        }
    }
}

/// The input of a sublayer: `rmsnorm(Σ_j pre[j] · streams[j]) · weight`, `[rows, h]`.
///
/// `streams` is `[rows, n, h]`, `pre` is `[rows, n]`: the coefficients of the sublayer *before*.
pub(crate) fn collapse_norm(
    streams: &Tensor,
    pre: &Tensor,
    weight: &Tensor,
    eps: f64,
    act: Act,
) -> Result<Tensor> {
    if streams.device().is_cuda() {
        return cuda::collapse_norm(streams, pre, weight, eps);
    }
    let (rows, n, h) = streams.dims3()?;
    let (values, pre, weight) = (f32s(streams)?, f32s(pre)?, f32s(weight)?);
    let mut out = vec![0f32; rows * h];
    out.par_chunks_mut(h)
        .zip(values.par_chunks(n * h).zip(pre.par_chunks(n)))
        .with_min_len(ROWS_PER_TASK)
        .for_each_init(
            || vec![0f32; h],
            |sum, (out, (streams, pre))| {
                sum.fill(0.0);
                for (stream, pre) in streams.chunks_exact(h).zip(pre) {
                    for (sum, x) in sum.iter_mut().zip(stream) {
                        *sum += pre * x;
                    }
                }
                act.store_all(sum);
                norm_row(out, sum, &weight, eps as f32, act);
            },
        );
    from_f32s(out, (rows, h))
}

/// Writes a sublayer's output back: `S'[j] = post[j] · y + Σ_i comb[i][j] · S[i]`, `[rows, n, h]`.
///
/// `y` is `[rows, h]`, `streams` `[rows, n, h]`, `post_comb` as [`mix`] makes it.
pub(crate) fn expand(y: &Tensor, streams: &Tensor, post_comb: &Tensor, act: Act) -> Result<Tensor> {
    if streams.device().is_cuda() {
        return cuda::expand(y, streams, post_comb);
    }
    let (rows, n, h) = streams.dims3()?;
    let (y, values, coefficients) = (f32s(y)?, f32s(streams)?, f32s(post_comb)?);
    let mut out = vec![0f32; rows * n * h];
    out.par_chunks_mut(n * h)
        .zip(y.par_chunks(h).zip(values.par_chunks(n * h)))
        .zip(coefficients.par_chunks(n + n * n))
        .with_min_len(ROWS_PER_TASK)
        .for_each(|((out, (y, streams)), coefficients)| {
            let (post, comb) = coefficients.split_at(n);
            for (j, out) in out.chunks_exact_mut(h).enumerate() {
                for (out, y) in out.iter_mut().zip(y) {
                    *out = post[j] * y;
                }
                for (i, stream) in streams.chunks_exact(h).enumerate() {
                    let weight = comb[i * n + j];
                    for (out, x) in out.iter_mut().zip(stream) {
                        *out += weight * x;
                    }
                }
                act.store_all(out);
            }
        });
    from_f32s(out, (rows, n, h))
}

/// [`expand`], and of its result [`collapse_norm`] with the coefficients `pre`: the streams
/// `[rows, n, h]`, and the next sublayer's input `[rows, h]`.
pub(crate) fn expand_norm(
    y: &Tensor,
    streams: &Tensor,
    post_comb: &Tensor,
    pre: &Tensor,
    weight: &Tensor,
    eps: f64,
    act: Act,
) -> Result<(Tensor, Tensor)> {
    if streams.device().is_cuda() && cuda::expands_and_norms(streams)? {
        return cuda::expand_norm(y, streams, post_comb, pre, weight, eps);
    }
    let streams = expand(y, streams, post_comb, act)?;
    let normed = collapse_norm(&streams, pre, weight, eps, act)?;
    Ok((streams, normed))
}
