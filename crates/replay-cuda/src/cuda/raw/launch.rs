//! Loading kernels, and launching one.

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::{
    CUdevice_attribute, CUfunction_attribute, CUstreamCaptureStatus,
};
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaStream, DeviceRepr, LaunchConfig, PushKernelArg,
};
use candle_core::{CudaDevice, DType, Device, Tensor};

use crate::cuda::locks::with_addresses;
use crate::operands::Arguments;
use crate::{Error, Result};

/// The PTX of each kernel file, made by the build script.
#[allow(unreachable_pub)]
mod ptx {
    include!(concat!(env!("OUT_DIR"), "/ptx.rs"));
}

/// A kernel, by its file and its name there.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    module: &'static str,
    ptx: &'static str,
    name: &'static str,
}

impl Kernel {
    /// The kernel `name` of a file of PTX, which the device keeps under the name `module`: one that
    /// no other file of the process has.
    #[must_use]
    pub const fn new(module: &'static str, ptx: &'static str, name: &'static str) -> Self {
        Self { module, ptx, name }
    }

    /// Loads the kernel on a CUDA device, so that its first launch does not: a file cannot be loaded
    /// while a stream is captured.
    ///
    /// # Errors
    /// If the device is not a CUDA device, or the file or the kernel cannot be loaded.
    pub fn load(self, device: &Device) -> Result<()> {
        // Asking for an attribute makes a driver that loads lazily load the kernel now.
        self.on(device.as_cuda_device()?)?.num_regs().w()?;
        Ok(())
    }

    pub(super) const GATHER: Self = Self::row_copy("gather_rows");
    pub(super) const SCATTER: Self = Self::row_copy("scatter_rows");
    pub(super) const WRITE: Self = Self::row_copy("write_rows");
    pub(super) const REPLAY_ROWS: Self = Self::replay_rows("replay_rows");
    pub(super) const PAD_SLOTS: Self = Self::replay_rows("pad_rebuilt_slots");

    const ALL: [Self; 5] = [
        Self::GATHER,
        Self::SCATTER,
        Self::WRITE,
        Self::REPLAY_ROWS,
        Self::PAD_SLOTS,
    ];

    const fn row_copy(name: &'static str) -> Self {
        Self::new("replay_cuda_row_copy", ptx::ROW_COPY, name)
    }

    const fn replay_rows(name: &'static str) -> Self {
        Self::new("replay_cuda_replay_rows", ptx::REPLAY_ROWS, name)
    }

    /// The kernel on a device, which loads a file when it is first asked for.
    fn on(self, device: &CudaDevice) -> Result<CudaFunction> {
        let function = device.get_or_load_custom_func(self.name, self.module, self.ptx)?;
        Ok(function.into_cuda_function())
    }
}

/// Loads every kernel on the device.
pub(crate) fn load(device: &Device) -> Result<()> {
    Kernel::ALL
        .iter()
        .try_for_each(|kernel| kernel.load(device))
}

/// Refuses to go on while the device's stream is captured.
pub(crate) fn refuse_capture(op: &'static str, device: &Device) -> Result<()> {
    if is_captured(&device.as_cuda_device()?.cuda_stream())? {
        return Err(Error::UploadUnderCapture { op });
    }
    Ok(())
}

fn is_captured(stream: &CudaStream) -> Result<bool> {
    Ok(stream.capture_status().w()? != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// A tensor whose memory has been written by nobody, for outputs that a kernel writes wholly.
pub(crate) fn uninitialized(dims: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    // SAFETY: the memory is the device's, where no bit pattern of these dtypes is invalid, and the
    // callers in this crate write every byte before they hand the tensor out.
    Ok(unsafe { Tensor::empty(dims, dtype, device) }?)
}

/// How a kernel is launched. Without blocks there is nothing to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grid {
    /// Blocks, along one axis.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, in bytes. More than the 48 KiB that every device grants is
    /// asked for, and refused where the device has less: see [`shared_limit`].
    pub shared_bytes: u32,
}

/// Dynamic shared memory that a block gets without asking.
const GRANTED_SHARED_BYTES: u32 = 48 * 1024;

/// Bytes of shared memory that a block can have on a CUDA device, static and dynamic together, if its
/// kernel asks for them.
///
/// # Errors
/// If the device is not a CUDA device, or the driver fails.
pub fn shared_limit(device: &Device) -> Result<usize> {
    let stream = device.as_cuda_device()?.cuda_stream();
    let limit = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
    let bytes = stream.context().attribute(limit).w()?;
    Ok(usize::try_from(bytes).unwrap_or(0))
}

/// Asks for a kernel's dynamic shared memory. What it was granted before is not taken back: a graph may
/// hold launches that need more than the next one does.
fn ask_for_shared(function: &CudaFunction, bytes: u32) -> Result<()> {
    let most = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    let bytes = bytes as i32;
    if bytes > GRANTED_SHARED_BYTES as i32 && bytes > function.get_attribute(most).w()? {
        function.set_attribute(most, bytes).w()?;
    }
    Ok(())
}

/// Launches a kernel on the stream of the arguments' device, once for each of what `launches` makes
/// of the device addresses of `arguments`. The call does not wait for the kernel.
///
/// # Errors
/// If `launches` fails, events track the arguments while the stream is captured, or a launch fails.
///
/// # Safety
///
/// - **Kernel**: `kernel` takes one argument of the type `A`, and may run in the grid beside it.
/// - **Extents**: every address in an `A` lies in the argument it was made from, and with the counts
///   beside it stays within that argument, aligned as the kernel asks. The kernel touches nothing
///   else.
/// - **Writes**: the kernel writes only to arguments that are marked as written.
pub unsafe fn launch<A: DeviceRepr>(
    kernel: Kernel,
    arguments: &Arguments<'_>,
    mut launches: impl FnMut(&[u64]) -> Result<Vec<(A, Grid)>>,
) -> Result<()> {
    let device = arguments.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    // To wait for an event from outside the capture would break it, with an error that says nothing.
    if stream.context().is_managing_stream_synchronization() && is_captured(&stream)? {
        return Err(Error::EventTracking { op: arguments.op() });
    }
    with_addresses(&stream, arguments, &mut |addresses| {
        for (args, grid) in launches(addresses)? {
            if grid.blocks == 0 {
                continue;
            }
            let function = kernel.on(device)?;
            ask_for_shared(&function, grid.shared_bytes)?;
            let config = LaunchConfig {
                grid_dim: (grid.blocks, 1, 1),
                block_dim: (grid.threads, 1, 1),
                shared_mem_bytes: grid.shared_bytes,
            };
            let mut builder = stream.launch_builder(&function);
            builder.arg(&args);
            // SAFETY: the caller vouches that the kernel takes this argument and stays within the
            // tensors. Their storages are locked, so they live, until the launch is queued; memory
            // freed later is freed in the order of the same stream, after the kernel. Writes go to
            // storages that are locked exclusively.
            unsafe { builder.launch(config) }.w()?;
        }
        Ok(())
    })
}
