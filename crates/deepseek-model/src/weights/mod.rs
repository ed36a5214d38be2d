//! Reads a checkpoint directory: safetensors shards, memory-mapped, dequantised in parallel.
//!
//! What a checkpoint must hold follows from the [`Config`](crate::Config) alone (the manifest). It
//! is compared with the headers of the shards before any value is read, and every difference is
//! reported in one error. Then each tensor is dequantised straight from the mapped file into the
//! buffer its [`Tensor`](candle_core::Tensor) owns; the matrices of a layer's experts into one
//! stacked buffer. The n-gram tables, most of a checkpoint's bytes, stay in the file: see
//! [`EngramTable`].

mod checkpoint;
mod error;
mod formats;
mod header;
mod load;
mod manifest;
mod mapping;
mod problem;
mod progress;
mod random;
mod resolve;
mod shard;
mod size;
mod stored;
mod table;

pub use error::WeightsError;
pub use load::{LoadOptions, Weights};
pub use problem::{Problem, Problems};
pub use progress::LoadProgress;
pub use size::held_bytes;
pub use table::EngramTable;
