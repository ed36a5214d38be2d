//! CUDA graphs with breaks for candle programs, and the replay layers of a decoder on top of them.
//!
//! A CUDA graph repeats the launches of a program at the price of one. candle programs resist it in
//! three places: some step decides on the host how many rows to run, tensors are allocated anew in
//! every pass, and every batch size is another graph. [`BreakableGraph`] captures a program as graph
//! *segments* with eager *breaks* between them: a break runs as ordinary code at each launch.
//! [`FixedBuffers`] keep the addresses that segments read while breaks come and go, and a
//! [`GraphCache`] holds a graph per padded batch size.
//!
//! ```no_run
//! # use candle_core::{DType, Device, Tensor};
//! # use replay_graph::BreakableGraph;
//! # let device = Device::new_cuda_with_stream(0)?;
//! # let (input, next) = (Tensor::zeros(4, DType::F32, &device)?, Tensor::ones(4, DType::F32, &device)?);
//! let mut graph = BreakableGraph::capture(&device, |_| Ok(input.affine(2.0, 1.0)?))?;
//! input.slice_set(&next, 0, 0)?;
//! assert_eq!(graph.launch()?.to_vec1::<f32>()?, [3.0; 4]);
//! # Ok::<(), replay_graph::Error>(())
//! ```
//!
//! # How a capture goes
//!
//! 1. The program runs once eagerly. Kernels are loaded, and candle's uploads of shapes and strides
//!    are kept for the capture to find.
//! 2. It runs again while its stream is captured. At a break the segment ends and is launched at
//!    once: memory that a segment allocates is there only after a launch, and the break reads it. A
//!    capture is a real run, and its results are.
//! 3. At each launch the segments and breaks run in order. Nothing waits for the device.
//!
//! Whatever goes wrong, an error or a panic, the capture is given up and the device goes on as before.
//! [`CaptureState`] holds the legal moves; a [`Backend`] does what each move brackets.
//!
//! # What a program must do
//!
//! What is checked is an [`Error`] that names what was done.
//!
//! | a program must | checked |
//! |---|---|
//! | run on a device made with [`Device::new_cuda_with_stream`](candle_core::Device::new_cuda_with_stream) | before the capture: [`Error::SharedStream`] |
//! | copy between host and device outside segments | at capture: [`Error::HostCopy`] |
//! | keep alive, while it is captured, what it did not allocate itself | at capture: [`Error::DroppedInside`] |
//! | put what later segments read of a break into fixed buffers, and give it as the break's output | of outputs, at capture and at each launch ([`CaptureOptions::check_addresses`]): [`Error::FreshAddress`], [`Error::Moved`], [`Error::OutputCount`] |
//! | take what changes from launch to launch from tensors at fixed addresses, written in place ([`Tensor::slice_set`](candle_core::Tensor::slice_set)), or inside a break | no |
//! | keep alive, as long as the graph, what its segments read beside what the graph owns | no |
//!
//! # Branches
//!
//! [`join`] lets two pieces of a program that do not depend on each other become branches of the graph,
//! on the one stream that is captured.
//!
//! # The replay layers
//!
//! [`ReplayBreak`] is the break at the cut: it gathers the rows that a
//! [`StepPlan`](replay_core::StepPlan) keeps, runs the layers on them, eagerly or in graphs of their
//! own, and scatters the results. [`ReplayDecoder`] and [`run_replay_layers`] are the eager loop
//! over those layers.
//!
//! # Not here
//!
//! Capture on several streams or devices at once, and graphs that are changed after capture.
#![deny(unsafe_code)]

mod address;
mod backend;
mod buffers;
mod cache;
#[cfg(any(feature = "cuda", test))]
mod cause;
mod claim;
#[cfg(feature = "cuda")]
#[path = "cuda/mod.rs"]
mod device;
#[cfg(not(feature = "cuda"))]
#[path = "cuda_absent.rs"]
mod device;
mod eager;
mod error;
mod graph;
mod join;
mod kept;
mod marks;
mod options;
mod recorder;
mod replay;
mod scope;
mod state;
mod status;

pub use address::BreakOutputs;
pub use backend::{Backend, DeviceMemory, MemoryTaken, NodeCounts, Segment, StreamKey};
pub use buffers::{BufferSpec, FixedBuffers};
pub use cache::{CacheConfig, CaptureReport, Descriptor, GraphCache, Progress, Variant};
pub use device::{DeviceCapture, DeviceSegment};
pub use eager::{ReplayDecoder, resume_replay_layers, run_replay_layers};
pub use error::{Error, Result};
pub use graph::BreakableGraph;
pub use join::join;
pub use marks::Marks;
pub use options::{CaptureMode, CaptureOptions};
pub use replay::{Ahead, BreakPhase, ReplayBreak, ReplayLayers};
pub use scope::Scope;
pub use state::{CaptureMove, CaptureState, IllegalMove};
pub use status::DriverStatus;

/// The README's examples, run as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
