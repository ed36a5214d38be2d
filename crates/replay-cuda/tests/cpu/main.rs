//! The implementation on the CPU, which the kernels are held to, against plain restatements.

mod errors;
mod replay_rows;
mod row_copies;
