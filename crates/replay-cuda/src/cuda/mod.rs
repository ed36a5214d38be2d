//! The implementation on CUDA devices.

mod locks;
mod raw;

/// Launching kernels of your own on candle tensors, as this crate launches its own.
///
/// A file of kernels is compiled to PTX by the build script of the crate it belongs to. A launch
/// names the tensors that the kernel reads and writes; their storages are locked, and their addresses
/// are known, for as long as the launch takes to be queued. It works under stream capture.
pub mod kernel {
    pub use super::raw::launch::{Grid, Kernel, launch, shared_limit};
}

pub(crate) use raw::{copy_rows, load, pad_slots, refuse_capture, replay_rows, uninitialized};
