//! What the replay layers of a step do, in one value that is matched exhaustively.

use crate::{CaptureSizes, RowCount};

/// What the replay layers of a step do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ReplayPlan {
    /// They run on the whole batch, in the step's graph if it has one. Either no row can be dropped,
    /// or the graph is one that does not break.
    #[default]
    WholeBatch,
    /// No graph surrounds them: rows are gathered, run and scattered back.
    EagerTrim(ReplayBatch),
    /// The step's graph breaks at the cut, and what is between its two parts does as in
    /// [`EagerTrim`](Self::EagerTrim). Decided by the graph's size alone, so the batch may be whole.
    BreakOut(ReplayBatch),
}

impl ReplayPlan {
    /// The replay batch, if there is one.
    pub const fn replay_batch(&self) -> Option<&ReplayBatch> {
        match self {
            Self::WholeBatch => None,
            Self::EagerTrim(batch) | Self::BreakOut(batch) => Some(batch),
        }
    }
}

/// The batch that the replay layers run on in place of the step's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReplayBatch {
    /// Rows that run in the first replay layer; no later one runs more.
    pub n_rows: RowCount,
    /// Whether some row of the step is dropped in some layer.
    pub trimmed: bool,
    /// How the replay layers are run.
    pub launch: ReplayLaunch,
}

/// How the replay layers are run on a replay batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReplayLaunch {
    /// Not at all: no row is kept. The cut still writes the KV of every row.
    Skip,
    /// Layer by layer, on exactly the rows that are kept: no captured size holds them, or the layers
    /// run on different rows.
    Eager,
    /// In the graph captured for this many rows, those past the batch's being padding that writes to
    /// no slot.
    Graph {
        /// Rows of the graph.
        padded_rows: RowCount,
    },
}

impl ReplayLaunch {
    /// The launch of a replay batch of `n_rows` rows, with graphs of `sizes` captured; `uniform` when
    /// every replay layer runs on the same rows.
    pub(crate) fn choose(n_rows: RowCount, uniform: bool, sizes: Option<&CaptureSizes>) -> Self {
        if n_rows.get() == 0 {
            return Self::Skip;
        }
        match sizes
            .filter(|_| uniform)
            .and_then(|sizes| sizes.fit(n_rows))
        {
            Some(padded_rows) => Self::Graph { padded_rows },
            None => Self::Eager,
        }
    }
}
