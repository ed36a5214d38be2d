//! Gather and scatter of whole rows: the functions, the same on every device.

use candle_core::{DType, Device, Tensor};

use crate::copies::{RowCopies, RowMap, expect_movable};
use crate::{Error, Operand, Result, cpu, cuda};

/// A row number that no tensor has, for the places of a list that stand for nothing.
pub const PAD_ROW: u32 = u32::MAX;

/// The given rows of every tensor, in the given order; rows may repeat.
///
/// Each tensor is `[rows, ...]` of any dtype, and so is its result: `[list length, ...]`,
/// contiguous. Tensors may differ in their number of rows as long as each has the rows asked for.
///
/// On a CUDA device the list is uploaded and the results are allocated, so under stream capture call
/// [`gather_rows_into`].
///
/// # Errors
/// If a tensor is a scalar or lacks a row, or the tensors are not all on the CPU or on one CUDA
/// device.
pub fn gather_rows(tensors: &[&Tensor], rows: &[u32]) -> Result<Vec<Tensor>> {
    let op = RowMap::Gather.op();
    for (tensor, t) in tensors.iter().enumerate() {
        let &n = t.dims().first().ok_or(Error::Scalar { op, tensor })?;
        expect_movable(op, Operand::Source(tensor), t)?;
        if let Some(&row) = rows.iter().find(|row| **row as usize >= n) {
            return Err(Error::RowOutOfRange {
                op,
                row,
                tensor,
                rows: n,
            });
        }
    }
    let device = tensors.first().map_or(Device::Cpu, |t| t.device().clone());
    if device.is_cuda() {
        cuda::refuse_capture(op, &device)?;
    }
    let tensors = contiguous(tensors)?;
    let tensors: Vec<&Tensor> = tensors.iter().collect();
    match &device {
        Device::Cpu => cpu::gather(&tensors, rows),
        Device::Cuda(_) => {
            let outputs = results(&tensors, rows.len())?;
            if !rows.is_empty() {
                let rows = Tensor::new(rows, &device)?;
                let outputs: Vec<&Tensor> = outputs.iter().collect();
                gather_rows_into(&tensors, &rows, &outputs)?;
            }
            Ok(outputs)
        }
        other @ Device::Metal(_) => Err(unsupported(op, other)),
    }
}

/// A tensor of `n_rows` rows that holds `values` at `rows` and zero elsewhere.
///
/// `values` is `[rows, ...]` of any dtype; `rows` is strictly ascending. Every element of the result
/// is written once.
///
/// On a CUDA device the list is uploaded and the result is allocated, so under stream capture call
/// [`scatter_rows_into`].
///
/// # Errors
/// If `values` is a scalar or has another number of rows than the list, the list is not strictly
/// ascending or reaches past `n_rows`, the tensor is neither on the CPU nor on a CUDA device, or
/// memory does not hold the result.
pub fn scatter_rows(values: &Tensor, rows: &[u32], n_rows: usize) -> Result<Tensor> {
    let op = RowMap::Scatter.op();
    let &n = values
        .dims()
        .first()
        .ok_or(Error::Scalar { op, tensor: 0 })?;
    expect_movable(op, Operand::Source(0), values)?;
    if n != rows.len() {
        return Err(Error::CountMismatch {
            op,
            values: n,
            rows: rows.len(),
        });
    }
    if let Some(pair) = rows.windows(2).find(|pair| pair[0] >= pair[1]) {
        return Err(Error::NotAscending {
            op,
            previous: pair[0],
            next: pair[1],
        });
    }
    if let Some(&row) = rows.last().filter(|row| **row as usize >= n_rows) {
        return Err(Error::RowPastResult {
            op,
            row,
            rows: n_rows,
        });
    }
    expect_addressable(op, n_rows, row_bytes(values))?;
    if values.device().is_cuda() {
        cuda::refuse_capture(op, values.device())?;
    }
    let values = values.contiguous()?;
    match values.device() {
        Device::Cpu => cpu::scatter(&values, rows, n_rows),
        Device::Cuda(_) if rows.is_empty() => {
            let mut dims = values.dims().to_vec();
            dims[0] = n_rows.max(1);
            let zeros = Tensor::zeros(dims, values.dtype(), values.device())?;
            Ok(zeros.narrow(0, 0, n_rows)?)
        }
        Device::Cuda(_) => {
            let output = results(&[&values], n_rows)?.remove(0);
            let rows = Tensor::new(rows, values.device())?;
            scatter_rows_into(&[&values], &rows, &[&output])?;
            Ok(output)
        }
        other @ Device::Metal(_) => Err(unsupported(op, other)),
    }
}

/// Gathers rows of many tensors into fixed buffers: row `i` of each output becomes row `rows[i]` of
/// its tensor, and zero where the tensor lacks that row, as for [`PAD_ROW`].
///
/// * `tensors` - each `[any number of rows, ...]`, contiguous.
/// * `rows` - u32 `[n]`, in any order; rows may repeat.
/// * `outputs` - each `[n, ...]`, of the dtype and row shape of its tensor, contiguous. Every byte
///   is written, and none of them may share memory with another argument.
///
/// All are on the CPU or all on one CUDA device. There it is one launch for up to 32 tensors; the
/// list is read by the device alone, nothing is uploaded or allocated, and the call may be captured.
///
/// # Errors
/// If the arguments do not fit each other as above. What the list holds is never an error.
pub fn gather_rows_into(tensors: &[&Tensor], rows: &Tensor, outputs: &[&Tensor]) -> Result<()> {
    run(&RowCopies::check(RowMap::Gather, tensors, rows, outputs)?)
}

