//! The k largest values of a row, lower index first among equals.

use std::cmp::Ordering;

/// Orders by value, largest first, then by index, smallest first.
#[inline]
#[allow(
    clippy::trivially_copy_pass_by_ref,
    reason = "the signature of a comparison"
)]
fn better(a: &(f32, u32), b: &(f32, u32)) -> Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// Leaves in `pairs` the `k` best `(value, index)` pairs, in no order; `-inf` never counts.
pub(crate) fn keep_best(pairs: &mut Vec<(f32, u32)>, k: usize) {
    pairs.retain(|(value, _)| *value > f32::NEG_INFINITY);
    if pairs.len() > k {
        if k > 0 {
            pairs.select_nth_unstable_by(k - 1, better);
        }
        pairs.truncate(k);
    }
}

/// As [`keep_best`], sorted best first.
pub(crate) fn sort_best(pairs: &mut Vec<(f32, u32)>, k: usize) {
    keep_best(pairs, k);
    pairs.sort_unstable_by(better);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_go_to_the_lower_index_and_masked_ones_to_none() {
        let mut pairs: Vec<_> = [1.0, 3.0, f32::NEG_INFINITY, 3.0, 3.0, 0.0]
            .into_iter()
            .zip(0..)
            .collect();
        sort_best(&mut pairs, 2);
        assert_eq!(pairs, [(3.0, 1), (3.0, 3)]);
        let mut few = vec![(f32::NEG_INFINITY, 0), (-5.0, 1)];
        keep_best(&mut few, 4);
        assert_eq!(few, [(-5.0, 1)]);
    }
}
