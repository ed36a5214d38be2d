//! The rows that a break keeps of its batch, and how they come and go.

use candle_core::{Device, Tensor};
use replay_core::{ReplayLaunch, ReplayPlan, RowSet, Rows, StepPlan};
use replay_cuda::{gather_rows, gather_rows_into, row_list, scatter_rows_into};

use crate::{Error, Result};

/// What a step's plan says to the break.
pub(crate) struct Step {
    pub(crate) launch: ReplayLaunch,
    pub(crate) n_batch_rows: usize,
    /// Rows that run in the cut.
    pub(crate) running: Kept,
    /// Rows that have an output.
    pub(crate) output: Kept,
}

impl Step {
    pub(crate) fn of(plan: &StepPlan) -> Result<Self> {
        Self::that_breaks(plan).ok_or_else(|| {
            let plan = plan.decision();
            Error::NotPlannedToBreak { plan }
        })
    }

    /// `None` if the plan has no break.
    pub(crate) fn that_breaks(plan: &StepPlan) -> Option<Self> {
        let ReplayPlan::BreakOut(batch) = plan.decision() else {
            return None;
        };
        Some(Self {
            launch: batch.launch,
            n_batch_rows: plan.n_batch_rows().as_usize(),
            running: Kept::of(&plan.layer(0).running),
            output: Kept::of(&plan.output_rows()),
        })
    }
}

/// Rows of the batch.
pub(crate) enum Kept {
    /// The first so many: all of the batch, without what its graph pads it with.
    First(usize),
    Listed(Vec<u32>),
}

impl Kept {
    fn of(set: &RowSet<'_>) -> Self {
        match set.rows() {
            Rows::Whole => Self::First(set.n_rows().as_usize()),
            Rows::Listed(rows) => Self::Listed(rows.to_vec()),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::First(n) => *n,
            Self::Listed(rows) => rows.len(),
        }
    }

    fn list(&self) -> Vec<u32> {
        match self {
            Self::First(n) => (0..*n as u32).collect(),
            Self::Listed(rows) => rows.clone(),
        }
    }

    /// These rows of every tensor.
    pub(crate) fn take(&self, tensors: &[Tensor]) -> Result<Vec<Tensor>> {
        match self {
            Self::First(n) => Ok(tensors
                .iter()
                .map(|t| t.narrow(0, 0, *n))
                .collect::<candle_core::Result<_>>()?),
            Self::Listed(rows) => Ok(gather_rows(&refs(tensors), rows)?),
        }
    }

    /// The list of these rows on the device, padded to `padded` rows.
    pub(crate) fn upload(&self, padded: usize, device: &Device) -> Result<Tensor> {
        Ok(row_list(&self.list(), padded, device)?)
    }

    /// These rows of every tensor, in the first rows of fixed ones. The rows after them are padding,
    /// and zero. `list` is the padded list, if it was [uploaded](Self::upload) before.
    pub(crate) fn take_into(
        &self,
        tensors: &[Tensor],
        fixed: &[Tensor],
        list: Option<&Tensor>,
    ) -> Result<()> {
        let Some(first) = fixed.first() else {
            return Ok(());
        };
        let list = match list {
            Some(list) => list.clone(),
            None => self.upload(first.dims()[0], first.device())?,
        };
        Ok(gather_rows_into(&refs(tensors), &list, &refs(fixed))?)
    }

    /// Puts rows of values where these rows are in the outputs, and zero elsewhere. Values beyond
    /// these rows are padding. `list` is as for [`Self::take_into`].
    pub(crate) fn put(
        &self,
        values: &[Tensor],
        outputs: &[Tensor],
        list: Option<Tensor>,
    ) -> Result<()> {
        let Some(first) = values.first() else {
            return Ok(());
        };
        let (expected, got) = (self.len(), first.dims()[0]);
        if got < expected {
            return Err(Error::TooFewOutputRows { expected, got });
        }
        let list = match list.filter(|list| list.elem_count() == got) {
            Some(list) => list,
            None => self.upload(got, first.device())?,
        };
        let values = values
            .iter()
            .map(Tensor::contiguous)
            .collect::<candle_core::Result<Vec<_>>>()?;
        Ok(scatter_rows_into(&refs(&values), &list, &refs(outputs))?)
    }
}

fn refs(tensors: &[Tensor]) -> Vec<&Tensor> {
    tensors.iter().collect()
}
