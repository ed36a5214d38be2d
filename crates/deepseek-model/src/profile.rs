//! Where the time of a step goes, by marks between its phases.

use std::time::Duration;

use candle_core::Device;
use replay_graph::Marks;

use crate::Result;

/// Time of a step on the device, phase by phase.
///
/// Of a step that drops no row, `gather` and `scatter` are the time between two marks with nothing
/// between them. Of a model that cannot replay, all layers count as encoder layers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PhaseTimes {
    /// The embedding and the layers before the cut.
    pub encoder: Duration,
    /// The KV that the cut makes of every row.
    pub write_kv: Duration,
    /// Taking the rows that are kept out of the others.
    pub gather: Duration,
    /// The rest of the cut and the layers behind it, with the final norm. In a break whose layers run
    /// in a graph, the lists of its rows too.
    pub replay: Duration,
    /// Putting results back to where their rows were.
    pub scatter: Duration,
    /// The logits of the rows that are read.
    pub head: Duration,
}

impl PhaseTimes {
    /// Each phase by name, in order.
    pub fn phases(&self) -> [(&'static str, Duration); 6] {
        [
            ("encoder layers", self.encoder),
            ("write KV", self.write_kv),
            ("gather", self.gather),
            ("replay layers", self.replay),
            ("scatter", self.scatter),
            ("head", self.head),
        ]
    }

    /// All phases together.
    pub fn total(&self) -> Duration {
        self.phases().iter().map(|(_, time)| time).sum()
    }

    /// The times of two steps, together.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            encoder: self.encoder + other.encoder,
            write_kv: self.write_kv + other.write_kv,
            gather: self.gather + other.gather,
            replay: self.replay + other.replay,
            scatter: self.scatter + other.scatter,
            head: self.head + other.head,
        }
    }
}

/// The ends of the phases, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mark {
    Start,
    Encoded,
    KvWritten,
    Gathered,
    Replayed,
    Scattered,
    End,
}

/// Marks of one step after the other.
#[derive(Debug)]
pub(crate) struct Profile(Marks);

impl Profile {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        Ok(Self(Marks::new(Mark::End as usize + 1, device)?))
    }

    pub(crate) fn mark(&self, mark: Mark) -> replay_graph::Result<()> {
        self.0.mark(mark as usize)
    }

    /// The times of the last step, which has passed all marks. Waits for the device.
    pub(crate) fn times(&self) -> Result<PhaseTimes> {
        let between = |from, to| self.0.between(from as usize, to as usize);
        Ok(PhaseTimes {
            encoder: between(Mark::Start, Mark::Encoded)?,
            write_kv: between(Mark::Encoded, Mark::KvWritten)?,
            gather: between(Mark::KvWritten, Mark::Gathered)?,
            replay: between(Mark::Gathered, Mark::Replayed)?,
            scatter: between(Mark::Replayed, Mark::Scattered)?,
            head: between(Mark::Scattered, Mark::End)?,
        })
    }
}
