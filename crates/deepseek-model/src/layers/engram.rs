//! Engram lookup: table rows of the n-grams that end at a token, gated into the streams.

use candle_core::{Device, Tensor};

use super::context::StepContext;
use crate::{
    Result,
    config::EngramConfig,
    ops::{Act, Linear, engram_gate, from_f32s},
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
    /// Looks the values of table rows `[rows, columns]` up: `[rows, columns · head_dim]`, in the
    /// activation dtype.
    pub(crate) fn look_up(
        &self,
        config: &EngramConfig,
        table_rows: &[i64],
        (act, device): (Act, &Device),
    ) -> Result<Tensor> {
        let mut values = vec![0f32; table_rows.len() * config.head_dim];
        self.table.gather(table_rows, &mut values)?;
        act.store_all(&mut values);
        let rows = table_rows.len() / config.columns();
        let values = from_f32s(values, (rows, config.columns() * config.head_dim))?;
        Ok(if device.is_cpu() {
            values
        } else {
            values.to_device(device)?.to_dtype(act.dtype())?
        })
    }

    /// `streams` `[rows, n, h]`, for all rows of the step.
    pub(super) fn forward(
        &self,
        ctx: &StepContext<'_>,
        layer: usize,
        streams: &Tensor,
    ) -> Result<Tensor> {
        let table = ctx.config.layers[layer]
            .engram
            .expect("an engram layer has a table");
        let key_value = self.wkv.forward(&ctx.engram[table], ctx.act)?;
        Ok(engram_gate(
            streams,
            &key_value,
            &self.q_weight,
            &self.k_weight,
            ctx.config.rms_norm_eps,
            ctx.act,
        )?)
    }
}
