//! An index source's queries, and the choice they make.

use candle_core::Tensor;

use super::{context::StepContext, state::RowState};
use crate::{
    ModelError, Result,
    ops::{IndexKeys, IndexQueries, Level, Linear, Rounding, Site, choose_entries, rotate_heads},
    rows::Rows,
};

/// Indexer weights.
#[derive(Debug)]
pub(crate) struct Indexer {
    pub(super) wq_b: Linear,
    pub(super) weights_proj: Linear,
}

impl Indexer {
    /// Chooses the compressed entries of each row into `state`; the candidate source also leaves
    /// its blocks there. `normed` is `[rows, h]`, `latent` the query latent `[rows, q_lora]`.
    pub(super) fn choose(
        &self,
        ctx: &StepContext<'_>,
        layer: usize,
        state: &mut RowState,
        normed: &Tensor,
        latent: &Tensor,
        rows: &Rows,
    ) -> Result<()> {
        let config = ctx.config;
        let schedule = config.layers[layer];
        // A source reads its own keys, also in a step that added none.
        let source = schedule
            .kv_source
            .and_then(|source| ctx.layers[source].source.as_ref());
        let source = source.expect("an index source has a KV source");
        let queries = self.wq_b.forward(latent, ctx.act)?;
        let table = rows.rope(ctx.frequencies, true)?;
        let queries = rotate_heads(
            &queries,
            config.index_dim,
            table,
            ctx.rounding(Rounding::MxFp4),
            ctx.act,
        )?;
        let head_weights = self.weights_proj.forward(normed, ctx.act)?;
        let level = match (config.candidates, &state.candidates) {
            (Some(c), _) if c.source == layer => Level::Source(c),
            (Some(c), Some(kept)) if c.source < layer => Level::Within(kept, c.block_size),
            _ => Level::Single,
        };
        let queries = IndexQueries {
            queries: &queries,
            head_weights: &head_weights,
            rows,
            topk: config.index_topk,
            faults: ctx.faults(layer, Site::Index),
        };
        let keys = IndexKeys {
            pool: &source.index_keys,
            pages: &ctx.pages,
            ratio: schedule.ratio,
        };
        let chosen = choose_entries(&queries, &keys, level, ctx.observer.is_some())
            .map_err(|cause| ModelError::NotFinite { layer, cause })?;
        if let Some(scores) = &chosen.scores {
            ctx.note(|| format!("layers.{layer}.index_scores"), scores);
        }
        ctx.note(|| format!("layers.{layer}.chosen"), &chosen.choice.entries);
        state.choice = Some(chosen.choice);
        if chosen.candidates.is_some() {
            state.candidates = chosen.candidates;
        }
        Ok(())
    }
}
