//! Asks the driver.
#![allow(unsafe_code)]

use std::sync::Arc;

use candle_core::{
    Device,
    cuda_backend::cudarc::driver::{CudaContext, DriverError, result, sys},
};
use replay_graph::DriverStatus;

use super::{DeviceError, DeviceFacts, DeviceMemory, GpuFacts, Version};
use crate::Result;

/// Facts of the machine and of GPU number `ordinal`, with the GPU's context, if there is one.
pub(super) fn gather(ordinal: usize) -> Result<(DeviceFacts, Option<Arc<CudaContext>>)> {
    let version = driver_version().map_err(failed("cannot ask the driver of", ordinal))?;
    let (started, gpus) = match CudaContext::device_count() {
        Ok(gpus) => (DriverStatus::new(0), usize::try_from(gpus).unwrap_or(0)),
        Err(error) => (status(error), 0),
    };
    let context = (ordinal < gpus)
        .then(|| CudaContext::new(ordinal))
        .transpose()
        .map_err(|error| match error {
            DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY) => {
                DeviceError::NoMemory { ordinal }
            }
            error => failed("cannot open", ordinal)(error),
        })?;
    let gpu = context.as_deref().map(gpu).transpose();
    let facts = DeviceFacts {
        ordinal,
        started,
        driver_version: version,
        gpus,
        gpu: gpu.map_err(failed("cannot ask about", ordinal))?,
    };
    Ok((facts, context))
}

/// Memory of a CUDA device.
pub(super) fn memory(device: &Device) -> Result<DeviceMemory> {
    let stream = device.as_cuda_device()?.cuda_stream();
    let context = stream.context();
    let asked = memory_of(context);
    Ok(asked.map_err(failed("cannot ask about the memory of", context.ordinal()))?)
}

fn gpu(context: &CudaContext) -> Result<GpuFacts, DriverError> {
    let (major, minor) = context.compute_capability()?;
    Ok(GpuFacts {
        name: context.name()?,
        capability: Version::new(major as u32, minor as u32),
        memory: memory_of(context)?,
    })
}

fn memory_of(context: &CudaContext) -> Result<DeviceMemory, DriverError> {
    let (free, total) = context.mem_get_info()?;
    Ok(DeviceMemory {
        free: free as u64,
        total: total as u64,
        peak: pool_peak(context)?,
    })
}

/// The version of CUDA that the driver supports; of a library that is no driver, 0.0.
fn driver_version() -> Result<Version, DriverError> {
    let mut version = 0;
    // SAFETY: the driver writes one number; the call is allowed before the driver is started.
    match unsafe { sys::cuDriverGetVersion(&raw mut version) }.result() {
        Ok(()) => {}
        // Starting it says the same, as a fact to judge.
        Err(DriverError(sys::CUresult::CUDA_ERROR_STUB_LIBRARY)) => return Ok(Version::new(0, 0)),
        Err(error) => return Err(error),
    }
    let version = version as u32;
    Ok(Version::new(version / 1000, version % 1000 / 10))
}

/// Lets the most bytes in use be those of now.
pub(super) fn reset_peak(device: &Device) -> Result<()> {
    let stream = device.as_cuda_device()?.cuda_stream();
    let context = stream.context();
    let reset = || {
        if !context.has_async_alloc() {
            return Ok(());
        }
        let mut zero = 0_u64;
        // SAFETY: the device is that of a context that is alive.
        let pool = unsafe { result::device::get_mem_pool(context.cu_device()) }?;
        // SAFETY: the pool is the device's current one, the attribute is a 64-bit number, and 0 is the
        // value that resets it.
        unsafe { result::mem_pool::set_attribute(pool, PEAK, (&raw mut zero).cast()) }
    };
    Ok(reset().map_err(failed("cannot ask about the memory of", context.ordinal()))?)
}

const PEAK: sys::CUmemPool_attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH;

/// Most bytes that were in use at once of the pool that tensors are allocated from; 0 on a device
/// without pools.
fn pool_peak(context: &CudaContext) -> Result<u64, DriverError> {
    if !context.has_async_alloc() {
        return Ok(0);
    }
    let mut bytes = 0_u64;
    // SAFETY: the device is that of a context that is alive.
    let pool = unsafe { result::device::get_mem_pool(context.cu_device()) }?;
    // SAFETY: the pool is the device's current one, and the attribute is a 64-bit number.
    unsafe { result::mem_pool::get_attribute(pool, PEAK, (&raw mut bytes).cast()) }?;
    Ok(bytes)
}

fn failed(what: &'static str, ordinal: usize) -> impl Fn(DriverError) -> DeviceError {
    move |error| DeviceError::Driver {
        what,
        ordinal,
        status: status(error),
    }
}

fn status(error: DriverError) -> DriverStatus {
    DriverStatus::new(error.0 as u32)
}