/// Scatters rows of many tensors over fixed buffers: row `rows[i]` of each output becomes row `i` of
/// its tensor, and every other row zero, in the same pass. [`PAD_ROW`], and any other row that an
/// output lacks, lands nowhere.
///
/// * `values` - each `[n, ...]`, contiguous.
/// * `rows` - u32 `[n]`, strictly ascending up to its padding.
/// * `outputs` - each `[any number of rows, ...]`, of the dtype and row shape of its tensor,
///   contiguous. Every byte is written exactly once, and none of them may share memory with another
///   argument.
///
/// All are on the CPU or all on one CUDA device. There it is one launch for up to 32 tensors; the
/// list is read by the device alone, nothing is uploaded or allocated, and the call may be captured.
///
/// # Errors
/// If the arguments do not fit each other as above, and on the CPU if the list does not ascend. On a
/// CUDA device nobody looks at the list; when it does not ascend, some listed rows are zero.
pub fn scatter_rows_into(values: &[&Tensor], rows: &Tensor, outputs: &[&Tensor]) -> Result<()> {
    run(&RowCopies::check(RowMap::Scatter, values, rows, outputs)?)
}

/// [`scatter_rows_into`] without the zeros: rows that are not listed keep what they hold. For callers
/// that read only the listed rows; of a long prompt these are few.
///
/// The list may be in any order, but names no row twice.
///
/// # Errors
/// If the arguments do not fit each other, and on the CPU if a row is listed twice. On a CUDA device
/// nobody looks at the list, and such a row ends up with bytes of either.
pub fn write_rows_into(values: &[&Tensor], rows: &Tensor, outputs: &[&Tensor]) -> Result<()> {
    run(&RowCopies::check(RowMap::Write, values, rows, outputs)?)
}

/// Uploads a row list, padded with [`PAD_ROW`] to `padded` rows: the form that the `_into` functions
/// take.
///
/// # Errors
/// If the list is longer than that, or memory does not hold the padded one.
pub fn row_list(rows: &[u32], padded: usize, device: &Device) -> Result<Tensor> {
    let op = "row-list";
    if rows.len() > padded {
        let n_rows = rows.len();
        return Err(Error::ListTooLong { op, n_rows, padded });
    }
    let row_bytes = DType::U32.size_in_bytes();
    expect_addressable(op, padded, row_bytes)?;
    if device.is_cuda() {
        cuda::refuse_capture(op, device)?;
    }
    let mut list = Vec::new();
    let len = padded.max(1);
    list.try_reserve_exact(len).map_err(|_| Error::NoMemory {
        op,
        rows: padded,
        row_bytes,
    })?;
    list.extend_from_slice(rows);
    list.resize(len, PAD_ROW);
    Ok(Tensor::new(list, device)?.narrow(0, 0, padded)?)
}

/// Loads the kernels on a device, so that none is loaded when a stream is first captured. Does
/// nothing on the CPU.
///
/// # Errors
/// If the driver does not take the kernels, or the build has none.
pub fn load_kernels(device: &Device) -> Result<()> {
    match device {
        Device::Cpu => Ok(()),
        Device::Cuda(_) => cuda::load(device),
        other @ Device::Metal(_) => Err(unsupported("load-kernels", other)),
    }
}

fn run(copies: &RowCopies<'_>) -> Result<()> {
    match copies.arguments().device() {
        Device::Cpu => cpu::copy_rows(copies),
        Device::Cuda(_) => cuda::copy_rows(copies),
        other @ Device::Metal(_) => Err(unsupported(copies.map().op(), other)),
    }
}

pub(crate) fn unsupported(op: &'static str, device: &Device) -> Error {
    Error::UnsupportedDevice {
        op,
        device: format!("{:?}", device.location()),
    }
}

/// Refuses a result of more bytes than there are addresses, before anything multiplies its extents.
pub(crate) fn expect_addressable(op: &'static str, rows: usize, row_bytes: usize) -> Result<()> {
    match rows.checked_mul(row_bytes) {
        Some(bytes) if isize::try_from(bytes).is_ok() => Ok(()),
        _ => Err(Error::NoMemory {
            op,
            rows,
            row_bytes,
        }),
    }
}

/// Bytes of a row of a tensor that has a row axis.
fn row_bytes(tensor: &Tensor) -> usize {
    tensor.dims()[1..].iter().product::<usize>() * tensor.dtype().size_in_bytes()
}

fn contiguous(tensors: &[&Tensor]) -> Result<Vec<Tensor>> {
    tensors.iter().map(|t| Ok(t.contiguous()?)).collect()
}

/// Buffers like the tensors but of `n_rows` rows, to be written wholly.
fn results(tensors: &[&Tensor], n_rows: usize) -> Result<Vec<Tensor>> {
    let like = |t: &&Tensor| {
        let mut dims = t.dims().to_vec();
        // A device gives no memory of zero bytes.
        dims[0] = n_rows.max(1);
        Ok(cuda::uninitialized(&dims, t.dtype(), t.device())?.narrow(0, 0, n_rows)?)
    };
    tensors.iter().map(like).collect()
}
