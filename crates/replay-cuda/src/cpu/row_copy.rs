//! Row copies on the CPU.

use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, InplaceOp2, Layout, Shape, Tensor, bail};

use crate::copies::{RowCopies, RowMap};
use crate::operands::Place;
use crate::{Error, PAD_ROW, Result};

/// The rows of each tensor; all are contiguous and have the rows.
pub(crate) fn gather(tensors: &[&Tensor], rows: &[u32]) -> Result<Vec<Tensor>> {
    let op = BuildRows {
        name: RowMap::Gather.op(),
        pieces: gather_pieces(rows),
        rows: rows.len(),
    };
    tensors
        .iter()
        .map(|t| Ok(t.apply_op1_no_bwd(&op)?))
        .collect()
}

/// The values at their rows among zeros; the rows ascend and are below `n_rows`.
pub(crate) fn scatter(values: &Tensor, rows: &[u32], n_rows: usize) -> Result<Tensor> {
    let pieces = scatter_pieces(rows, n_rows);
    let op = BuildRows {
        name: RowMap::Scatter.op(),
        pieces,
        rows: n_rows,
    };
    Ok(values.apply_op1_no_bwd(&op)?)
}

/// A run of result rows.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Piece {
    /// Copied from consecutive source rows.
    Rows(Range<usize>),
    /// Zero.
    Zeros(usize),
}

/// Joins consecutive rows: kept rows come in long runs, one per request.
fn gather_pieces(rows: &[u32]) -> Vec<Piece> {
    rows.chunk_by(|a, b| a.checked_add(1) == Some(*b))
        .map(|run| Piece::Rows(run[0] as usize..run[0] as usize + run.len()))
        .collect()
}

fn scatter_pieces(rows: &[u32], n_rows: usize) -> Vec<Piece> {
    let (mut pieces, mut written, mut taken) = (Vec::new(), 0, 0);
    for run in rows.chunk_by(|a, b| a.checked_add(1) == Some(*b)) {
        let start = run[0] as usize;
        pieces.push(Piece::Zeros(start - written));
        pieces.push(Piece::Rows(taken..taken + run.len()));
        (written, taken) = (start + run.len(), taken + run.len());
    }
    pieces.push(Piece::Zeros(n_rows - written));
    pieces
}

/// Builds a tensor of `rows` rows from pieces.
struct BuildRows {
    name: &'static str,
    pieces: Vec<Piece>,
    rows: usize,
}

impl BuildRows {
    fn build<T: Copy + Default>(&self, source: &[T], width: usize) -> candle_core::Result<Vec<T>> {
        let mut out = Vec::new();
        let reserved = self
            .rows
            .checked_mul(width)
            .is_some_and(|len| out.try_reserve_exact(len).is_ok());
        if !reserved {
            let rows = self.rows;
            let row_bytes = width.saturating_mul(size_of::<T>());
            return Err(candle_core::Error::wrap(Error::NoMemory {
                op: self.name,
                rows,
                row_bytes,
            }));
        }
        for piece in &self.pieces {
            match piece {
                Piece::Rows(rows) => {
                    out.extend_from_slice(&source[rows.start * width..rows.end * width]);
                }
                Piece::Zeros(rows) => out.resize(out.len() + rows * width, T::default()),
            }
        }
        Ok(out)
    }
}

impl CustomOp1 for BuildRows {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("{}: expected a contiguous tensor", self.name);
        };
        let mut dims = layout.dims().to_vec();
        let width = dims[1..].iter().product();
        dims[0] = self.rows;
        macro_rules! build {
            ($($dtype:ident),*) => {
                match storage {
                    $(CpuStorage::$dtype(values) => {
                        CpuStorage::$dtype(self.build(&values[start..end], width)?)
                    })*
                    other => bail!("{}: rows of {:?} are not moved", self.name, other.dtype()),
                }
            };
        }
        let out = build!(U8, U32, I16, I32, I64, BF16, F16, F32, F64, F8E4M3);
        Ok((out, Shape::from(dims)))
    }
}

