//! N-gram tables: looked up in the mapped file, a few rows per token.

use rayon::prelude::*;

use super::{error::WeightsError, formats::Element, stored::Stored};

/// A hashed n-gram table `[rows, columns]` that stays in its memory-mapped file.
///
/// A released table has 384 million rows of 256 bytes, of which a token reads 24: only those are
/// read from disk and dequantised.
#[derive(Debug, Clone)]
pub struct EngramTable(Stored);

impl EngramTable {
    pub(super) fn new(stored: Stored) -> Self {
        Self(stored)
    }

    /// Rows of the table.
    pub fn rows(&self) -> usize {
        self.0.rows
    }

    /// Columns of the table, `engram_head_dim`.
    pub fn columns(&self) -> usize {
        self.0.columns
    }

    /// Dequantises the listed rows, in parallel, into `out` `[rows.len(), columns]`, row-major.
    ///
    /// # Errors
    ///
    /// A row that the table does not have, or one with a scale or a value that is not finite (a whole
    /// table is too much to check at load). Or `out` is not of `rows.len() * columns` values.
    pub fn gather(&self, rows: &[i64], out: &mut [f32]) -> Result<(), WeightsError> {
        let columns = self.columns();
        let expected = rows.len().saturating_mul(columns);
        if out.len() != expected {
            return Err(WeightsError::Buffer {
                tensor: self.0.name.clone(),
                rows: rows.len(),
                expected,
                found: out.len(),
            });
        }
        out.par_chunks_exact_mut(columns)
            .zip(rows)
            .try_for_each(|(out, &wanted)| {
                let row = self.row(wanted)?;
                self.0.decode_row(row, out);
                if f32::all_finite(out) {
                    return Ok(());
                }
                Err(WeightsError::RowValue {
                    path: self.0.path(),
                    tensor: self.0.name.clone(),
                    row,
                })
            })
    }

    fn row(&self, wanted: i64) -> Result<usize, WeightsError> {
        let tensor = || self.0.name.clone();
        let row = usize::try_from(wanted)
            .ok()
            .filter(|&row| row < self.rows());
        let row = row.ok_or_else(|| WeightsError::Row {
            tensor: tensor(),
            row: wanted,
            rows: self.rows(),
        })?;
        if !self.0.row_scales_are_finite(row) {
            return Err(WeightsError::RowScale {
                path: self.0.scale_path(),
                tensor: tensor(),
                row,
            });
        }
        Ok(row)
    }
}
