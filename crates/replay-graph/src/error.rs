//! Why a graph cannot be captured or launched.

use std::error::Error as StdError;

use candle_core::DType;
use replay_core::ReplayPlan;

use crate::{DriverStatus, IllegalMove};

/// Why a graph cannot be captured or launched. `label` is what the caller named the graph: in a
/// cache, its descriptor.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // === The device ===
    /// The device has no graphs.
    #[error("graphs are captured on CUDA devices, not on {device}")]
    NoGraphs {
        /// The device.
        device: String,
    },
    /// A CUDA device in a build without CUDA.
    #[error("built without the feature `cuda`")]
    NoCuda,
    /// The device runs on a stream that others may run on too.
    #[error(
        "the device runs on the default stream, which is not captured; make the device with \
         `Device::new_cuda_with_stream`"
    )]
    SharedStream,
    /// Something outside this crate captures the stream.
    #[error("{label}: the stream is already being captured by something else")]
    ForeignCapture {
        /// The graph that was to be captured.
        label: String,
    },

    // === Misuse of a capture ===
    /// A capture was begun while another captures the same stream, on the same thread.
    #[error("{label}: a capture inside the capture of {outer}; begin it in a break, or before")]
    Nested {
        /// The graph that was to be captured.
        label: String,
        /// The graph that is being captured.
        outer: String,
    },
    /// A capture was begun while another thread captures the same stream.
    #[error("{label}: another thread is capturing {outer} on this stream")]
    OtherThread {
        /// The graph that was to be captured.
        label: String,
        /// The graph that is being captured.
        outer: String,
    },
    /// A graph was launched into the capture of another.
    #[error("{label}: launched inside the capture of {outer}; launch it in a break")]
    LaunchInCapture {
        /// The graph that was to be launched.
        label: String,
        /// The graph that is being captured.
        outer: String,
    },
    /// The capture was told to do something out of turn.
    #[error(transparent)]
    IllegalMove(#[from] IllegalMove),
    /// A break gave a tensor that is in no fixed buffer, so later segments would read where nothing
    /// is written any more.
    #[error(
        "{label}: output {output} of break {index} is at a fresh address ({address:#x}); write it \
         into rows of a `FixedBuffers` that `Scope::fixed` was told of"
    )]
    FreshAddress {
        /// The graph.
        label: String,
        /// The break.
        index: u32,
        /// Index among its outputs.
        output: usize,
        /// Where it is.
        address: u64,
    },
    /// In a launch, a break gave a tensor that is elsewhere than at capture.
    #[error(
        "{label}: output {output} of break {index} was at {expected:#x} when captured and is at \
         {got:#x} now"
    )]
    Moved {
        /// The graph.
        label: String,
        /// The break.
        index: u32,
        /// Index among its outputs.
        output: usize,
        /// Where it was.
        expected: u64,
        /// Where it is.
        got: u64,
    },
    /// A break gave more or fewer tensors than at capture.
    #[error("{label}: break {index} had {expected} outputs when captured and has {got} now")]
    OutputCount {
        /// The graph.
        label: String,
        /// The break.
        index: u32,
        /// How many there were.
        expected: usize,
        /// How many there are.
        got: usize,
    },

    /// A segment ended inside a branch.
    #[error("a break inside a branch of `join`; put it before or after")]
    BreakInBranch,

    // === What a segment may not do ===
    /// Host memory was copied to or from the device inside a segment.
    #[error(
        "{label}: segment {segment} copies between host and device memory; do that before the \
         launch or in a break (small constants are fine once the warm-up has uploaded them)"
    )]
    HostCopy {
        /// The graph.
        label: String,
        /// The segment.
        segment: u32,
        /// What failed, if the copy did; `None` if it was found among the captured nodes.
        source: Option<Box<Error>>,
    },
    /// A tensor that was allocated before the segment was freed in it.
    #[error(
        "{label}: segment {segment} drops a tensor from outside ({status}); keep its owner alive \
         until the capture is over"
    )]
    DroppedInside {
        /// The graph.
        label: String,
        /// The segment.
        segment: u32,
        /// What the driver said.
        status: DriverStatus,
    },
    /// A call was made that cannot be captured, as one that waits for the device.
    #[error("{label}: segment {segment} makes a call that cannot be captured ({status})")]
    Forbidden {
        /// The graph.
        label: String,
        /// The segment.
        segment: u32,
        /// What the driver said.
        status: DriverStatus,
        /// The error that surfaced.
        source: Option<Box<Error>>,
    },
    /// The device is out of memory.
    #[error("{label}: out of device memory with {free_bytes} bytes free ({status}); lower {knob}")]
    OutOfMemory {
        /// The graph.
        label: String,
        /// What to change.
        knob: &'static str,
        /// Bytes of device memory that were free afterwards.
        free_bytes: u64,
        /// What the driver said.
        status: DriverStatus,
    },

    // === Fixed buffers ===
    /// More rows than the buffers hold.
    #[error("{rows} rows are asked of buffers that hold {max_rows}")]
    TooManyRows {
        /// Rows asked for.
        rows: usize,
        /// Rows there are.
        max_rows: usize,
    },
    /// A buffer that was not declared.
    #[error("no fixed buffer is called {name:?}")]
    NoSuchBuffer {
        /// The name.
        name: String,
    },
    /// Two buffers of one name.
    #[error("two fixed buffers are called {name:?}")]
    DuplicateBuffer {
        /// The name.
        name: String,
    },
    /// A buffer of more bytes than there are addresses, or than the host has memory for.
    #[error("buffer {name:?}: no memory for {max_rows} rows of {row_shape:?} of {dtype:?}")]
    BufferTooLarge {
        /// The buffer.
        name: String,
        /// Rows that it was to hold.
        max_rows: usize,
        /// Shape of each.
        row_shape: Vec<usize>,
        /// Its dtype.
        dtype: DType,
    },
    /// As many tensors as buffers are needed.
    #[error("expected one tensor for each of {expected} buffers, got {got}")]
    BufferCount {
        /// Buffers.
        expected: usize,
        /// Tensors.
        got: usize,
    },
    /// A tensor that does not fit its buffer.
    #[error(
        "buffer {name:?} takes {} of {dtype:?}, got {got:?} of {got_dtype:?}",
        per_row(.expected)
    )]
    BufferShape {
        /// The buffer.
        name: String,
        /// Shape of its rows.
        expected: Vec<usize>,
        /// Its dtype.
        dtype: DType,
        /// Shape of the tensor, its rows among it.
        got: Vec<usize>,
        /// Dtype of the tensor.
        got_dtype: DType,
    },

    // === The cache ===
    /// The cache holds as many graphs as it may.
    #[error("{label}: the cache holds {graphs} graphs already; raise `CacheConfig::max_graphs`")]
    TooManyGraphs {
        /// The graph that was to be captured.
        label: String,
        /// Graphs there are.
        graphs: usize,
    },
    /// The cached graphs take as much memory as they may.
    #[error(
        "{label}: cached graphs take {bytes} bytes of at most {max_bytes}; raise \
         `CacheConfig::max_bytes`"
    )]
    TooMuchMemory {
        /// The graph that was to be captured.
        label: String,
        /// Bytes they take.
        bytes: u64,
        /// Bytes they may take.
        max_bytes: u64,
    },

    // === The replay layers ===
    /// A plan without a layer: nothing has been planned into it, or planning failed.
    #[error(
        "expected the plan of a step, got an empty one: nothing was planned, or planning failed"
    )]
    EmptyPlan,
    /// The layers gave fewer rows than have an output in the step's plan.
    #[error("expected the output of {expected} rows of the replay layers, got {got}")]
    TooFewOutputRows {
        /// Rows that have an output.
        expected: usize,
        /// Rows that the layers gave.
        got: usize,
    },
    /// The plan of a step does not break where its graph does.
    #[error("the graph breaks at the cut, but the step was planned as {plan:?}")]
    NotPlannedToBreak {
        /// What was planned.
        plan: ReplayPlan,
    },

    // === Errors of others ===
    /// A break failed.
    #[error("{label}: break {index} failed")]
    Break {
        /// The graph.
        label: String,
        /// The break.
        index: u32,
        /// What failed.
        source: Box<Error>,
    },
    /// A point in time that [`Marks`](crate::Marks) does not have.
    #[error("point {point} of {count} is none, or was not marked")]
    NoMark {
        /// The point.
        point: usize,
        /// How many points there are.
        count: usize,
    },
    /// More points than memory holds.
    #[error("no memory for {count} points")]
    TooManyMarks {
        /// How many points were asked for.
        count: usize,
    },
    /// A driver call failed.
    #[error("{label}: {op} failed ({status})")]
    Driver {
        /// The graph.
        label: String,
        /// The call.
        op: &'static str,
        /// What the driver said.
        status: DriverStatus,
    },
    /// A tensor operation failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// Rows could not be moved.
    #[error(transparent)]
    Rows(#[from] replay_cuda::Error),
    /// The captured program failed.
    #[error(transparent)]
    Program(Box<dyn StdError + Send + Sync>),
}

impl Error {
    /// Wraps an error of the captured program's own.
    pub fn program(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::Program(error.into())
    }
}

/// The shape of a tensor of rows of this shape.
fn per_row(row_shape: &[usize]) -> String {
    let lens = row_shape.iter().map(ToString::to_string);
    let extents: Vec<_> = ["rows".to_owned()].into_iter().chain(lens).collect();
    format!("[{}]", extents.join(", "))
}

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;
