//! Where tensors lie, and which of a program's values are tensors.

use candle_core::{CpuStorage, Storage, Tensor};

use crate::{Error, Result, device};

/// The address of a tensor's first element, in host or device memory.
pub(crate) fn address(tensor: &Tensor) -> Result<u64> {
    let (storage, layout) = tensor.storage_and_layout();
    let base = match &*storage {
        Storage::Cpu(storage) => host_address(storage),
        Storage::Cuda(storage) => device::address(storage)?,
        Storage::Metal(_) => {
            return Err(Error::NoGraphs {
                device: format!("{:?}", tensor.device().location()),
            });
        }
    };
    Ok(base + (layout.start_offset() * tensor.dtype().size_in_bytes()) as u64)
}

fn host_address(storage: &CpuStorage) -> u64 {
    let address = match storage {
        CpuStorage::U8(v)
        | CpuStorage::F6E2M3(v)
        | CpuStorage::F6E3M2(v)
        | CpuStorage::F4(v)
        | CpuStorage::F8E8M0(v) => v.as_ptr().addr(),
        CpuStorage::U32(v) => v.as_ptr().addr(),
        CpuStorage::I16(v) => v.as_ptr().addr(),
        CpuStorage::I32(v) => v.as_ptr().addr(),
        CpuStorage::I64(v) => v.as_ptr().addr(),
        CpuStorage::BF16(v) => v.as_ptr().addr(),
        CpuStorage::F16(v) => v.as_ptr().addr(),
        CpuStorage::F32(v) => v.as_ptr().addr(),
        CpuStorage::F64(v) => v.as_ptr().addr(),
        CpuStorage::F8E4M3(v) => v.as_ptr().addr(),
    };
    address as u64
}

/// What a break may give to the segments after it: tensors, or nothing.
///
/// A type of the program's own that holds tensors implements it by visiting each of them.
pub trait BreakOutputs {
    /// Calls `visit` with every tensor that later segments may read, always in the same order.
    fn visit(&self, visit: &mut dyn FnMut(&Tensor));
}

impl BreakOutputs for () {
    fn visit(&self, _: &mut dyn FnMut(&Tensor)) {}
}

impl BreakOutputs for Tensor {
    fn visit(&self, visit: &mut dyn FnMut(&Tensor)) {
        visit(self);
    }
}

impl<T: BreakOutputs> BreakOutputs for Option<T> {
    fn visit(&self, visit: &mut dyn FnMut(&Tensor)) {
        self.iter().for_each(|t| t.visit(visit));
    }
}

impl<T: BreakOutputs> BreakOutputs for Vec<T> {
    fn visit(&self, visit: &mut dyn FnMut(&Tensor)) {
        self.iter().for_each(|t| t.visit(visit));
    }
}

impl<T: BreakOutputs, const N: usize> BreakOutputs for [T; N] {
    fn visit(&self, visit: &mut dyn FnMut(&Tensor)) {
        self.iter().for_each(|t| t.visit(visit));
    }
}

impl<A: BreakOutputs, B: BreakOutputs> BreakOutputs for (A, B) {
    fn visit(&self, visit: &mut dyn FnMut(&Tensor)) {
        self.0.visit(visit);
        self.1.visit(visit);
    }
}

/// The addresses of all tensors of a break's outputs.
pub(crate) fn addresses(outputs: &impl BreakOutputs) -> Result<Vec<u64>> {
    let mut all = Ok(Vec::new());
    outputs.visit(&mut |tensor| {
        if let Ok(list) = &mut all {
            match address(tensor) {
                Ok(address) => list.push(address),
                Err(error) => all = Err(error),
            }
        }
    });
    all
}
