//! The replay layers of an eager step, or of an eager break: layer by layer, on exactly the rows that
//! are kept.

use std::rc::Rc;

use candle_core::Tensor;
use replay_core::{LayerRows, RowIdx, RowSet, StepPlan};
use replay_cuda::scatter_rows;
use replay_graph::ReplayDecoder;

use super::Replay;
use crate::{
    Error, Result,
    layers::{DecoderLayer, Entered, RowState, StepContext},
    ops::KvStart,
    profile::Mark,
    rows::Rows,
};

/// Runs the replay layers and `finish` on the rows they leave, and puts the result `[rows, h]` back at
/// its rows of the batch; zero elsewhere.
pub(crate) fn run_replay(
    replay: &Replay,
    layers: &[DecoderLayer],
    ctx: &StepContext<'_>,
    state: RowState,
    all: Rc<Rows>,
    finish: impl FnOnce(&RowState) -> Result<Tensor>,
) -> Result<Tensor> {
    let n_rows = all.len();
    let shape = (n_rows, ctx.config.hidden_size);
    let (dtype, device) = (state.streams.dtype(), state.streams.device().clone());
    let mut decoder = Walk {
        layers,
        ctx,
        entering: all,
        stores_cut: true,
    };
    let left = replay_graph::run_replay_layers(&mut decoder, &replay.plan, state)?;
    let hidden = match left {
        None => {
            ctx.mark(Mark::Replayed)?;
            Tensor::zeros(shape, dtype, &device)?
        }
        Some(state) => {
            let hidden = finish(&state)?;
            put_back(&replay.plan, hidden, n_rows)?
        }
    };
    ctx.mark(Mark::Scattered)?;
    Ok(hidden)
}

/// Output rows at their places among `n_rows` rows of the batch.
fn put_back(plan: &StepPlan, hidden: Tensor, n_rows: usize) -> Result<Tensor> {
    let output = plan.output_rows();
    if output.is_whole() {
        return Ok(hidden);
    }
    let rows: Vec<u32> = output.indices().map(RowIdx::get).collect();
    Ok(scatter_rows(&hidden, &rows, n_rows)?)
}

/// Goes on from the cut, whose KV is made, and stored by someone else; see
/// [`replay_graph::resume_replay_layers`]. `entered` holds the rows that run in the cut.
pub(crate) fn resume(
    plan: &StepPlan,
    layers: &[DecoderLayer],
    ctx: &StepContext<'_>,
    entered: Entered,
    all: Rc<Rows>,
) -> Result<Option<RowState>> {
    let mut decoder = Walk {
        layers,
        ctx,
        entering: all,
        stores_cut: false,
    };
    replay_graph::resume_replay_layers(&mut decoder, plan, entered)
}

/// The model's replay layers, with the rows in flight.
struct Walk<'a> {
    layers: &'a [DecoderLayer],
    ctx: &'a StepContext<'a>,
    /// Rows that enter the next layer.
    entering: Rc<Rows>,
    /// Whether the cut's window KV is stored, and its phases are marked, here.
    stores_cut: bool,
}

impl Walk<'_> {
    /// Marks a phase of the cut, unless a break has the marks of its own.
    fn mark_at_cut(&self, layer: u32, mark: Mark) -> Result<()> {
        if layer == 0 && self.stores_cut {
            self.ctx.mark(mark)?;
        }
        Ok(())
    }

    fn store(&self, layer: u32, kv: &Tensor, entering: &Rows) -> Result<()> {
        if layer == 0 && !self.stores_cut {
            return Ok(());
        }
        self.layers[layer as usize].store(self.ctx, kv, entering)
    }
}

impl ReplayDecoder for Walk<'_> {
    type State = RowState;
    type Entered = Entered;
    type Error = Error;

    fn enter(&mut self, layer: u32, state: RowState, _: &LayerRows<'_>) -> Result<Entered> {
        self.mark_at_cut(layer, Mark::Encoded)?;
        let entered = self.layers[layer as usize].enter(self.ctx, state, &self.entering)?;
        self.mark_at_cut(layer, Mark::KvWritten)?;
        Ok(entered)
    }

    fn gather(&mut self, entered: Entered, index: &[u32]) -> Result<Entered> {
        entered.gather(index)
    }

    fn run(&mut self, layer: u32, entered: Entered, rows: &LayerRows<'_>) -> Result<RowState> {
        self.mark_at_cut(layer, Mark::Gathered)?;
        let running = if rows.drops() {
            Rc::new(subset(&self.entering, &rows.running))
        } else {
            self.entering.clone()
        };
        let entering = std::mem::replace(&mut self.entering, running);
        let kv = entered.kv.clone();
        let state = self.layers[layer as usize].run(
            self.ctx,
            entered,
            (&entering, &self.entering),
            KvStart::Host(rows.kv_start),
        )?;
        self.store(layer, &kv, &entering)?;
        Ok(state)
    }

    fn skip(&mut self, layer: u32, entered: Entered, _: &LayerRows<'_>) -> Result<()> {
        self.mark_at_cut(layer, Mark::Gathered)?;
        self.store(layer, &entered.kv, &self.entering)
    }
}

/// The rows of `set`, which are the last of each request's rows in `outer`.
pub(crate) fn subset(outer: &Rows, set: &RowSet<'_>) -> Rows {
    Rows::pack(
        outer.device(),
        outer.spans().iter().enumerate().map(|(request, span)| {
            let kept = set.n_rows_of(request).get() as usize;
            (span.slot, span.end_pos() - kept, kept)
        }),
    )
}
