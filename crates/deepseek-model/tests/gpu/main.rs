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
mod graphs;
mod reference;

use candle_core::Device;

/// A stream of the GPU of this machine that can be captured.
fn gpu() -> Device {
    Device::new_cuda_with_stream(0).expect("a GPU")
}
