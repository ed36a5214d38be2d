//! Data-parallel ranks agree on one way to run a step.
//!
//! Ranks that share experts meet in collectives inside the layers, so each must run the replay layers
//! in the same form and on the same number of rows. If one replays, all do, in the size that fits
//! the largest; a rank without rows runs padding alone.

use crate::{CaptureSizes, GraphMode, ReplayBatch, ReplayLaunch, ReplayPlan, RowCount, StepPlan};

/// What one rank's step needs, as the ranks tell each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct RankNeed {
    /// Whether the rank's own plan has a replay batch.
    pub replays: bool,
    /// Rows that the rank's replay batch has, or would have.
    pub n_rows: RowCount,
    /// Whether every replay layer runs on the same rows, so that one graph can hold them.
    pub uniform: bool,
}

impl RankNeed {
    /// The need of a rank with this plan.
    pub fn of(plan: &StepPlan) -> Self {
        Self {
            replays: plan.decision().replay_batch().is_some(),
            n_rows: plan.n_rows(),
            uniform: plan.is_uniform(),
        }
    }
}

/// What every rank does in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Agreement {
    /// No rank replays.
    WholeBatch,
    /// Every rank runs a replay batch, and launches it in this way.
    Replay(ReplayLaunch),
}

/// What every rank does, from every rank's need; the ranks may come in any order. `sizes` are the
/// same on all of them.
///
/// ```
/// use replay_core::{Agreement, CaptureSizes, RankNeed, ReplayLaunch, RowCount, agree};
///
/// let sizes = CaptureSizes::new(&[8, 16, 32], 32)?;
/// let ranks = [8, 0, 21, 1].map(|n| RankNeed {
///     replays: n > 8, // one rank drops rows
///     n_rows: RowCount::new(n),
///     uniform: true,
/// });
/// let padded_rows = RowCount::new(32);
/// assert_eq!(agree(&ranks, Some(&sizes)), Agreement::Replay(ReplayLaunch::Graph { padded_rows }));
/// # Ok::<(), replay_core::CaptureSizesError>(())
/// ```
pub fn agree(ranks: &[RankNeed], sizes: Option<&CaptureSizes>) -> Agreement {
    if !ranks.iter().any(|rank| rank.replays) {
        return Agreement::WholeBatch;
    }
    let most = ranks
        .iter()
        .map(|rank| rank.n_rows)
        .max()
        .unwrap_or_default();
    let uniform = ranks.iter().all(|rank| rank.uniform);
    Agreement::Replay(ReplayLaunch::choose(most, uniform, sizes))
}

/// A rank's plan is not one that the agreement was made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AgreementError {
    /// The agreement says that no rank replays, but this one must.
    #[error(
        "the ranks agreed on the whole batch, but this rank's plan drops rows or breaks its graph"
    )]
    NotCounted,
    /// The agreement says that every rank replays, but this one's graph holds the replay layers.
    /// Ranks must agree on the step's graph first.
    #[error(
        "the ranks agreed to replay, but this rank's graph of {padded_rows} rows does not break"
    )]
    GraphDoesNotBreak {
        /// Rows of the graph.
        padded_rows: u32,
    },
    /// The agreed graph is smaller than this rank's replay batch, or there is none.
    #[error("the ranks agreed on {launch:?}, but this rank's replay batch has {n_rows} rows")]
    DoesNotFit {
        /// The agreed launch.
        launch: ReplayLaunch,
        /// Rows of this rank's replay batch.
        n_rows: u32,
    },
}

impl StepPlan {
    /// The decision of this rank under what all ranks agreed on. The rows of the plan do not change:
    /// a rank that drops none joins with its whole batch as the replay batch.
    ///
    /// # Errors
    ///
    /// [`AgreementError`] when the agreement cannot have come from this plan's need.
    pub fn decision_under(&self, agreement: Agreement) -> Result<ReplayPlan, AgreementError> {
        let launch = match (agreement, self.decision()) {
            (Agreement::WholeBatch, ReplayPlan::WholeBatch) => return Ok(ReplayPlan::WholeBatch),
            (Agreement::WholeBatch, _) => return Err(AgreementError::NotCounted),
            (Agreement::Replay(launch), _) => launch,
        };
        let n_rows = self.n_rows();
        let holds = match launch {
            ReplayLaunch::Skip => n_rows.get() == 0,
            ReplayLaunch::Eager => true,
            ReplayLaunch::Graph { padded_rows } => n_rows <= padded_rows && self.is_uniform(),
        };
        if !holds {
            return Err(AgreementError::DoesNotFit {
                launch,
                n_rows: n_rows.get(),
            });
        }
        let batch = ReplayBatch {
            n_rows,
            trimmed: self.is_trimmed(),
            launch,
        };
        match (self.decision(), self.graph_mode()) {
            (ReplayPlan::BreakOut(_), _) => Ok(ReplayPlan::BreakOut(batch)),
            (_, GraphMode::None) => Ok(ReplayPlan::EagerTrim(batch)),
            (_, GraphMode::Full { padded_rows } | GraphMode::Piecewise { padded_rows }) => {
                Err(AgreementError::GraphDoesNotBreak {
                    padded_rows: padded_rows.get(),
                })
            }
        }
    }
}
