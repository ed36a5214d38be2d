//! Reading and making CPU tensors as plain slices.

use std::ops::{Deref, Range};

use candle_core::{CpuStorage, Device, Result, Shape, Storage, StorageRef, Tensor, bail};

/// The elements of a contiguous CPU tensor, row-major, for as long as its storage is borrowed.
pub(crate) struct Elements<'a, T> {
    storage: StorageRef<'a>,
    range: Range<usize>,
    pick: fn(&CpuStorage) -> Option<&[T]>,
}

impl<T> Deref for Elements<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &*self.storage {
            Storage::Cpu(cpu) => (self.pick)(cpu).map_or(&[], |all| &all[self.range.clone()]),
            _ => &[],
        }
    }
}

fn elements<'a, T>(
    tensor: &'a Tensor,
    pick: fn(&CpuStorage) -> Option<&[T]>,
    wanted: &'static str,
) -> Result<Elements<'a, T>> {
    let (storage, layout) = tensor.storage_and_layout();
    let Some((start, end)) = layout.contiguous_offsets() else {
        bail!(
            "expected a contiguous tensor, got strides {:?}",
            layout.stride()
        );
    };
    match &*storage {
        Storage::Cpu(cpu) if pick(cpu).is_some() => {}
        _ => bail!(
            "expected a {wanted} tensor on the cpu, got {:?} on {:?}",
            tensor.dtype(),
            tensor.device()
        ),
    }
    Ok(Elements {
        storage,
        range: start..end,
        pick,
    })
}

/// The elements of a contiguous f32 CPU tensor.
pub(crate) fn f32s(tensor: &Tensor) -> Result<Elements<'_, f32>> {
    elements(
        tensor,
        |s| {
            if let CpuStorage::F32(v) = s {
                Some(v)
            } else {
                None
            }
        },
        "f32",
    )
}

/// The elements of a contiguous u32 CPU tensor.
pub(crate) fn u32s(tensor: &Tensor) -> Result<Elements<'_, u32>> {
    elements(
        tensor,
        |s| {
            if let CpuStorage::U32(v) = s {
                Some(v)
            } else {
                None
            }
        },
        "u32",
    )
}

/// A CPU tensor that takes over `values`.
pub(crate) fn from_f32s(values: Vec<f32>, shape: impl Into<Shape>) -> Result<Tensor> {
    Tensor::from_vec(values, shape.into(), &Device::Cpu)
}

/// Rows one task of a parallel loop takes at least: below this, starting a task costs more.
pub(crate) const ROWS_PER_TASK: usize = 16;
