//! CUDA devices: opening one, or saying why that cannot work, and the memory of one that is open.
//!
//! What the driver says of a machine is gathered first, as [`DeviceFacts`]; whether this program can
//! run there is decided by those facts alone, before anything is loaded. One case never gets here: a
//! program is linked against the driver's library, so where there is no `libcuda.so.1` at all the
//! loader ends it before `main`, and names the library.

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "cuda_absent.rs"]
mod cuda;
mod error;
mod facts;
mod target;

use candle_core::Device;

pub use error::DeviceError;
pub use facts::{DeviceFacts, DeviceMemory, GpuFacts};
pub use target::{Arch, KernelTarget, Version};

use crate::{Error, Result, ops::kernel_text};

/// Opens GPU number `ordinal`, on a stream of its own: work on the legacy default stream cannot be
/// captured in graphs.
///
/// # Errors
/// [`DeviceError`], if the program has no kernels for CUDA, or the driver or the GPU cannot run them.
pub fn open_cuda(ordinal: usize) -> Result<Device> {
    // The context is held until the device has its own hold of it: to make it twice takes long.
    let (facts, _context) = cuda::gather(ordinal)?;
    facts.check(&KernelTarget::of(kernel_text()))?;
    Device::new_cuda_with_stream(ordinal).map_err(|error| match Error::from(error) {
        error if error.is_out_of_device_memory() => DeviceError::NoMemory { ordinal }.into(),
        error => error,
    })
}

/// Begins [`DeviceMemory::peak`] anew, from what is in use now. Nothing happens on a CPU.
///
/// # Errors
/// If the driver fails.
pub fn reset_peak(device: &Device) -> Result<()> {
    if !device.is_cuda() {
        return Ok(());
    }
    device.synchronize()?;
    cuda::reset_peak(device)
}

/// Memory of a device, once all work so far is done; `None` of a CPU.
///
/// # Errors
/// If the driver fails.
pub fn memory(device: &Device) -> Result<Option<DeviceMemory>> {
    if !device.is_cuda() {
        return Ok(None);
    }
    // Memory that was given back is free only then.
    device.synchronize()?;
    cuda::memory(device).map(Some)
}
