//! Why rows cannot be moved.

use std::fmt;

use candle_core::DType;
use replay_core::PlanError;

/// A tensor among the arguments of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operand {
    /// A tensor that is read, by its index.
    Source(usize),
    /// A tensor that is written, by its index.
    Output(usize),
    /// The list of row numbers.
    Rows,
    /// A named field.
    Field(&'static str),
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Source(index) => write!(f, "tensor {index}"),
            Self::Output(index) => write!(f, "output {index}"),
            Self::Rows => f.write_str("the row list"),
            Self::Field(name) => f.write_str(name),
        }
    }
}

/// Why rows cannot be moved. Nothing has been written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor without a row axis.
    #[error("{op}: tensor {tensor} is a scalar, expected a row axis")]
    Scalar {
        /// The operation.
        op: &'static str,
        /// Index of the tensor among the arguments.
        tensor: usize,
    },
    /// A row that a tensor does not have.
    #[error("{op}: row {row} is asked of tensor {tensor}, which has {rows}")]
    RowOutOfRange {
        /// The operation.
        op: &'static str,
        /// The row.
        row: u32,
        /// Index of the tensor among the arguments.
        tensor: usize,
        /// Rows of that tensor.
        rows: usize,
    },
    /// A row to scatter to that the result does not have.
    #[error("{op}: row {row} is listed, but the result has {rows} rows")]
    RowPastResult {
        /// The operation.
        op: &'static str,
        /// The row.
        row: u32,
        /// Rows of the result.
        rows: usize,
    },
    /// Rows to scatter to that are not strictly ascending, so that a row might be written twice.
    #[error("{op}: expected ascending rows, got {next} after {previous}")]
    NotAscending {
        /// The operation.
        op: &'static str,
        /// A row.
        previous: u32,
        /// The one after it.
        next: u32,
    },
    /// A row that would be written twice.
    #[error("{op}: row {row} is listed twice")]
    DuplicateRow {
        /// The operation.
        op: &'static str,
        /// The row.
        row: u32,
    },
    /// As many rows as values are needed.
    #[error("{op}: {values} rows of values for {rows} row numbers")]
    CountMismatch {
        /// The operation.
        op: &'static str,
        /// Rows of the tensor.
        values: usize,
        /// Row numbers.
        rows: usize,
    },
    /// As many outputs as sources are needed.
    #[error("{op}: {outputs} outputs for {sources} tensors")]
    OutputCount {
        /// The operation.
        op: &'static str,
        /// Tensors to read.
        sources: usize,
        /// Tensors to write.
        outputs: usize,
    },
    /// A tensor of another shape than the operation needs.
    #[error("{op}: {operand} is of shape {got:?}, expected {expected:?}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// The tensor.
        operand: Operand,
        /// What is needed.
        expected: Vec<usize>,
        /// What there is.
        got: Vec<usize>,
    },
    /// A tensor of another dtype than the operation needs.
    #[error("{op}: {operand} is {got:?}, expected {expected}")]
    DType {
        /// The operation.
        op: &'static str,
        /// The tensor.
        operand: Operand,
        /// What is needed.
        expected: String,
        /// What there is.
        got: DType,
    },
    /// A tensor on another device than the first one.
    #[error("{op}: {operand} is on another device than {first}")]
    Device {
        /// The operation.
        op: &'static str,
        /// The tensor.
        operand: Operand,
        /// The one it is compared with.
        first: Operand,
    },
    /// A device that is neither the CPU nor a CUDA device.
    #[error("{op}: rows are moved on the CPU and on CUDA devices, not on {device}")]
    UnsupportedDevice {
        /// The operation.
        op: &'static str,
        /// The device.
        device: String,
    },
    /// A tensor whose elements do not lie one after the other in row order.
    #[error("{op}: {operand} is not contiguous")]
    NotContiguous {
        /// The operation.
        op: &'static str,
        /// The tensor.
        operand: Operand,
    },
    /// A tensor that is written shares memory with another argument.
    #[error("{op}: {written} shares memory with {other}")]
    Overlap {
        /// The operation.
        op: &'static str,
        /// The tensor that is written.
        written: Operand,
        /// The other argument.
        other: Operand,
    },
    /// More rows, or longer ones, than one launch can address.
    #[error("{op}: {operand} has too many or too long rows for one launch")]
    TooLarge {
        /// The operation.
        op: &'static str,
        /// The tensor.
        operand: Operand,
    },
    /// More requests than the operation takes, or than the outputs hold.
    #[error("{op}: {n_requests} requests, at most {max}")]
    TooManyRequests {
        /// The operation.
        op: &'static str,
        /// Requests of the step.
        n_requests: usize,
        /// The most there can be.
        max: usize,
    },
    /// More rows run than the outputs hold.
    #[error("{op}: {n_rows} rows run, but the outputs hold {max_rows}")]
    TooManyRows {
        /// The operation.
        op: &'static str,
        /// Rows that run.
        n_rows: usize,
        /// Rows of the outputs.
        max_rows: usize,
    },
    /// A list of rows that is longer than what it is to be padded to.
    #[error(
        "{op}: {n_rows} rows are listed, expected at most the {padded} that the list is padded to"
    )]
    ListTooLong {
        /// The operation.
        op: &'static str,
        /// Rows of the list.
        n_rows: usize,
        /// Entries of the padded list.
        padded: usize,
    },
    /// Buffers for no row or no request.
    #[error(
        "{op}: buffers for {max_rows} rows of {max_requests} requests, expected room for one of each"
    )]
    NoRoom {
        /// The operation.
        op: &'static str,
        /// Rows that the buffers were to hold.
        max_rows: usize,
        /// Requests that they were to hold.
        max_requests: usize,
    },
    /// A result or a buffer that no memory holds.
    #[error("{op}: no memory for {rows} rows of {row_bytes} bytes")]
    NoMemory {
        /// The operation.
        op: &'static str,
        /// Rows of it.
        rows: usize,
        /// Bytes of each.
        row_bytes: usize,
    },
    /// Slots that do not reach the last row of the batch.
    #[error("{op}: {operand}: expected one for each of {n_rows} rows of the batch, got {slots}")]
    TooFewSlots {
        /// The operation.
        op: &'static str,
        /// The slots.
        operand: Operand,
        /// How many there are.
        slots: usize,
        /// Rows of the batch, up to the last request's last.
        n_rows: usize,
    },
    /// A position that the dtype of the positions does not hold.
    #[error("{op}: position {position} of row {row} does not fit {dtype:?}")]
    PositionTooLarge {
        /// The operation.
        op: &'static str,
        /// The row, counted in the batch.
        row: u32,
        /// Its position.
        position: u32,
        /// The dtype.
        dtype: DType,
    },
    /// A replay layer that the model lacks.
    #[error("{op}: the model has no replay layer {layer}, only {n_layers}")]
    NoSuchLayer {
        /// The operation.
        op: &'static str,
        /// The layer, counted from the cut.
        layer: u32,
        /// Replay layers of the model.
        n_layers: u32,
    },
    /// Offsets of requests that descend.
    #[error("{op}: the offsets of request {request} descend")]
    OffsetsDescend {
        /// The operation.
        op: &'static str,
        /// The request.
        request: usize,
    },
    /// A step that contradicts itself, or its graph.
    #[error("{op}: {error}")]
    Plan {
        /// The operation.
        op: &'static str,
        /// What contradicts what.
        error: PlanError,
    },
    /// Under stream capture, tensors must not be tracked by events.
    #[error(
        "{op}: the stream is being captured while event tracking is on; call \
         `CudaDevice::disable_event_tracking` before the first tensor is made"
    )]
    EventTracking {
        /// The operation.
        op: &'static str,
    },
    /// Under stream capture, nothing can be uploaded: the graph would keep the host address.
    #[error(
        "{op}: the stream is being captured; give the rows as a tensor and the results as buffers"
    )]
    UploadUnderCapture {
        /// The operation.
        op: &'static str,
    },
    /// A CUDA tensor in a build without CUDA.
    #[error("{op}: built without the feature `cuda`")]
    NoCuda {
        /// The operation.
        op: &'static str,
    },
    /// A tensor operation failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;
