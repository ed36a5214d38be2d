//! Products of few rows with a matrix that lies as `[out, in]`: dot products in registers.
//!
//! The `gemm` crate copies such a matrix into panels first, which takes as long for few rows as for
//! many, and for few it is most of the time. Here both operands are read where they lie, along `in`.
//!
//! Every output is summed on its own, lane by lane along `in`, and then across the lanes. So its bits
//! depend on its row, its weights and the vectors of the machine, and on nothing else: not on how many
//! rows or outputs there are, where among them it stands, or which thread computes it.

#![expect(
    clippy::inline_always,
    reason = "vectors of a machine stay in registers only within the function that is compiled for it"
)]

use std::{array, ops::RangeInclusive};

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::gemm::{Mat, Threads};

/// Numbers of rows for which this is faster than packing, by measurement (`docs/benchmarks.md`).
/// One row has a kernel of its own in `gemm`, which does not pack.
pub(super) const ROWS: RangeInclusive<usize> = 2..=32;

/// Rows that a tile of accumulators has at most.
const TILE_ROWS: usize = 4;

/// Multiplications one task does at least, some 10 µs: below this, starting it costs more.
const TASK: usize = 1 << 19;

/// Tasks for each thread: more than one, so that a thread which is held up does not hold up all.
const TASKS_PER_THREAD: usize = 2;

/// `dst = a · bᵀ`: `a` is `[m, k]`, `b` is `[n, k]`, `dst` is `[m, n]` with rows `dst_stride` apart.
///
/// # Panics
/// If the inner sizes differ or `dst` is too short.
pub(super) fn product(
    dst: &mut [f32],
    dst_stride: usize,
    a: Mat<'_>,
    b: Mat<'_>,
    threads: Threads,
) {
    let (m, n, k) = (a.rows(), b.rows(), b.cols());
    if m == 0 || n == 0 {
        return;
    }
    let per_piece = match (threads, rayon::current_num_threads()) {
        (Threads::One, _) | (_, 1) => n,
        (Threads::All, threads) => n
            .div_ceil(threads * TASKS_PER_THREAD)
            .max(TASK / (m * k).max(1))
            .max(1),
    };
    let arch = Arch::new();
    let pieces = pieces(dst, dst_stride, a, b, per_piece);
    match <[_; 1]>::try_from(pieces) {
        Ok([piece]) => arch.dispatch(piece),
        Err(pieces) => pieces
            .into_par_iter()
            .for_each(|piece| arch.dispatch(piece)),
    }
}

/// The product in pieces of `per_piece` outputs each; the last may have fewer.
fn pieces<'a>(
    dst: &'a mut [f32],
    dst_stride: usize,
    a: Mat<'a>,
    b: Mat<'a>,
    per_piece: usize,
) -> Vec<Piece<'a>> {
    let mut pieces: Vec<_> = (0..b.rows())
        .step_by(per_piece)
        .map(|first| Piece {
            out: Vec::with_capacity(a.rows()),
            a,
            b,
            first,
        })
        .collect();
    for row in dst.chunks_mut(dst_stride).take(a.rows()) {
        for (piece, out) in pieces.iter_mut().zip(row[..b.rows()].chunks_mut(per_piece)) {
            piece.out.push(out);
        }
    }
    pieces
}

/// Some of the outputs, of all rows.
struct Piece<'a> {
    /// Of each row of `a` its outputs from `first` on.
    out: Vec<&'a mut [f32]>,
    a: Mat<'a>,
    b: Mat<'a>,
    first: usize,
}

impl WithSimd for Piece<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // A tile of 4 x 4 and what it is multiplied from fits 32 registers, one of 4 x 3 fits 16.
        if S::REGISTER_COUNT >= 32 {
            self.run::<S, 4>(simd);
        } else {
            self.run::<S, 3>(simd);
        }
    }
}

