//! The feed-forward sublayer: routed experts and the shared one.

use candle_core::Tensor;
use replay_graph::join;

use super::context::StepContext;
use crate::{
    ModelError, Result,
    ops::{Act, Experts, Linear, Site, SortedChoices, route, routed_experts, sort_choices, swiglu},
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
    /// `x` `[rows, h]` to `[rows, h]`, and what `beside` makes, which needs no result of this and calls no
    /// library.
    pub(super) fn forward<T>(
        &self,
        ctx: &StepContext<'_>,
        layer: usize,
        x: &Tensor,
        beside: impl FnOnce() -> Result<T>,
    ) -> Result<(Tensor, T)> {
        let route = || self.route(ctx, layer, x);
        let share = || self.share(ctx, x);
        // None waits for another. What comes first here gets its place on the device first.
        let (shared, ((ids, weights, sorted), beside)) = if self.gate.has_own_kernel(x)? {
            join(ctx.device, share, || join(ctx.device, route, beside))?
        } else {
            let routed = route()?;
            let (shared, beside) = join(ctx.device, share, beside)?;
            (shared, (routed, beside))
        };
        let chosen = (&ids, &weights);
        let y = routed_experts(&self.experts, x, chosen, &sorted, &shared, ctx.act)?;
        Ok((y, beside))
    }

    /// The chosen experts `[rows, k]`, their weights, and the choices by expert.
    fn route(
        &self,
        ctx: &StepContext<'_>,
        layer: usize,
        x: &Tensor,
    ) -> Result<(Tensor, Tensor, SortedChoices)> {
        let logits = self.gate.forward(x, Act::F32)?;
        let faults = ctx.faults(layer, Site::Router);
        let (ids, weights) = route(&logits, &self.bias, ctx.config, faults)
            .map_err(|cause| ModelError::NotFinite { layer, cause })?;
        ctx.note(|| format!("layers.{layer}.experts"), &ids);
        let sorted = sort_choices(&self.experts, x, &ids)?;
        Ok((ids, weights, sorted))
    }

    /// What the shared expert adds, `[rows, h]`.
    fn share(&self, ctx: &StepContext<'_>, x: &Tensor) -> Result<Tensor> {
        let hidden = self.shared_w13.forward(x, ctx.act)?;
        let hidden = swiglu(&hidden, ctx.config.swiglu_limit, ctx.act)?;
        Ok(self.shared_w2.forward(&hidden, ctx.act)?)
    }
}