/// Copies rows into outputs that exist.
pub(crate) fn copy_rows(copies: &RowCopies<'_>) -> Result<()> {
    let rows = copies.rows().to_vec1::<u32>()?;
    check_list(copies.map(), &rows)?;
    for (source, output) in copies.pairs().filter(|(_, output)| output.elem_count() > 0) {
        let n_output = output.dims()[0];
        let (sources, other_rows) = match copies.map() {
            RowMap::Gather => (rows.clone(), OtherRows::Zero),
            RowMap::Scatter => (invert(&rows, n_output), OtherRows::Zero),
            RowMap::Write => (invert(&rows, n_output), OtherRows::Keep),
        };
        let op = OverwriteRows {
            name: copies.map().op(),
            sources,
            other_rows,
        };
        if Place::of(source).storage == Place::of(output).storage {
            // Apart within one storage, which cannot be borrowed twice.
            output.inplace_op2(&source.copy()?, &op)?;
        } else {
            output.inplace_op2(source, &op)?;
        }
    }
    Ok(())
}

/// Refuses lists that the map forbids.
fn check_list(map: RowMap, rows: &[u32]) -> Result<()> {
    let op = map.op();
    let n = rows
        .iter()
        .rposition(|row| *row != PAD_ROW)
        .map_or(0, |last| last + 1);
    match map {
        RowMap::Gather => Ok(()),
        RowMap::Scatter => match rows[..n].windows(2).find(|pair| pair[0] >= pair[1]) {
            Some(pair) => Err(Error::NotAscending {
                op,
                previous: pair[0],
                next: pair[1],
            }),
            None => Ok(()),
        },
        RowMap::Write => {
            let mut sorted: Vec<u32> = rows.iter().copied().filter(|r| *r != PAD_ROW).collect();
            sorted.sort_unstable();
            match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
                Some(pair) => Err(Error::DuplicateRow { op, row: pair[0] }),
                None => Ok(()),
            }
        }
    }
}

/// For each of `n_rows` rows its place in the list, or [`PAD_ROW`].
fn invert(rows: &[u32], n_rows: usize) -> Vec<u32> {
    let mut places = vec![PAD_ROW; n_rows];
    for (place, row) in rows.iter().enumerate() {
        if let Some(entry) = places.get_mut(*row as usize) {
            *entry = place as u32;
        }
    }
    places
}

/// What becomes of rows without a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OtherRows {
    Zero,
    Keep,
}

/// Gives each output row the source row listed for it, if there is such a row.
struct OverwriteRows {
    name: &'static str,
    sources: Vec<u32>,
    other_rows: OtherRows,
}

impl OverwriteRows {
    fn overwrite<T: Copy + Default>(&self, output: &mut [T], source: &[T], width: usize) {
        if width == 0 {
            return;
        }
        let n_source = source.len() / width;
        for (target, &row) in output.chunks_exact_mut(width).zip(&self.sources) {
            let row = row as usize;
            if row < n_source {
                target.copy_from_slice(&source[row * width..(row + 1) * width]);
            } else if self.other_rows == OtherRows::Zero {
                target.fill(T::default());
            }
        }
    }
}

impl InplaceOp2 for OverwriteRows {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        output: &mut CpuStorage,
        output_layout: &Layout,
        source: &CpuStorage,
        source_layout: &Layout,
    ) -> candle_core::Result<()> {
        let (Some((to, to_end)), Some((from, from_end))) = (
            output_layout.contiguous_offsets(),
            source_layout.contiguous_offsets(),
        ) else {
            bail!("{}: expected contiguous tensors", self.name);
        };
        let width = output_layout.dims()[1..].iter().product();
        macro_rules! overwrite {
            ($($dtype:ident),*) => {
                match (output, source) {
                    $((CpuStorage::$dtype(output), CpuStorage::$dtype(source)) => {
                        self.overwrite(&mut output[to..to_end], &source[from..from_end], width);
                    })*
                    (output, _) => bail!("{}: rows of {:?} are not moved", self.name, output.dtype()),
                }
            };
        }
        overwrite!(U8, U32, I16, I32, I64, BF16, F16, F32, F64, F8E4M3);
        Ok(())
    }
}
