//! The embedding: rows of a table, copied as often as there are streams.

use candle_core::{Error, Result, Tensor};
use replay_cuda::gather_rows_into;

use super::launch::output;

/// As [`crate::ops::embed`]. One copy, 16 bytes at a time: candle's lookup and its copy of a broadcast move
/// an element at a time.
pub(in crate::ops) fn embed(table: &Tensor, tokens: &Tensor, n: usize) -> Result<Tensor> {
    let (rows, (_, h)) = (tokens.dims1()?, table.dims2()?);
    let list = tokens.unsqueeze(1)?.broadcast_as((rows, n))?.contiguous()?;
    let out = output(&[rows * n, h], table.dtype(), table.device())?;
    gather_rows_into(&[table], &list.flatten_all()?, &[&out]).map_err(Error::wrap)?;
    out.reshape((rows, n, h))
}
