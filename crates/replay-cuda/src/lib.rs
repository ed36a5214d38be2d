//! Moves rows of packed batch tensors: down to the rows that replay layers run on, and back.
//!
//! Per-row tensors of a batch have the shape `[rows, ...]`. A gather takes all of them down to the
//! same list of rows, so that none can fall out of step with the others; a scatter puts results back
//! at their rows of the batch and zero everywhere else.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use replay_cuda::{gather_rows, scatter_rows};
//!
//! let hidden = Tensor::arange(0f32, 8.0, &Device::Cpu)?.reshape((4, 2))?;
//! let positions = Tensor::new(&[7u32, 8, 9, 10], &Device::Cpu)?;
//! let kept = gather_rows(&[&hidden, &positions], &[1, 3])?;
//! assert_eq!(kept[0].to_vec2::<f32>()?, [[2.0, 3.0], [6.0, 7.0]]);
//! assert_eq!(kept[1].to_vec1::<u32>()?, [8, 10]);
//!
//! let back = scatter_rows(&kept[0], &[1, 3], 4)?;
//! assert_eq!(back.to_vec2::<f32>()?, [[0.0, 0.0], [2.0, 3.0], [0.0, 0.0], [6.0, 7.0]]);
//! # Ok::<(), replay_cuda::Error>(())
//! ```
//!
//! # Two ways to call
//!
//! | | rows | results | under stream capture |
//! |---|---|---|---|
//! | [`gather_rows`], [`scatter_rows`] | a slice, checked | allocated | no: the list is uploaded |
//! | [`gather_rows_into`], [`scatter_rows_into`], [`write_rows_into`] | a tensor | fixed buffers | yes |
//! | [`replay_rows_into`], [`pad_rebuilt_slots_into`] | worked out on the device | fixed buffers | yes |
//!
//! A list on the device cannot be looked at without waiting for it, so the second kind does not
//! refuse rows that a tensor lacks: they read as zero and are written nowhere, and [`PAD_ROW`] is
//! such a row that no tensor has. Before a stream is captured, call [`load_kernels`].
//!
//! # Devices
//!
//! All functions take candle tensors of any dtype, on the CPU and, with the feature `cuda`, on a CUDA
//! device. Each has an implementation on the CPU, which is what the kernels are tested against bit
//! for bit. The kernels run on the stream of the tensors' device, as candle's own do.
#![deny(unsafe_code)]

mod copies;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "cuda_absent.rs"]
mod cuda;
mod error;
mod operands;
mod replay_rows;
mod rows;
#[cfg(any(feature = "cuda", test))]
mod tiling;

#[cfg(feature = "cuda")]
pub use cuda::kernel;
pub use error::{Error, Operand, Result};
pub use operands::Arguments;
pub use replay_rows::{
    Among, LayerQuery, MAX_REQUESTS, ReplayRows, StepBatch, pad_rebuilt_slots_into,
    replay_rows_into,
};
pub use rows::{
    PAD_ROW, gather_rows, gather_rows_into, load_kernels, row_list, scatter_rows,
    scatter_rows_into, write_rows_into,
};

/// The README's example, run as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
