//! The implementation on the CPU, which the kernels are held to.

mod replay_rows;
mod row_copy;
mod write;

pub(crate) use replay_rows::{pad_slots, replay_rows};
pub(crate) use row_copy::{copy_rows, gather, scatter};
