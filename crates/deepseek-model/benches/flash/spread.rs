//! Median and spread of repeated measurements.

use serde::Serialize;

/// Of a few measurements of one thing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) least: f64,
    pub(crate) most: f64,
    /// How many were measured.
    pub(crate) runs: usize,
}

/// The median of sorted values, of which there are some.
fn middle(values: &[f64]) -> f64 {
    let upper = values.len() / 2;
    let lower = (values.len() - 1) / 2;
    f64::midpoint(values[lower], values[upper])
}

impl Spread {
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let (Some(&least), Some(&most)) = (values.first(), values.last()) else {
            return Self::default();
        };
        Self {
            median: middle(&values),
            least,
            most,
            runs: values.len(),
        }
    }

    /// Each through the same function, which may turn their order around.
    pub(crate) fn map(self, f: impl Fn(f64) -> f64) -> Self {
        let (a, b) = (f(self.least), f(self.most));
        Self {
            median: f(self.median),
            least: a.min(b),
            most: a.max(b),
            runs: self.runs,
        }
    }
}
