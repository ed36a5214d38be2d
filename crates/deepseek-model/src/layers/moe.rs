//! The feed-forward sublayer: routed experts and the shared one.

use candle_core::Tensor;

use super::context::StepContext;
use crate::{
    ModelError, Result,
    ops::{Act, Experts, Linear, Site, route, routed_experts, swiglu},
};

/// Feed-forward weights.
#[derive(Debug)]
pub(crate) struct Moe {
    pub(super) gate: Linear,
    /// `[E]`.
    pub(super) bias: Tensor,
    pub(super) experts: Experts,
    /// `[2m, h]`.
    pub(super) shared_w13: Linear,
    /// `[h, m]`.
    pub(super) shared_w2: Linear,
}

impl Moe {
    /// `x` `[rows, h]` to `[rows, h]`.
    pub(super) fn forward(
        &self,
        ctx: &StepContext<'_>,
        layer: usize,
        x: &Tensor,
    ) -> Result<Tensor> {
        let logits = self.gate.forward(x, Act::F32)?;
        let faults = ctx.faults(layer, Site::Router);
        let (ids, weights) = route(&logits, &self.bias, ctx.config, faults)
            .map_err(|cause| ModelError::NotFinite { layer, cause })?;
        ctx.note(|| format!("layers.{layer}.experts"), &ids);
        let hidden = self.shared_w13.forward(x, ctx.act)?;
        let shared = self
            .shared_w2
            .forward(&swiglu(&hidden, ctx.config.swiglu_limit, ctx.act)?, ctx.act)?;
        Ok(routed_experts(
            &self.experts,
            x,
            &ids,
            &weights,
            &shared,
            ctx.act,
        )?)
    }
}
