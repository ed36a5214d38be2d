//! The tensors that travel with the rows, and are gathered together when rows are dropped.

use candle_core::Tensor;
use replay_cuda::gather_rows;

use crate::{Result, ops::Choice};

/// What goes from layer to layer; every tensor has one row per row in flight.
#[derive(Debug, Clone)]
pub(crate) struct RowState {
    /// `[rows, n, h]`.
    pub(crate) streams: Tensor,
    /// `[rows, n]`: how the next sublayer reads the streams.
    pub(crate) pre: Tensor,
    /// Compressed entries chosen by the last index source.
    pub(crate) choice: Option<Choice>,
    /// Blocks kept by the candidate source.
    pub(crate) candidates: Option<Choice>,
}

/// The rows of a layer whose KV is made.
#[derive(Debug, Clone)]
pub(crate) struct Entered {
    pub(crate) state: RowState,
    /// `[rows, h]`: the attention's input.
    pub(crate) normed: Tensor,
    /// `[entering rows, D]`: window KV of all entering rows, also of those that are dropped.
    pub(crate) kv: Tensor,
}

impl RowState {
    /// The tensors, those that are there, in a fixed order.
    pub(crate) fn tensors(&self) -> Vec<Tensor> {
        let choices = self.choice.iter().chain(&self.candidates);
        let choices = choices.map(|choice| choice.entries.clone());
        let wide = [self.streams.clone(), self.pre.clone()];
        wide.into_iter().chain(choices).collect()
    }

    /// The same with other rows: `tensors` are as [`Self::tensors`] gives them.
    ///
    /// # Panics
    /// If they are fewer.
    pub(crate) fn with(&self, tensors: impl IntoIterator<Item = Tensor>) -> Self {
        let mut tensors = tensors.into_iter();
        let mut next = || tensors.next().expect("as many tensors as the state has");
        let (streams, pre) = (next(), next());
        let mut choice = |of: &Option<Choice>| {
            of.as_ref().map(|choice| Choice {
                entries: next(),
                width: choice.width,
            })
        };
        Self {
            streams,
            pre,
            choice: choice(&self.choice),
            candidates: choice(&self.candidates),
        }
    }
}

impl Entered {
    /// Only the given rows (ascending) go on; the window KV stays whole.
    pub(crate) fn gather(&self, rows: &[u32]) -> Result<Self> {
        let mut inputs = self.state.tensors();
        inputs.push(self.normed.clone());
        let inputs: Vec<&Tensor> = inputs.iter().collect();
        let mut outputs = gather_rows(&inputs, rows)?;
        let normed = outputs.pop().expect("a tensor for each that was given");
        Ok(Self {
            state: self.state.with(outputs),
            normed,
            kv: self.kv.clone(),
        })
    }
}
