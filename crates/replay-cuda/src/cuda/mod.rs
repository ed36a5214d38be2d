//! The implementation on CUDA devices.

mod locks;
mod raw;

pub(crate) use raw::{copy_rows, load, pad_slots, refuse_capture, replay_rows, uninitialized};
