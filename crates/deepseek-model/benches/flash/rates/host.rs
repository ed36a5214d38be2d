//! Bytes of the host, in a build without CUDA.

use anyhow::Result;
use candle_core::Device;

/// What copies so many bytes at each call.
#[expect(clippy::unnecessary_wraps, reason = "the signature of the other build")]
pub(crate) fn copier(_: &Device, bytes: usize) -> Result<Box<dyn FnMut() -> Result<()>>> {
    let (from, mut to) = (vec![1u8; bytes], vec![0u8; bytes]);
    Ok(Box::new(move || {
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&to);
        Ok(())
    }))
}

/// What the device is called.
#[expect(clippy::unnecessary_wraps, reason = "the signature of the other build")]
pub(crate) fn name(_: &Device) -> Result<String> {
    Ok("cpu".into())
}
