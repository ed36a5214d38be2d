//! The raw launches, and all the `unsafe` of the crate.
//!
//! What comes out of this module is safe: it takes arguments that have been checked (shapes, dtypes,
//! devices, contiguity, overlap) and turns them into what a kernel takes. The kernels' own sources
//! (`kernels/*.cu`) say of every argument where it lies, how long it is and how it is aligned.
#![allow(unsafe_code)]

mod args;
pub(crate) mod launch;
mod replay_rows;
mod row_copy;

pub(crate) use launch::{load, refuse_capture, uninitialized};
pub(crate) use replay_rows::{pad_slots, replay_rows};
pub(crate) use row_copy::copy_rows;
