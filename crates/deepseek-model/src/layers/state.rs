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

impl Entered {
    /// Only the given rows (ascending) go on; the window KV stays whole.
    pub(crate) fn gather(&self, rows: &[u32]) -> Result<Self> {
        let state = &self.state;
        let mut inputs = vec![&state.streams, &state.pre, &self.normed];
        inputs.extend(
            state
                .choice
                .iter()
                .chain(&state.candidates)
                .map(|c| &c.entries),
        );
        let mut outputs = gather_rows(&inputs, rows)?.into_iter();
        // `gather_rows` returns one tensor per input, in order.
        let mut next = || outputs.next().expect("as many tensors as were given");
        let (streams, pre, normed) = (next(), next(), next());
        let mut choice = |c: &Option<Choice>| {
            c.as_ref().map(|c| Choice {
                entries: next(),
                width: c.width,
            })
        };
        let (entries, candidates) = (choice(&state.choice), choice(&state.candidates));
        let state = RowState {
            streams,
            pre,
            choice: entries,
            candidates,
        };
        Ok(Self {
            state,
            normed,
            kv: self.kv.clone(),
        })
    }
}
