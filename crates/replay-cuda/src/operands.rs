//! The tensors of an operation, and the checks that all operations need.

use std::ops::Range;

use candle_core::{DType, Device, Storage, Tensor};

use crate::{Error, Operand, Result};

/// A tensor of an operation.
#[derive(Clone, Copy)]
pub(crate) struct Argument<'a> {
    pub(crate) tensor: &'a Tensor,
    pub(crate) name: Operand,
    pub(crate) written: bool,
}

/// Tensors that have been checked: all contiguous and on one device, and none that is written shares
/// memory with another.
pub struct Arguments<'a> {
    op: &'static str,
    list: Vec<Argument<'a>>,
}

impl<'a> Arguments<'a> {
    /// The tensors of an operation: those that are read, then those that are written, each with its
    /// name for messages.
    ///
    /// # Errors
    /// If one is not contiguous or not on the device of the first, or one that is written shares
    /// memory with another.
    pub fn new(
        op: &'static str,
        read: &[(&'static str, &'a Tensor)],
        written: &[(&'static str, &'a Tensor)],
    ) -> Result<Self> {
        let argument = |(name, tensor), written| Argument {
            tensor,
            name: Operand::Field(name),
            written,
        };
        let read = read.iter().map(|a| argument(*a, false));
        let written = written.iter().map(|a| argument(*a, true));
        Self::check(op, read.chain(written).collect())
    }

    /// The tensors, if they are contiguous, on one device and apart where they must be. Quadratic in
    /// the number of those that are written.
    pub(crate) fn check(op: &'static str, list: Vec<Argument<'a>>) -> Result<Self> {
        for argument in &list {
            let (operand, first) = (argument.name, &list[0]);
            if !argument.tensor.device().same_device(first.tensor.device()) {
                let first = first.name;
                return Err(Error::Device { op, operand, first });
            }
            if !argument.tensor.is_contiguous() {
                return Err(Error::NotContiguous { op, operand });
            }
        }
        let places: Vec<_> = list.iter().map(|a| Place::of(a.tensor)).collect();
        for (i, argument) in list.iter().enumerate().filter(|(_, a)| a.written) {
            if let Some(j) = (0..list.len()).find(|j| *j != i && places[i].overlaps(&places[*j])) {
                let (written, other) = (argument.name, list[j].name);
                return Err(Error::Overlap { op, written, other });
            }
        }
        Ok(Self { op, list })
    }

    /// The operation, for messages.
    pub(crate) fn op(&self) -> &'static str {
        self.op
    }

    /// The tensors, in the order in which they were given.
    pub(crate) fn list(&self) -> &[Argument<'a>] {
        &self.list
    }

    /// The device that all are on; the CPU if there are none.
    pub(crate) fn device(&self) -> &Device {
        self.list
            .first()
            .map_or(&Device::Cpu, |a| a.tensor.device())
    }
}

/// Where a tensor's elements lie.
pub(crate) struct Place {
    /// Address of the storage, which tells it from others.
    pub(crate) storage: usize,
    /// Bytes within the storage. Meaningful for contiguous tensors.
    pub(crate) bytes: Range<usize>,
}

impl Place {
    pub(crate) fn of(tensor: &Tensor) -> Self {
        let (storage, layout) = tensor.storage_and_layout();
        let size = tensor.dtype().size_in_bytes();
        let start = layout.start_offset() * size;
        Self {
            storage: std::ptr::from_ref::<Storage>(&storage).addr(),
            bytes: start..start + tensor.elem_count() * size,
        }
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.storage == other.storage
            && self.bytes.start < other.bytes.end
            && other.bytes.start < self.bytes.end
    }
}

/// Refuses a tensor that is not of the one dtype.
pub(crate) fn expect_dtype(
    op: &'static str,
    name: Operand,
    tensor: &Tensor,
    expected: &[DType],
) -> Result<()> {
    let got = tensor.dtype();
    if expected.contains(&got) {
        return Ok(());
    }
    let names: Vec<_> = expected.iter().map(|dtype| format!("{dtype:?}")).collect();
    Err(Error::DType {
        op,
        operand: name,
        expected: names.join(" or "),
        got,
    })
}

/// Refuses a tensor of another shape.
pub(crate) fn expect_dims(
    op: &'static str,
    name: Operand,
    tensor: &Tensor,
    expected: &[usize],
) -> Result<()> {
    if tensor.dims() == expected {
        return Ok(());
    }
    let (expected, got) = (expected.to_vec(), tensor.dims().to_vec());
    Err(Error::Shape {
        op,
        operand: name,
        expected,
        got,
    })
}
