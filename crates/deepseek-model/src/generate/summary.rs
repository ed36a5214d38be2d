//! What a generation cost.

use std::time::Duration;

use crate::{PhaseTimes, StepMode};

/// What all prompts cost together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GenerateSummary {
    /// Prompt tokens computed.
    pub prefill_tokens: usize,
    /// Time of steps with prefill rows.
    pub prefill_time: Duration,
    /// Tokens computed in steps of decode rows alone.
    pub decode_tokens: usize,
    /// Time of those steps.
    pub decode_time: Duration,
    /// Rows run, of prefill and of decode, summed over layers.
    pub row_layers: usize,
    /// The same if no row had been dropped.
    pub row_layers_without_replay: usize,
    /// Where the time of steps with prefill rows went on the device, if asked for.
    pub prefill_phases: Option<PhaseTimes>,
    /// The same of steps of decode rows alone.
    pub decode_phases: Option<PhaseTimes>,
    /// Steps run.
    pub steps: StepCounts,
}

/// Steps by what is in them, and by how they ran.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepCounts {
    /// Prefill rows alone.
    pub prefill: ModeCounts,
    /// Prefill rows and decode rows.
    pub mixed: ModeCounts,
    /// Decode rows alone.
    pub decode: ModeCounts,
}

/// Steps by how they ran.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ModeCounts {
    /// Operation by operation.
    pub eager: StepCount,
    /// In a graph that may break at the cut.
    pub piecewise: StepCount,
    /// In one graph, as decode steps do.
    pub full: StepCount,
}

/// A number of steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepCount {
    /// All of them.
    pub steps: usize,
    /// Those in which rows were dropped.
    pub trimmed: usize,
}

impl StepCount {
    fn plus(self, other: Self) -> Self {
        Self {
            steps: self.steps + other.steps,
            trimmed: self.trimmed + other.trimmed,
        }
    }
}

impl ModeCounts {
    /// Steps of every mode.
    pub fn total(&self) -> StepCount {
        self.eager.plus(self.piecewise).plus(self.full)
    }
}

impl StepCounts {
    /// Steps of every kind.
    pub fn total(&self) -> StepCount {
        let kinds = [self.prefill, self.mixed, self.decode];
        let counts = kinds.iter().map(ModeCounts::total);
        counts.fold(StepCount::default(), StepCount::plus)
    }

    pub(super) fn count(
        &mut self,
        (prefill_rows, rows): (usize, usize),
        mode: StepMode,
        trimmed: bool,
    ) {
        let kind = match prefill_rows {
            0 => &mut self.decode,
            _ if prefill_rows == rows => &mut self.prefill,
            _ => &mut self.mixed,
        };
        let count = match mode {
            StepMode::Eager => &mut kind.eager,
            StepMode::Piecewise { .. } => &mut kind.piecewise,
            StepMode::Full { .. } => &mut kind.full,
        };
        *count = count.plus(StepCount {
            steps: 1,
            trimmed: usize::from(trimmed),
        });
    }
}