impl Piece<'_> {
    /// Takes `C` outputs at a time through all rows: their weights are read once.
    #[inline(always)]
    fn run<S: Simd, const C: usize>(mut self, simd: S) {
        let n = self.out[0].len();
        let whole = n - n % C;
        for at in (0..whole).step_by(C) {
            self.outputs::<S, C>(simd, at);
        }
        for at in whole..n {
            self.outputs::<S, 1>(simd, at);
        }
    }

    /// Outputs `at .. at + C` of the piece, of all rows in tiles of nearly the same size.
    #[inline(always)]
    fn outputs<S: Simd, const C: usize>(&mut self, simd: S, at: usize) {
        let weights = array::from_fn(|c| self.b.row(self.first + at + c));
        let mut row = 0;
        for left in (1..=self.out.len().div_ceil(TILE_ROWS)).rev() {
            let rows = (self.out.len() - row).div_ceil(left);
            match rows {
                4 => self.tile::<S, 4, C>(simd, row, at, weights),
                3 => self.tile::<S, 3, C>(simd, row, at, weights),
                2 => self.tile::<S, 2, C>(simd, row, at, weights),
                _ => self.tile::<S, 1, C>(simd, row, at, weights),
            }
            row += rows;
        }
    }

    #[inline(always)]
    fn tile<S: Simd, const R: usize, const C: usize>(
        &mut self,
        simd: S,
        row: usize,
        at: usize,
        weights: [&[f32]; C],
    ) {
        let rows: [&[f32]; R] = array::from_fn(|r| self.a.row(row + r));
        let sums = dots(simd, rows, weights);
        for (out, sums) in self.out[row..row + R].iter_mut().zip(sums) {
            out[at..at + C].copy_from_slice(&sums);
        }
    }
}

