//! A KV source's compressor: one entry of compressed KV and one index key per group of rows.

use candle_core::Tensor;

use super::context::StepContext;
use crate::{
    Result,
    ops::{Act, ClosedGroups, Linear, Rounding, close_groups, rms_norm, rotate_heads},
    rows::Rows,
};

/// Compressor weights, and those of the index key made from its output.
#[derive(Debug)]
pub(crate) struct Compressor {
    pub(super) wkv: Linear,
    /// Of sources with ratio > 1.
    pub(super) wgate: Option<Linear>,
    pub(super) norm: Tensor,
    pub(super) wk: Linear,
    pub(super) k_norm: Tensor,
}

impl Compressor {
    /// Writes an entry and its index key for every group that these rows complete, and keeps what
    /// is left of an open one.
    pub(super) fn write(
        &self,
        ctx: &StepContext<'_>,
        layer: usize,
        normed: &Tensor,
        rows: &Rows,
    ) -> Result<()> {
        let config = ctx.config;
        let ratio = config.layers[layer].ratio;
        let source = ctx.layers[layer]
            .source
            .as_ref()
            .expect("a compressor has a source's cache");
        let groups = ClosedGroups::of(rows, ratio);
        let pooled = match (&self.wgate, &source.pending) {
            (Some(wgate), Some([keys, gates])) => {
                // Released runtimes pool in f32 whatever the activation dtype is.
                let (k, g) = (
                    self.wkv.forward(normed, Act::F32)?,
                    wgate.forward(normed, Act::F32)?,
                );
                let pooled = close_groups(&groups, ratio, rows, (&k, keys), (&g, gates), ctx.act)?;
                keys.store(&k, rows)?;
                gates.store(&g, rows)?;
                pooled
            }
            _ => self.wkv.forward(normed, ctx.act)?,
        };
        if groups.is_empty() {
            return Ok(());
        }
        let latent = rms_norm(&pooled, &self.norm, config.rms_norm_eps, ctx.act)?;
        let table = groups.rope(&ctx.frequencies[1], ctx.device)?;
        let kv = rotate_heads(
            &latent,
            config.head_dim,
            &table,
            ctx.rounding(Rounding::NvFp4),
            ctx.act,
        )?;
        let key = rms_norm(
            &self.wk.forward(&latent, ctx.act)?,
            &self.k_norm,
            config.rms_norm_eps,
            ctx.act,
        )?;
        let key = rotate_heads(
            &key,
            config.index_dim,
            &table,
            ctx.rounding(Rounding::MxFp4),
            ctx.act,
        )?;
        for (pool, values) in [(&source.entries, &kv), (&source.index_keys, &key)] {
            pool.store(values, &groups, &ctx.pages)?;
        }
        Ok(())
    }
}
