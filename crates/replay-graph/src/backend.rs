//! What a capture asks of a driver. The order in which it is asked is not the driver's business.

use std::fmt;

use crate::{CaptureOptions, Error, Result};

/// What captures segments, for the length of one capture.
///
/// Opening it puts the device into the state that captures need; dropping it restores what was, on
/// every way out. An implementation does what a move brackets and never checks whether the move is
/// due: that is [`CaptureState`](crate::CaptureState)'s.
pub trait Backend: Sized + 'static {
    /// What graphs are captured on.
    type Target: Clone;
    /// A captured segment.
    type Segment: Segment;

    /// Tells the stream of a target from all others of the process.
    ///
    /// # Errors
    ///
    /// If the target has no stream that can be captured.
    fn stream(target: &Self::Target) -> Result<StreamKey>;

    /// Makes the target ready for a capture, which the caller has claimed the stream for.
    ///
    /// # Errors
    ///
    /// If something else captures the stream, or the driver fails.
    fn open(target: &Self::Target, options: &CaptureOptions) -> Result<Self>;

    /// Begins a segment.
    ///
    /// # Errors
    ///
    /// If the driver fails; nothing is being captured then.
    fn begin(&mut self) -> Result<()>;

    /// Ends the segment `index`, and makes it ready to launch.
    ///
    /// # Errors
    ///
    /// If the driver fails, or the segment did something that a launch cannot repeat. Nothing is
    /// being captured then.
    fn end(&mut self, index: u32) -> Result<Self::Segment>;

    /// Gives up whatever is being captured. Called in any state, and never fails.
    fn abort(&mut self);

    /// Forgets the errors that giving up has left behind, and returns the memory that was reserved.
    /// Called after [`abort`](Self::abort), once everything that was recorded has been dropped, and
    /// everything that the program has allocated.
    fn settle(&mut self);

    /// Names the cause of an error that surfaced in segment `index`.
    fn explain(&self, error: Error, index: u32) -> Error {
        let _ = index;
        error
    }

    /// Device memory, once all work so far is done.
    ///
    /// # Errors
    ///
    /// If the driver fails.
    fn memory(&self) -> Result<DeviceMemory>;

    /// Returns memory that no graph uses any more to the device.
    ///
    /// # Errors
    ///
    /// If the driver fails.
    fn trim(target: &Self::Target) -> Result<()>;
}

/// A captured segment.
pub trait Segment: 'static {
    /// Queues its work on the stream it was captured from, without waiting for anything.
    ///
    /// # Errors
    ///
    /// If the driver fails.
    fn launch(&self) -> Result<()>;

    /// What it consists of.
    fn nodes(&self) -> NodeCounts;
}

/// Tells a stream from all others of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamKey(pub usize);

/// Device memory at one moment, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Free on the device.
    pub free: u64,
    /// Reserved for what graphs allocate.
    pub graphs: u64,
}

/// Memory that a capture took, in bytes. Below zero where less is taken than before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryTaken {
    /// Of the device, everything counted.
    pub device: i64,
    /// By what graphs allocate.
    pub graphs: i64,
}

impl MemoryTaken {
    pub(crate) fn between(before: DeviceMemory, after: DeviceMemory) -> Self {
        Self {
            device: before.free as i64 - after.free as i64,
            graphs: after.graphs as i64 - before.graphs as i64,
        }
    }

    pub(crate) const fn plus(self, other: Self) -> Self {
        Self {
            device: self.device + other.device,
            graphs: self.graphs + other.graphs,
        }
    }

    /// The larger of the two, as what counts against a limit.
    pub fn bytes(self) -> u64 {
        self.device.max(self.graphs).max(0) as u64
    }
}

/// The nodes of a segment by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeCounts {
    /// Kernel launches.
    pub kernels: u32,
    /// Copies within the device.
    pub copies: u32,
    /// Copies from or to host memory.
    pub host_copies: u32,
    /// Memory filled with a value.
    pub fills: u32,
    /// Allocations.
    pub allocations: u32,
    /// Frees.
    pub frees: u32,
    /// Anything else.
    pub others: u32,
    /// Nodes that do work on the longest way through: less than all that do where there are branches.
    pub longest: u32,
}

impl NodeCounts {
    /// All nodes.
    pub const fn total(self) -> u32 {
        self.work() + self.allocations + self.frees
    }

    /// The nodes that do work: what an eager pass would queue, allocation left out.
    pub const fn work(self) -> u32 {
        self.kernels + self.copies + self.host_copies + self.fills + self.others
    }
}

impl fmt::Display for NodeCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} kernels, {} copies, {} fills, {} allocations, {} frees",
            self.kernels,
            self.copies + self.host_copies,
            self.fills,
            self.allocations,
            self.frees
        )?;
        match self.others {
            0 => Ok(()),
            others => write!(f, ", {others} others"),
        }
    }
}
