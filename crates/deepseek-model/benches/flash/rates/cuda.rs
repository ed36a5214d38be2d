//! Bytes of a CUDA device.

use anyhow::Result;
use candle_core::Device;

/// What copies so many bytes within the device at each call.
pub(crate) fn copier(device: &Device, bytes: usize) -> Result<Box<dyn FnMut() -> Result<()>>> {
    if device.is_cpu() {
        let (from, mut to) = (vec![1u8; bytes], vec![0u8; bytes]);
        return Ok(Box::new(move || {
            to.copy_from_slice(std::hint::black_box(&from));
            std::hint::black_box(&to);
            Ok(())
        }));
    }
    let stream = device.as_cuda_device()?.cuda_stream();
    let from = stream.alloc_zeros::<u8>(bytes)?;
    let mut to = stream.alloc_zeros::<u8>(bytes)?;
    Ok(Box::new(move || Ok(stream.memcpy_dtod(&from, &mut to)?)))
}

/// What the device is called.
pub(crate) fn name(device: &Device) -> Result<String> {
    if device.is_cpu() {
        return Ok("cpu".into());
    }
    let stream = device.as_cuda_device()?.cuda_stream();
    Ok(stream.context().name()?)
}
