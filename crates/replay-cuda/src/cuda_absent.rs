//! Stands in for the kernels in a build without the feature `cuda`.

use candle_core::{DType, Device, Tensor};

use crate::copies::RowCopies;
use crate::replay_rows::{PadArguments, ReplayArguments};
use crate::{Error, Result};

pub(crate) fn load(_: &Device) -> Result<()> {
    Err(Error::NoCuda { op: "load-kernels" })
}

pub(crate) fn refuse_capture(op: &'static str, _: &Device) -> Result<()> {
    Err(Error::NoCuda { op })
}

pub(crate) fn uninitialized(_: &[usize], _: DType, _: &Device) -> Result<Tensor> {
    Err(Error::NoCuda { op: "allocate" })
}

pub(crate) fn copy_rows(copies: &RowCopies<'_>) -> Result<()> {
    Err(Error::NoCuda {
        op: copies.map().op(),
    })
}

pub(crate) fn replay_rows(checked: &ReplayArguments<'_>) -> Result<()> {
    let ReplayArguments {
        arguments, query, ..
    } = checked;
    // What the kernels would be told; named here so that both builds use the same fields.
    let _ = (query.trims(), checked.n_requests, checked.n_batch_rows);
    Err(Error::NoCuda { op: arguments.op() })
}

pub(crate) fn pad_slots(checked: &PadArguments<'_>) -> Result<()> {
    let PadArguments {
        arguments,
        n_requests,
        n_rows,
        ..
    } = checked;
    let _ = (n_requests, n_rows);
    Err(Error::NoCuda { op: arguments.op() })
}
