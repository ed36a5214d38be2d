//! Row copies that have been checked: what both implementations start from.

use candle_core::{DType, Tensor};

use crate::operands::{Argument, Arguments, expect_dims, expect_dtype};
use crate::{Error, Operand, Result};

/// How rows of a source become rows of its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowMap {
    /// `output[i] = source[rows[i]]`, zero where there is no such row.
    Gather,
    /// `output[rows[i]] = source[i]`, zero elsewhere.
    Scatter,
    /// `output[rows[i]] = source[i]`, other rows left alone.
    Write,
}

impl RowMap {
    /// The operation, for messages.
    pub(crate) const fn op(self) -> &'static str {
        match self {
            Self::Gather => "gather-rows",
            Self::Scatter => "scatter-rows",
            Self::Write => "write-rows",
        }
    }
}

/// Row copies from sources to outputs by one list.
///
/// Of every pair the dtypes and the shapes past the row axis are equal, no source or output is a
/// scalar, and the tensor on the list's side (the output of a gather, else the source) has as many
/// rows as the list. All tensors are contiguous and on one device, and no output shares memory with
/// another tensor. The list is one axis of u32.
pub(crate) struct RowCopies<'a> {
    map: RowMap,
    /// The list, then the sources, then the outputs.
    arguments: Arguments<'a>,
    n_pairs: usize,
}

impl<'a> RowCopies<'a> {
    pub(crate) fn check(
        map: RowMap,
        sources: &[&'a Tensor],
        rows: &'a Tensor,
        outputs: &[&'a Tensor],
    ) -> Result<Self> {
        let op = map.op();
        if sources.len() != outputs.len() {
            let (sources, outputs) = (sources.len(), outputs.len());
            return Err(Error::OutputCount {
                op,
                sources,
                outputs,
            });
        }
        expect_dtype(op, Operand::Rows, rows, &[DType::U32])?;
        let n_list = rows.elem_count();
        expect_dims(op, Operand::Rows, rows, &[n_list])?;

        for (i, (source, output)) in sources.iter().zip(outputs).enumerate() {
            expect_movable(op, Operand::Source(i), source)?;
            expect_dtype(op, Operand::Output(i), output, &[source.dtype()])?;
            let &n_source = source
                .dims()
                .first()
                .ok_or(Error::Scalar { op, tensor: i })?;
            let mut expected = source.dims().to_vec();
            expected[0] = match map {
                RowMap::Gather => n_list,
                // As many rows as it likes.
                RowMap::Scatter | RowMap::Write => output.dims().first().copied().unwrap_or(0),
            };
            expect_dims(op, Operand::Output(i), output, &expected)?;
            if map != RowMap::Gather && n_source != n_list {
                return Err(Error::CountMismatch {
                    op,
                    values: n_source,
                    rows: n_list,
                });
            }
        }

        let argument = |tensor, name, written| Argument {
            tensor,
            name,
            written,
        };
        let named = |tensors: &[&'a Tensor], name: fn(usize) -> Operand, written| {
            let tensors = tensors.iter().enumerate();
            tensors
                .map(|(i, t)| argument(*t, name(i), written))
                .collect::<Vec<_>>()
        };
        let mut list = vec![argument(rows, Operand::Rows, false)];
        list.extend(named(sources, Operand::Source, false));
        list.extend(named(outputs, Operand::Output, true));
        let arguments = Arguments::check(op, list)?;
        Ok(Self {
            map,
            arguments,
            n_pairs: sources.len(),
        })
    }

    pub(crate) fn map(&self) -> RowMap {
        self.map
    }

    pub(crate) fn arguments(&self) -> &Arguments<'a> {
        &self.arguments
    }

    /// The row list.
    pub(crate) fn rows(&self) -> &'a Tensor {
        self.arguments.list()[0].tensor
    }

    /// The sources with their outputs.
    pub(crate) fn pairs(&self) -> impl ExactSizeIterator<Item = (&'a Tensor, &'a Tensor)> {
        let tensors = &self.arguments.list()[1..];
        (0..self.n_pairs).map(|i| (tensors[i].tensor, tensors[self.n_pairs + i].tensor))
    }
}

/// Refuses the dtypes whose elements are less than a byte or that candle holds as raw bytes.
pub(crate) fn expect_movable(op: &'static str, name: Operand, tensor: &Tensor) -> Result<()> {
    use DType::{BF16, F8E4M3, F16, F32, F64, I16, I32, I64, U8, U32};
    expect_dtype(
        op,
        name,
        tensor,
        &[U8, U32, I16, I32, I64, BF16, F16, F32, F64, F8E4M3],
    )
}
