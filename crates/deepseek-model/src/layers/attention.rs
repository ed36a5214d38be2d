//! Sliding-window attention with compressed entries and grouped output projection.

use candle_core::Tensor;
use replay_graph::join;

use super::{compressor::Compressor, context::StepContext, indexer::Indexer, state::RowState};
use crate::{
    Result,
    ops::{
        EntryKeys, KvStart, Linear, Rounding, WindowKeys, attention, grouped_linear, rms_norm,
        rotate_heads, rotate_own_heads,
    },
    rows::Rows,
};

/// Attention weights of a layer.
#[derive(Debug)]
pub(crate) struct Attention {
    pub(super) wq_a: Linear,
    pub(super) q_norm: Tensor,
    pub(super) wq_b: Linear,
    pub(super) wkv: Linear,
    pub(super) kv_norm: Tensor,
    /// `[H]`.
    pub(super) sink: Tensor,
    /// `[groups · o_lora, H · D / groups]`.
    pub(super) wo_a: Tensor,
    pub(super) wo_b: Linear,
    pub(super) compressor: Option<Compressor>,
    pub(super) indexer: Option<Indexer>,
}

impl Attention {
    /// Makes window KV `[rows, D]` from the layer's input `[rows, h]`; a KV source also writes
    /// compressed KV and index keys to the cache.
    pub(super) fn write_kv(
        &self,
        ctx: &StepContext<'_>,
        layer: usize,
        normed: &Tensor,
        rows: &Rows,
    ) -> Result<Tensor> {
        let config = ctx.config;
        let compressed = config.layers[layer].ratio > 0;
        let kv = rms_norm(
            &self.wkv.forward(normed, ctx.act)?,
            &self.kv_norm,
            config.rms_norm_eps,
            ctx.act,
        )?;
        let table = rows.rope(ctx.frequencies, compressed)?;
        let kv = rotate_heads(
            &kv,
            config.head_dim,
            table,
            ctx.rounding(Rounding::MxFp8),
            ctx.act,
        )?;
        if let Some(compressor) = &self.compressor {
            compressor.write(ctx, layer, normed, rows)?;
        }
        Ok(kv)
    }

    /// `normed` and `state` hold the `running` rows; `kv` is that of all `entering` ones.
    /// An index source replaces the choice in `state`. Gives the output `[rows, h]`, and what `beside` makes
    /// of the state, which needs no result of this and calls no library.
    #[allow(
        clippy::too_many_arguments,
        reason = "the layer's tensors, each used once"
    )]
    pub(super) fn forward<T>(
        &self,
        ctx: &StepContext<'_>,
        layer: usize,
        state: &mut RowState,
        normed: &Tensor,
        (kv, entering): (&Tensor, &Rows),
        running: &Rows,
        kv_start: KvStart<'_>,
        beside: impl FnOnce(&RowState) -> Result<T>,
    ) -> Result<(Tensor, T)> {
        let config = ctx.config;
        let schedule = config.layers[layer];
        let table = running.rope(ctx.frequencies, schedule.ratio > 0)?;
        let latent = rms_norm(
            &self.wq_a.forward(normed, ctx.act)?,
            &self.q_norm,
            config.rms_norm_eps,
            ctx.act,
        )?;
        let q = self.wq_b.forward(&latent, ctx.act)?;
        let q = rotate_own_heads(q, config.head_dim, table, ctx.act)?;
        if let Some(indexer) = &self.indexer {
            indexer.choose(ctx, layer, state, normed, &latent, running)?;
        }
        let window = WindowKeys {
            current: kv,
            entering,
            ring: &ctx.layers[layer].window,
            window: ctx.window,
            kv_start,
        };
        let source = schedule
            .kv_source
            .and_then(|source| ctx.layers[source].source.as_ref());
        let entries = source
            .zip(state.choice.as_ref())
            .map(|(source, choice)| EntryKeys {
                choice,
                pool: &source.entries,
                pages: &ctx.pages,
            });
        let attend = || {
            let entries = entries.as_ref();
            let out = attention(&q, running, &window, entries, &self.sink, table, ctx.act)?;
            let out = grouped_linear(&out, &self.wo_a, config.o_groups, ctx.act)?;
            Ok(self.wo_b.forward(&out, ctx.act)?)
        };
        join(ctx.device, attend, || beside(state))
    }
}