/// The products of every one of `rows` with every one of `weights`, all of one length.
#[inline(always)]
fn dots<S: Simd, const R: usize, const C: usize>(
    simd: S,
    rows: [&[f32]; R],
    weights: [&[f32]; C],
) -> [[f32; C]; R] {
    let rows = rows.map(S::as_simd_f32s);
    let weights = weights.map(S::as_simd_f32s);
    let mut sums = [[simd.splat_f32s(0.0); C]; R];
    let vectors = weights[0].0.len();
    // Of the same length, as the compiler can see: no bounds are checked in the loop.
    let x = rows.map(|(vectors_of, _)| &vectors_of[..vectors]);
    let w = weights.map(|(vectors_of, _)| &vectors_of[..vectors]);
    for i in 0..vectors {
        for (sums, x) in sums.iter_mut().zip(x) {
            for (sum, w) in sums.iter_mut().zip(w) {
                *sum = simd.mul_add_f32s(x[i], w[i], *sum);
            }
        }
    }
    if !weights[0].1.is_empty() {
        for (sums, (_, x)) in sums.iter_mut().zip(rows) {
            let x = simd.partial_load_f32s(x);
            for (sum, (_, w)) in sums.iter_mut().zip(weights) {
                *sum = simd.mul_add_f32s(x, simd.partial_load_f32s(w), *sum);
            }
        }
    }
    // A closure would be compiled for the plainest machine, and each of its vectors be a call.
    let mut out = [[0.0; C]; R];
    for (out, sums) in out.iter_mut().zip(sums) {
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = simd.reduce_sum_f32s(sum);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ops::gemm::matmul_nt;

    /// Values in -1 .. 1 that use all of their bits; the same for the same seed.
    fn values(seed: u32, count: usize) -> Vec<f32> {
        let mut state = seed;
        (0..count)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                state as i32 as f32 / i32::MAX as f32
            })
            .collect()
    }

    /// `rows` rows of `cols` values, with NaN in the gaps between them.
    fn with_gaps(seed: u32, rows: usize, cols: usize, stride: usize) -> Vec<f32> {
        let mut data = values(seed, rows * stride);
        for row in data.chunks_exact_mut(stride.max(1)) {
            row[cols..].fill(f32::NAN);
        }
        data
    }

    /// Compares with sums in f64. Whatever the order, each product and each partial sum is rounded
    /// once: a term is rounded `k` times at most, by half a unit in the last place each.
    fn is_the_product(dst: &[f32], dst_stride: usize, a: Mat<'_>, b: Mat<'_>) {
        for i in 0..a.rows() {
            for j in 0..b.rows() {
                let terms = || {
                    a.row(i)
                        .iter()
                        .zip(b.row(j))
                        .map(|(x, w)| f64::from(*x) * f64::from(*w))
                };
                let (want, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
                let bound = 1.001 * a.cols() as f64 * f64::from(f32::EPSILON) / 2.0 * size;
                let got = f64::from(dst[i * dst_stride + j]);
                assert!(
                    (got - want).abs() <= bound,
                    "row {i}, output {j}: {got} is not {want}"
                );
            }
            let gap = &dst[(i * dst_stride + b.rows()).min(dst.len())..];
            let gap = &gap[..gap.len().min(dst_stride - b.rows())];
            assert!(gap.iter().all(|x| *x == 7.0), "a gap was written");
        }
    }

    proptest! {
        /// Tails of tiles and of vectors, and gaps that are read or written: the numbers of rows go
        /// past those of this module on both sides.
        #[test]
        fn products_are_the_sums_of_the_definition(
            (m, n, k) in (1..40usize, 1..30usize, 0..70usize),
            (a_gap, b_gap, dst_gap) in (0..3usize, 0..3usize, 0..3usize),
            seed: u32,
        ) {
            let a = with_gaps(seed, m, k, k + a_gap);
            let b = with_gaps(!seed, n, k, k + b_gap);
            let (a, b) = (Mat::new(&a, m, k, k + a_gap), Mat::new(&b, n, k, k + b_gap));
            let mut dst = vec![7.0; m * (n + dst_gap)];
            matmul_nt(&mut dst, n + dst_gap, a, b, Threads::All);
            is_the_product(&dst, n + dst_gap, a, b);
        }
    }

    /// A machine runs one set of vectors only, whose tiles would be all that is tested.
    #[test]
    fn narrower_vectors_give_the_product() {
        let (m, n, k) = (7, 11, 45);
        let (a, b) = (values(1, m * k), values(2, n * k));
        let (a, b) = (Mat::dense(&a, m, k), Mat::dense(&b, n, k));
        let mut dst = vec![7.0; m * n];
        for piece in pieces(&mut dst, n, a, b, 4) {
            Simd::vectorize(pulp::Scalar, piece);
        }
        is_the_product(&dst, n, a, b);
        #[cfg(target_arch = "x86_64")]
        if let Some(simd) = pulp::x86::V3::try_new() {
            dst.fill(7.0);
            for piece in pieces(&mut dst, n, a, b, 4) {
                Simd::vectorize(simd, piece);
            }
            is_the_product(&dst, n, a, b);
        }
    }

    /// A request must get the same bits whoever else decodes, as long as the number of rows stays in
    /// the range. The largest product is shared by threads, the small ones are not.
    #[test]
    fn a_row_s_sums_depend_on_nothing_but_the_row() {
        let (rows, n, k) = (*ROWS.end(), 203, 197);
        let (a, b) = (values(3, rows * k), values(4, n * k));
        let product = |first: usize, m: usize, skip: usize| {
            let mut dst = vec![0.0; m * (n - skip)];
            let a = Mat::dense(&a[first * k..], m, k);
            let b = Mat::dense(&b[skip * k..], n - skip, k);
            matmul_nt(&mut dst, n - skip, a, b, Threads::All);
            dst
        };
        let all = product(0, rows, 0);
        for m in ROWS {
            for first in [0, 1, rows - m] {
                for skip in [0, 1] {
                    let first = first.min(rows - m);
                    let some = product(first, m, skip);
                    for (i, row) in some.chunks_exact(n - skip).enumerate() {
                        let want = &all[(first + i) * n + skip..][..n - skip];
                        let same = row
                            .iter()
                            .zip(want)
                            .all(|(x, y)| x.to_bits() == y.to_bits());
                        assert!(same, "row {i} of {m} from {first}, outputs from {skip}");
                    }
                }
            }
        }
    }
}
