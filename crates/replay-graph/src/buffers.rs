//! Buffers whose address never changes: what is in them survives from one segment to the next, and
//! from one launch to the next.

use std::fmt;
use std::rc::Rc;

use candle_core::{DType, Device, Tensor};

use crate::address::address;
use crate::{Error, Result};

/// A buffer that a program needs: of each row the same shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferSpec {
    /// What the program calls it.
    pub name: String,
    /// Shape of a row; empty for one element a row.
    pub row_shape: Vec<usize>,
    /// Element type.
    pub dtype: DType,
}

impl BufferSpec {
    /// A buffer of this name.
    pub fn new(name: impl Into<String>, row_shape: impl Into<Vec<usize>>, dtype: DType) -> Self {
        Self {
            name: name.into(),
            row_shape: row_shape.into(),
            dtype,
        }
    }

    /// Bytes of a row; `usize::MAX` when they are more than that counts.
    pub fn row_bytes(&self) -> usize {
        let size = self.dtype.size_in_bytes();
        self.row_shape
            .iter()
            .fold(size, |bytes, &len| bytes.saturating_mul(len))
    }

    /// Whether so many rows can be allocated, as far as that is known before: a host allocation that
    /// fails ends the program. A device says so itself.
    fn has_memory(&self, max_rows: usize, device: &Device) -> bool {
        let bytes = || self.row_bytes().saturating_mul(max_rows);
        let on_host = || Vec::<u8>::new().try_reserve_exact(bytes()).is_ok();
        self.is_addressable(max_rows) && (!device.is_cpu() || on_host())
    }

    /// Whether so many rows have an address for each byte, and extents whose product can be taken in
    /// any order.
    fn is_addressable(&self, max_rows: usize) -> bool {
        let size = self.dtype.size_in_bytes();
        let extents = self.row_shape.iter().chain([&max_rows]);
        let bytes = extents.fold(size, |bytes, &len| bytes.saturating_mul(len.max(1)));
        isize::try_from(bytes).is_ok()
    }
}

/// Buffers allocated once for the largest number of rows, and handed out as views of their first
/// rows. A clone is another handle to the same buffers.
///
/// ```
/// use candle_core::{DType, Device};
/// use replay_graph::{BufferSpec, FixedBuffers};
///
/// let specs = [BufferSpec::new("hidden", [64], DType::F32), BufferSpec::new("slots", [], DType::I64)];
/// let buffers = FixedBuffers::new(&specs, 32, &Device::Cpu)?;
/// assert_eq!(buffers.rows("hidden", 8)?.dims(), [8, 64]);
/// assert!(buffers.rows("hidden", 33).is_err());
/// # Ok::<(), replay_graph::Error>(())
/// ```
#[derive(Clone)]
pub struct FixedBuffers(Rc<Inner>);

struct Inner {
    specs: Vec<BufferSpec>,
    /// `[max_rows, row shape]` each, contiguous, zero at first.
    tensors: Vec<Tensor>,
    /// Where each begins.
    addresses: Vec<u64>,
    max_rows: usize,
}

impl FixedBuffers {
    /// Allocates buffers of `max_rows` rows each. Call it outside captures.
    ///
    /// # Errors
    ///
    /// If two specs share a name, a buffer has more bytes than there are addresses or than the host
    /// can allocate, or the device's memory runs out.
    pub fn new(specs: &[BufferSpec], max_rows: usize, device: &Device) -> Result<Self> {
        let (mut tensors, mut addresses) = (Vec::new(), Vec::new());
        for (i, spec) in specs.iter().enumerate() {
            if specs[..i].iter().any(|other| other.name == spec.name) {
                let name = spec.name.clone();
                return Err(Error::DuplicateBuffer { name });
            }
            if !spec.has_memory(max_rows, device) {
                return Err(Error::BufferTooLarge {
                    name: spec.name.clone(),
                    max_rows,
                    row_shape: spec.row_shape.clone(),
                    dtype: spec.dtype,
                });
            }
            let mut dims = vec![max_rows];
            dims.extend(&spec.row_shape);
            let tensor = Tensor::zeros(dims, spec.dtype, device)?;
            addresses.push(address(&tensor)?);
            tensors.push(tensor);
        }
        Ok(Self(Rc::new(Inner {
            specs: specs.to_vec(),
            tensors,
            addresses,
            max_rows,
        })))
    }

