//! How the kernels of the decoder are named and launched.
#![allow(unsafe_code)]

use candle_core::{DType, Device, Error, Result, Tensor};
use replay_cuda::{
    Arguments,
    kernel::{Grid, Kernel, launch, shared_limit},
};

/// The PTX of each kernel file, made by the build script.
#[allow(unreachable_pub, missing_docs)]
pub(super) mod ptx {
    include!(concat!(env!("OUT_DIR"), "/ptx.rs"));
}

/// A kernel for either dtype of activations.
#[derive(Clone, Copy)]
pub(super) struct ByAct {
    pub(super) f32: Kernel,
    pub(super) bf16: Kernel,
}

impl ByAct {
    pub(super) fn of(self, dtype: DType) -> Result<Kernel> {
        match dtype {
            DType::F32 => Ok(self.f32),
            DType::BF16 => Ok(self.bf16),
            other => candle_core::bail!("expected f32 or bf16 activations, got {}", other.as_str()),
        }
    }
}

/// The kernels `name_f32` and `name_bf16` of a file.
macro_rules! by_act {
    ($file:literal, $ptx:ident, $name:literal) => {
        $crate::ops::cuda::launch::ByAct {
            f32: $crate::ops::cuda::launch::kernel!($file, $ptx, concat!($name, "_f32")),
            bf16: $crate::ops::cuda::launch::kernel!($file, $ptx, concat!($name, "_bf16")),
        }
    };
}

/// The kernel `name` of a file.
macro_rules! kernel {
    ($file:literal, $ptx:ident, $name:expr) => {
        replay_cuda::kernel::Kernel::new(
            concat!("deepseek_model_", $file),
            $crate::ops::cuda::launch::ptx::$ptx,
            $name,
        )
    };
}

/// Declares the argument of a kernel: the struct of its source, field by field. Addresses (u64) come
/// first, and the 4-byte fields are of an even number, so that neither side pads.
macro_rules! kernel_args {
    ($(#[$doc:meta])* struct $name:ident { $($field:ident: $type:ty),* $(,)? }) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy)]
        struct $name {
            $($field: $type),*
        }

        const _: () = assert!(
            size_of::<$name>() == 0 $(+ size_of::<$type>())* && size_of::<$name>().is_multiple_of(8),
            "a struct with padding"
        );

        // SAFETY: a C struct of numbers without padding, of the layout that its kernel declares.
        unsafe impl candle_core::cuda_backend::cudarc::driver::DeviceRepr for $name {}
    };
}

pub(super) use {by_act, kernel, kernel_args};

/// Threads of a block, where a kernel leaves the choice.
pub(super) const BLOCK: u32 = 256;

/// The tensors of an operation, checked.
pub(super) fn tensors<'a>(
    op: &'static str,
    read: &[(&'static str, &'a Tensor)],
    written: &[(&'static str, &'a Tensor)],
) -> Result<Arguments<'a>> {
    Arguments::new(op, read, written).map_err(Error::wrap)
}

/// Launches a kernel once. `args` makes its argument of the addresses of the tensors, in the order
/// in which they were named.
///
/// # Safety
/// As [`replay_cuda::kernel::launch`].
pub(super) unsafe fn run<A>(
    kernel: Kernel,
    tensors: &Arguments<'_>,
    grid: Grid,
    args: impl Fn(&[u64]) -> A,
) -> Result<()>
where
    A: candle_core::cuda_backend::cudarc::driver::DeviceRepr,
{
    // SAFETY: passed on to the caller.
    unsafe {
        launch(kernel, tensors, |addresses| {
            Ok(vec![(args(addresses), grid)])
        })
    }
    .map_err(Error::wrap)
}

/// A grid of `blocks` blocks of [`BLOCK`] threads.
pub(super) fn blocks(blocks: usize) -> Result<Grid> {
    grid(blocks, BLOCK, 0)
}

/// A grid with a thread of [`BLOCK`]-sized blocks for each of `threads`.
pub(super) fn threads(threads: usize) -> Result<Grid> {
    blocks(threads.div_ceil(BLOCK as usize))
}

/// Threads that take a row of `width` values, 16 bytes each: a thread for the rest, if there is one.
pub(super) fn wide_threads(dtype: DType, width: usize) -> usize {
    width.div_ceil(16 / dtype.size_in_bytes())
}

/// Any grid, if a device can have it.
pub(super) fn grid(blocks: usize, threads: u32, shared_bytes: usize) -> Result<Grid> {
    let fits = i32::try_from(blocks).is_ok() && i32::try_from(shared_bytes).is_ok();
    if !fits {
        candle_core::bail!("a grid of {blocks} blocks with {shared_bytes} bytes is too large");
    }
    Ok(Grid {
        blocks: blocks as u32,
        threads,
        shared_bytes: shared_bytes as u32,
    })
}

/// Whether a block can have so much shared memory on this device. Kernels for tensor cores ask for
/// more than GPUs other than those of data centres have.
pub(super) fn has_shared(device: &Device, bytes: usize) -> Result<bool> {
    Ok(bytes <= shared_limit(device).map_err(Error::wrap)?)
}

/// A count for a kernel.
pub(super) fn count(n: usize) -> Result<u32> {
    u32::try_from(n).map_err(|_| Error::msg(format!("{n} is more than a kernel counts")))
}

/// Memory for a result that a kernel writes wholly.
pub(super) fn output(dims: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    let Some((&rows, rest)) = dims.split_first() else {
        candle_core::bail!("expected at least one axis");
    };
    // A device has no memory of 0 bytes.
    let held: Vec<usize> = [&[rows.max(1)], rest].concat();
    // SAFETY: the memory is the device's, where no bit pattern of these dtypes is invalid, and the
    // callers write every element before they hand the tensor out.
    unsafe { Tensor::empty(held, dtype, device) }?.narrow(0, 0, rows)
}

/// Refuses a tensor of another shape or dtype.
pub(super) fn expect(
    op: &str,
    name: &str,
    tensor: &Tensor,
    dtype: DType,
    dims: &[usize],
) -> Result<()> {
    if tensor.dtype() == dtype && tensor.dims() == dims {
        return Ok(());
    }
    candle_core::bail!(
        "{op}: {name}: expected {} {dims:?}, got {} {:?}",
        dtype.as_str(),
        tensor.dtype().as_str(),
        tensor.dims()
    )
}

/// Refuses rows of `width` elements that a kernel cannot read in aligned fours.
pub(super) fn expect_fours(op: &str, name: &str, tensor: &Tensor, width: usize) -> Result<()> {
    // Memory that a device hands out is aligned to far more.
    let offset = tensor.layout().start_offset();
    if width.is_multiple_of(4) && offset.is_multiple_of(4) {
        return Ok(());
    }
    candle_core::bail!(
        "{op}: {name}: expected rows of fours, got {width} elements at an offset of {offset}"
    )
}
