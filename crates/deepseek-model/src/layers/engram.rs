//! Engram lookup: table rows of the n-grams that end at a token, gated into the streams.

use candle_core::Tensor;

use super::context::StepContext;
use crate::{
    Result,
    ops::{Linear, engram_gate, from_f32s},
    weights::EngramTable,
};

/// Engram weights of a layer. The table stays in its file, memory-mapped.
#[derive(Debug)]
pub(crate) struct Engram {
    pub(super) table: EngramTable,
    /// `[(n + 1) · h, columns · head_dim]`.
    pub(super) wkv: Linear,
    /// `[n, h]`.
    pub(super) q_weight: Tensor,
    /// `[n, h]`.
    pub(super) k_weight: Tensor,
}

impl Engram {
    /// `streams` `[rows, n, h]`, for all rows of the step.
    pub(super) fn forward(
        &self,
        ctx: &StepContext<'_>,
        layer: usize,
        streams: &Tensor,
    ) -> Result<Tensor> {
        let config = ctx.config;
        let table = config.layers[layer]
            .engram
            .expect("an engram layer has a table");
        let engram = config
            .engram
            .as_ref()
            .expect("an engram layer has its configuration");
        let rows = streams.dim(0)?;
        let wanted = &ctx.table_rows[table];
        let mut values = vec![0f32; wanted.len() * engram.head_dim];
        self.table.gather(wanted, &mut values)?;
        ctx.act.store_all(&mut values);
        let values = from_f32s(values, (rows, engram.columns() * engram.head_dim))?;
        let key_value = self.wkv.forward(&values, ctx.act)?;
        Ok(engram_gate(
            streams,
            &key_value,
            &self.q_weight,
            &self.k_weight,
            config.rms_norm_eps,
            ctx.act,
        )?)
    }
}
