//! The decoder layer, in the parts that bounded replay needs: [`DecoderLayer::enter`] makes the KV of
//! every row that comes in, [`DecoderLayer::run`] takes the rows that stay through the rest,
//! [`DecoderLayer::store`] keeps the window KV for later steps.

mod attention;
mod build;
mod compressor;
mod context;
mod engram;
mod indexer;
mod moe;
mod state;

use attention::Attention;
pub use context::Observer;
pub(crate) use context::StepContext;
pub(crate) use engram::Engram;
use moe::Moe;
pub(crate) use state::{Entered, RowState};

use candle_core::Tensor;

use crate::{
    Result,
    ops::{KvStart, Mix, collapse_norm, expand, expand_norm, mix},
    rows::Rows,
};

/// One layer's weights.
#[derive(Debug)]
pub(crate) struct DecoderLayer {
    index: usize,
    engram: Option<Engram>,
    attn_norm: Tensor,
    attn_mix: Mix,
    attention: Attention,
    ffn_norm: Tensor,
    ffn_mix: Mix,
    moe: Moe,
}

impl DecoderLayer {
    /// The engram, of a layer that has one.
    pub(crate) fn engram(&self) -> Option<&Engram> {
        self.engram.as_ref()
    }

    /// Looks n-grams up, and makes the window KV of every entering row; a KV source writes
    /// compressed KV and index keys to the cache. Window KV goes there with [`Self::store`].
    pub(crate) fn enter(
        &self,
        ctx: &StepContext<'_>,
        mut state: RowState,
        entering: &Rows,
    ) -> Result<Entered> {
        if let Some(engram) = &self.engram {
            state.streams = engram.forward(ctx, self.index, &state.streams)?;
            ctx.note(
                || format!("layers.{}.engram_out", self.index),
                &state.streams,
            );
        }
        let normed = self.input(ctx, &state)?;
        ctx.note(|| format!("layers.{}.attn_in", self.index), &normed);
        let kv = self
            .attention
            .write_kv(ctx, self.index, &normed, entering)?;
        Ok(Entered { state, normed, kv })
    }

    /// The attention's input `[rows, h]`.
    pub(crate) fn input(&self, ctx: &StepContext<'_>, state: &RowState) -> Result<Tensor> {
        Ok(collapse_norm(
            &state.streams,
            &state.pre,
            &self.attn_norm,
            ctx.config.rms_norm_eps,
            ctx.act,
        )?)
    }

    /// A layer that all its rows go through.
    pub(crate) fn pass(
        &self,
        ctx: &StepContext<'_>,
        state: RowState,
        rows: &Rows,
        kv_start: KvStart<'_>,
    ) -> Result<RowState> {
        let entered = self.enter(ctx, state, rows)?;
        let kv = entered.kv.clone();
        self.go_on(ctx, entered, (rows, rows), kv_start, || {
            self.store(ctx, &kv, rows)
        })
    }

    /// Attention and experts for the `running` rows, which `entered` holds; `entering` are the rows
    /// that [`Self::enter`] saw.
    pub(crate) fn run(
        &self,
        ctx: &StepContext<'_>,
        entered: Entered,
        rows: (&Rows, &Rows),
        kv_start: KvStart<'_>,
    ) -> Result<RowState> {
        self.go_on(ctx, entered, rows, kv_start, || Ok(()))
    }

    /// [`Self::run`]; `attended` is called when no row attends any more.
    fn go_on(
        &self,
        ctx: &StepContext<'_>,
        entered: Entered,
        (entering, running): (&Rows, &Rows),
        kv_start: KvStart<'_>,
        attended: impl FnOnce() -> Result<()>,
    ) -> Result<RowState> {
        let Entered {
            mut state,
            normed,
            kv,
        } = entered;
        // The coefficients of a site are small work, and nothing waits for them until the sublayer has made its
        // output: they are made beside what leaves much of a device idle.
        let (y, (attn_pre, post_comb)) = self.attention.forward(
            ctx,
            self.index,
            &mut state,
            &normed,
            (&kv, entering),
            running,
            kv_start,
            |state| Ok(mix(&self.attn_mix, &state.streams)?),
        )?;
        ctx.note(|| format!("layers.{}.attn_out", self.index), &y);
        let (streams, x) = expand_norm(
            &y,
            &state.streams,
            &post_comb,
            &attn_pre,
            &self.ffn_norm,
            ctx.config.rms_norm_eps,
            ctx.act,
        )?;
        ctx.note(|| format!("layers.{}.ffn_in", self.index), &x);
        let beside = || {
            let mixed = mix(&self.ffn_mix, &streams)?;
            attended()?;
            Ok(mixed)
        };
        let (y, (ffn_pre, post_comb)) = self.moe.forward(ctx, self.index, &x, beside)?;
        ctx.note(|| format!("layers.{}.ffn_out", self.index), &y);
        state.streams = expand(&y, &streams, &post_comb, ctx.act)?;
        state.pre = ffn_pre;
        ctx.note(|| format!("layers.{}.streams", self.index), &state.streams);
        ctx.note(|| format!("layers.{}.pre_mix", self.index), &state.pre);
        Ok(state)
    }

    /// Stores the window KV `[entering rows, D]`. Only after [`Self::run`]: until then rows of this
    /// step still read the older rows that it replaces.
    pub(crate) fn store(&self, ctx: &StepContext<'_>, kv: &Tensor, entering: &Rows) -> Result<()> {
        Ok(ctx.layers[self.index].window.store(kv, entering)?)
    }
}
