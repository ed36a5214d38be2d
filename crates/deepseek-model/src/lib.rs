//! The DeepSeek-V4.1 decoder in candle, with decoder-side bounded replay.

pub mod config;
pub mod engram;
mod error;
mod ops;
pub mod sampler;
pub mod tokenizer;
pub mod weights;

pub use config::Config;
pub use error::{Error, Result};