    /// The first `n` rows of a buffer, `[n, row shape]`, contiguous; always at the same address.
    ///
    /// # Errors
    ///
    /// If there is no such buffer, or it has fewer rows.
    pub fn rows(&self, name: &str, n: usize) -> Result<Tensor> {
        match self.0.specs.iter().position(|spec| spec.name == name) {
            Some(index) => self.view(index, n),
            None => Err(Error::NoSuchBuffer {
                name: name.to_owned(),
            }),
        }
    }

    /// The first `n` rows of every buffer, in the order of the specs.
    ///
    /// # Errors
    ///
    /// If the buffers have fewer rows.
    pub fn all_rows(&self, n: usize) -> Result<Vec<Tensor>> {
        (0..self.0.specs.len())
            .map(|index| self.view(index, n))
            .collect()
    }

    fn view(&self, index: usize, n: usize) -> Result<Tensor> {
        if n > self.0.max_rows {
            return Err(Error::TooManyRows {
                rows: n,
                max_rows: self.0.max_rows,
            });
        }
        Ok(self.0.tensors[index].narrow(0, 0, n)?)
    }

    /// Checks that tensors are one for each buffer, of its row shape and dtype.
    ///
    /// # Errors
    ///
    /// If there are more or fewer, or one does not fit.
    pub fn check(&self, tensors: &[Tensor]) -> Result<()> {
        let specs = &self.0.specs;
        if tensors.len() != specs.len() {
            return Err(Error::BufferCount {
                expected: specs.len(),
                got: tensors.len(),
            });
        }
        for (spec, tensor) in specs.iter().zip(tensors) {
            let row = tensor.dims().get(1..).unwrap_or_default();
            if tensor.rank() == 0 || row != spec.row_shape || tensor.dtype() != spec.dtype {
                return Err(Error::BufferShape {
                    name: spec.name.clone(),
                    expected: spec.row_shape.clone(),
                    dtype: spec.dtype,
                    got: tensor.dims().to_vec(),
                    got_dtype: tensor.dtype(),
                });
            }
        }
        Ok(())
    }

    /// Sets the first `n` rows of every buffer to zero.
    ///
    /// # Errors
    ///
    /// If the buffers have fewer rows, or the device fails.
    pub fn set_zero(&self, n: usize) -> Result<()> {
        for view in self.all_rows(n)? {
            view.zero_set()?;
        }
        Ok(())
    }

    /// What the buffers were made from.
    pub fn specs(&self) -> &[BufferSpec] {
        &self.0.specs
    }

    /// Rows that each holds.
    pub fn max_rows(&self) -> usize {
        self.0.max_rows
    }

    /// Bytes of all buffers.
    pub fn bytes(&self) -> usize {
        self.0.max_rows
            * self
                .0
                .specs
                .iter()
                .map(BufferSpec::row_bytes)
                .sum::<usize>()
    }

    /// Whether an address lies in one of the buffers.
    pub(crate) fn holds(&self, address: u64) -> bool {
        let starts = self.0.addresses.iter().zip(&self.0.specs);
        starts
            .map(|(&start, spec)| start..start + (self.0.max_rows * spec.row_bytes()) as u64)
            .any(|range| range.contains(&address))
    }

    /// Whether both are handles to the same buffers.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for FixedBuffers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FixedBuffers")
            .field("specs", &self.0.specs)
            .field("max_rows", &self.0.max_rows)
            .finish_non_exhaustive()
    }
}
