//! Matrix products on slices: the `gemm` crate (the one candle uses) behind checked bounds, and for
//! few rows the kernel beside it.
//!
//! The tile loops of attention, index scoring and the experts multiply pieces of scratch memory
//! inside their own parallel loops; a tensor per piece would cost more than the product.

use super::few;

/// A row-major matrix inside a slice: `rows` x `cols`, `stride` elements from row to row.
#[derive(Clone, Copy)]
pub(crate) struct Mat<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    stride: usize,
}

impl<'a> Mat<'a> {
    /// `data` holds `rows` rows of `cols` elements, `stride` apart.
    ///
    /// # Panics
    /// If `data` is too short or a row is longer than the stride.
    pub(crate) fn new(data: &'a [f32], rows: usize, cols: usize, stride: usize) -> Self {
        assert!(
            cols <= stride || rows <= 1,
            "rows of {cols} elements overlap at stride {stride}"
        );
        assert!(
            rows == 0 || data.len() >= (rows - 1) * stride + cols,
            "matrix exceeds its slice"
        );
        Self {
            data,
            rows,
            cols,
            stride,
        }
    }

    /// `data` holds `rows` rows of `cols` elements without gaps.
    pub(crate) fn dense(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Self::new(data, rows, cols, cols)
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    pub(super) fn cols(&self) -> usize {
        self.cols
    }

    /// # Panics
    /// If there is no such row.
    pub(super) fn row(&self, row: usize) -> &'a [f32] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        &self.data[row * self.stride..][..self.cols]
    }
}

/// Whether a product may spread over the thread pool.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Threads {
    /// The caller is one of many parallel tasks.
    One,
    /// The product is the only thing running.
    All,
}

/// `dst = a · bᵀ`: `a` is `[m, k]`, `b` is `[n, k]`, `dst` is `[m, n]` with rows `dst_stride` apart.
///
/// A few rows are multiplied by `few`, where the sums of a row do not depend on how many there are;
/// from one of the cases (one row, few, more) to another the order of sums differs.
///
/// # Panics
/// If the inner sizes differ or `dst` is too short.
pub(crate) fn matmul_nt(
    dst: &mut [f32],
    dst_stride: usize,
    a: Mat<'_>,
    b: Mat<'_>,
    threads: Threads,
) {
    assert_eq!(a.cols, b.cols, "inner sizes differ");
    if few::ROWS.contains(&a.rows) {
        check_output(dst, dst_stride, a.rows, b.rows);
        few::product(dst, dst_stride, a, b, threads);
        return;
    }
    product(
        dst,
        dst_stride,
        a,
        b,
        (b.rows, b.cols),
        (1, b.stride),
        threads,
    );
}

/// `dst = a · b`: `a` is `[m, k]`, `b` is `[k, n]`, `dst` is `[m, n]` with rows `dst_stride` apart.
///
/// # Panics
/// If the inner sizes differ or `dst` is too short.
pub(crate) fn matmul_nn(
    dst: &mut [f32],
    dst_stride: usize,
    a: Mat<'_>,
    b: Mat<'_>,
    threads: Threads,
) {
    assert_eq!(a.cols, b.rows, "inner sizes differ");
    product(
        dst,
        dst_stride,
        a,
        b,
        (b.cols, b.rows),
        (b.stride, 1),
        threads,
    );
}

/// `dst = a · B` where `B` is `[k, n]` with the given (row, column) strides inside `b.data`.
fn product(
    dst: &mut [f32],
    dst_stride: usize,
    a: Mat<'_>,
    b: Mat<'_>,
    (n, k): (usize, usize),
    (b_rs, b_cs): (usize, usize),
    threads: Threads,
) {
    let m = a.rows;
    check_output(dst, dst_stride, m, n);
    if m == 0 || n == 0 {
        return;
    }
    let parallelism = match threads {
        Threads::One => gemm::Parallelism::None,
        Threads::All => gemm::Parallelism::Rayon(rayon::current_num_threads()),
    };
    // SAFETY: `Mat::new` and the assertion above bound every element that the strides can reach
    // inside `a.data`, `b.data` and `dst`; `dst` is borrowed mutably, so it overlaps neither.
    // With `read_dst` false the old contents of `dst` are not read.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst.as_mut_ptr(),
            1,
            dst_stride as isize,
            false,
            a.data.as_ptr(),
            1,
            a.stride as isize,
            b.data.as_ptr(),
            b_cs as isize,
            b_rs as isize,
            0.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}

fn check_output(dst: &[f32], stride: usize, rows: usize, cols: usize) {
    assert!(cols <= stride || rows <= 1, "output rows overlap");
    assert!(
        rows == 0 || dst.len() >= (rows - 1) * stride + cols,
        "output exceeds its slice"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_match_the_definition_with_strides() {
        let a: Vec<f32> = (0..3 * 5).map(|x| x as f32).collect(); // 3 rows of 4, stride 5
        let b: Vec<f32> = (0..2 * 6).map(|x| (x % 7) as f32 - 3.0).collect(); // 2 rows of 4, stride 6
        let mut dst = vec![f32::NAN; 3 * 3];
        matmul_nt(
            &mut dst,
            3,
            Mat::new(&a, 3, 4, 5),
            Mat::new(&b, 2, 4, 6),
            Threads::One,
        );
        for i in 0..3 {
            for j in 0..2 {
                let want: f32 = (0..4).map(|k| a[i * 5 + k] * b[j * 6 + k]).sum();
                assert!((dst[i * 3 + j] - want).abs() < 1e-5);
            }
            assert!(
                dst[i * 3 + 2].is_nan(),
                "the gap between output rows was written"
            );
        }
        let mut dst = vec![f32::NAN; 3 * 2];
        let b: Vec<f32> = (0..4 * 2).map(|x| x as f32 * 0.5).collect();
        matmul_nn(
            &mut dst,
            2,
            Mat::new(&a, 3, 4, 5),
            Mat::dense(&b, 4, 2),
            Threads::All,
        );
        for i in 0..3 {
            for j in 0..2 {
                let want: f32 = (0..4).map(|k| a[i * 5 + k] * b[k * 2 + j]).sum();
                assert!((dst[i * 2 + j] - want).abs() < 1e-4);
            }
        }
    }

    #[test]
    #[should_panic(expected = "matrix exceeds its slice")]
    fn a_matrix_larger_than_its_slice_is_refused() {
        Mat::dense(&[0.0; 5], 2, 3);
    }
}
