//! What a graph was captured for.

use std::fmt;
use std::hash::Hash;

use replay_core::{GraphMode, RowCount};

use crate::CaptureMode;

/// What changes a launch beside the number of rows and the mode. Any value that can be compared.
pub trait Variant: Clone + Eq + Hash + fmt::Debug {}

impl<X: Clone + Eq + Hash + fmt::Debug> Variant for X {}

/// What a graph was captured for. Everything that the kernels of a launch depend on, other than the
/// contents of tensors, must be in it: two batches with one descriptor run the same launches.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Descriptor<X = ()> {
    /// Rows of the graph; a batch of fewer is padded.
    pub rows: RowCount,
    /// What happens at breaks.
    pub mode: CaptureMode,
    /// Whatever else changes a launch.
    pub variant: X,
}

impl<X> Descriptor<X> {
    /// As planning knows it.
    pub const fn graph_mode(&self) -> GraphMode {
        let padded_rows = self.rows;
        match self.mode {
            CaptureMode::Piecewise => GraphMode::Piecewise { padded_rows },
            CaptureMode::Full => GraphMode::Full { padded_rows },
        }
    }
}

impl<X: fmt::Debug> fmt::Display for Descriptor<X> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mode = match self.mode {
            CaptureMode::Piecewise => "piecewise",
            CaptureMode::Full => "full",
        };
        write!(f, "{mode} graph of {} rows", self.rows.get())?;
        if size_of::<X>() > 0 {
            write!(f, " ({:?})", self.variant)?;
        }
        Ok(())
    }
}
