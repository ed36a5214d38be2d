//! The decoder on a GPU: the reference's values, and the CPU's text.
//!
//! These tests fail without a GPU; `cargo xtask test-gpu` runs them. The operations by themselves
//! are unit tests of the crate, of names that begin with `gpu_`.

#[path = "../common/mod.rs"]
mod common;

/// Under `REPLAY_GPU_PLAIN_MEMORY`, as memcheck sets it, captures get memory that no graph owns.
#[path = "../../../replay-graph/tests/gpu/launches.rs"]
#[allow(dead_code, reason = "shared with the tests of replay-graph")]
mod intercepted;

mod batches;
mod breaks;
mod drive;
mod engine;
mod graphs;
mod memory;
mod prefix;
mod reference;
mod serving;

use candle_core::Device;

/// Whether a sanitizer watches, under which every access costs many times more.
fn small() -> bool {
    std::env::var_os("REPLAY_GPU_SMALL").is_some()
}

/// Bytes that are free on the device, once it has done what it was given.
fn free(device: &Device) -> usize {
    device.synchronize().unwrap();
    let stream = device.as_cuda_device().unwrap().cuda_stream();
    stream.context().mem_get_info().unwrap().0
}

/// A stream of the GPU of this machine that can be captured.
fn gpu() -> Device {
    Device::new_cuda_with_stream(0).expect("a GPU")
}
