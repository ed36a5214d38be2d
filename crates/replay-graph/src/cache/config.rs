//! Bounds of a cache, and what it reports.

use std::fmt;

use super::Descriptor;
use crate::{Error, MemoryTaken, Result};

/// Bounds of a cache.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheConfig {
    /// How many graphs it holds at most.
    pub max_graphs: usize,
    /// Bytes that its graphs take at most: once they take more, no other is captured.
    pub max_bytes: Option<u64>,
    /// What an error tells to lower when memory runs out.
    pub knob: &'static str,
    /// As [`CaptureOptions::check_addresses`](crate::CaptureOptions::check_addresses), and on by
    /// default too.
    pub check_addresses: bool,
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self {
            max_graphs: 128,
            max_bytes: None,
            knob: "the largest of the capture sizes",
            check_addresses: true,
        }
    }
}

impl CacheConfig {
    /// Sets how many graphs the cache holds at most.
    #[must_use]
    pub const fn max_graphs(mut self, max_graphs: usize) -> Self {
        self.max_graphs = max_graphs;
        self
    }

    /// Sets how many bytes its graphs take at most.
    #[must_use]
    pub const fn max_bytes(mut self, max_bytes: u64) -> Self {
        self.max_bytes = Some(max_bytes);
        self
    }

    /// Whether one more graph may be captured.
    pub(super) fn admit(&self, label: &str, graphs: usize, taken: MemoryTaken) -> Result<()> {
        let label = || label.to_owned();
        if graphs >= self.max_graphs {
            return Err(Error::TooManyGraphs {
                label: label(),
                graphs,
            });
        }
        match self.max_bytes {
            Some(max_bytes) if taken.bytes() >= max_bytes => Err(Error::TooMuchMemory {
                label: label(),
                bytes: taken.bytes(),
                max_bytes,
            }),
            _ => Ok(()),
        }
    }
}

/// A graph that is there, while all are captured.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a, X = ()> {
    /// What it was captured for.
    pub descriptor: &'a Descriptor<X>,
    /// How many are there, this one among them.
    pub done: usize,
    /// How many there will be.
    pub total: usize,
    /// Memory that its capture took.
    pub memory: MemoryTaken,
}

impl<'a, X> Progress<'a, X> {
    pub(super) const fn new(
        descriptor: &'a Descriptor<X>,
        report: &CaptureReport,
        total: usize,
        memory: MemoryTaken,
    ) -> Self {
        Self {
            descriptor,
            done: report.captured + report.already,
            total,
            memory,
        }
    }
}

impl<X: fmt::Debug> fmt::Display for Progress<'_, X> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            descriptor,
            done,
            total,
            memory,
        } = self;
        write!(f, "{done}/{total}: {descriptor}, {} bytes", memory.bytes())
    }
}

/// What [`GraphCache::capture_all`](crate::GraphCache::capture_all) did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CaptureReport {
    /// Graphs it captured.
    pub captured: usize,
    /// Graphs that were there already.
    pub already: usize,
    /// Memory that its captures took.
    pub memory: MemoryTaken,
}

impl CaptureReport {
    /// This and another, together.
    #[must_use]
    pub const fn plus(mut self, other: Self) -> Self {
        self.captured += other.captured;
        self.already += other.already;
        self.memory = self.memory.plus(other.memory);
        self
    }

    pub(super) fn add(&mut self, memory: MemoryTaken) {
        self.captured += 1;
        self.memory = self.memory.plus(memory);
    }
}
