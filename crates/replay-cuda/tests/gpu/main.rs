//! The kernels on a GPU, held to the implementation on the CPU bit for bit.
//!
//! These tests fail without a GPU; `cargo xtask test-gpu` runs them. Each poisons what it lets a
//! kernel write, so that a byte that was not written shows. Tests named after a hazard say in their
//! doc what goes wrong elsewhere; the hazards that need a whole decoder are tested with one.
//!
//! With `REPLAY_GPU_SMALL` set, as under a sanitizer, the largest cases are left out.

mod arguments;
mod capture;
mod gpu;
mod hazards;
mod replay_rows;
mod row_copies;
mod tensors;
