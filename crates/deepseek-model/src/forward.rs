//! The forward pass over a packed batch.

use std::rc::Rc;

use candle_core::{DType, Tensor};
use replay_core::GraphMode;

use crate::{
    KvCache, ModelError, Result, StepOutput, StepRequest,
    cache::{CacheStorage, PageLists, Sequence},
    layers::{Observer, RowState, StepContext},
    memory::footprint,
    model::{Model, held_dtype},
    ops::{Act, Choice, FaultWord, KvStart, collapse_norm, embed},
    profile::{Mark, Profile},
    replay::{run_replay, stats},
    rows::Rows,
};

impl Model {
    /// Checks a step and makes room for it, runs it, and counts it.
    pub(crate) fn step<T>(
        &self,
        requests: &[StepRequest<'_>],
        cache: &mut KvCache,
        run: impl FnOnce(&KvCache) -> Result<T>,
    ) -> Result<T> {
        let checked = cache.check(requests, (self.id, &self.config))?;
        // A device says itself what it has no room for.
        if self.options.device.is_cpu() {
            footprint::check(&self.config, requests)?;
        }
        cache.reserve(requests, &checked)?;
        let output = run(cache);
        // Taken after a failed step as well, or the next one would be blamed.
        let fault = cache
            .storage
            .faults
            .as_ref()
            .map(FaultWord::take)
            .transpose();
        let output = output?;
        if let Some((layer, site)) = fault?.flatten() {
            return Err(ModelError::NotFiniteOnDevice { layer, site }.into());
        }
        cache.advance(requests);
        Ok(output)
    }

    pub(crate) fn run(
        &self,
        requests: &[StepRequest<'_>],
        cache: &KvCache,
        (observer, profile): (Option<Observer<'_>>, Option<&Profile>),
    ) -> Result<StepOutput> {
        let sequences: Vec<_> = requests
            .iter()
            .map(|r| cache.sequences.get(r.sequence))
            .collect::<Result<_, _>>()?;
        let all = Rc::new(self.pack(requests, &sequences));
        let replay = cache.planner.plan(GraphMode::None, requests, &sequences)?;
        let pages = PageLists::new(sequences.iter().map(|s| s.pages.as_slice()));
        let engram = self.engram_values(requests, &sequences)?;
        let mut ctx = self.context(&cache.storage, pages, engram);
        (ctx.observer, ctx.profile) = (observer, profile);
        let tokens: Vec<u32> = requests.iter().flat_map(|r| r.tokens).copied().collect();
        let tokens = Tensor::new(tokens, &self.options.device)?;
        ctx.mark(Mark::Start)?;
        let mut state = self.embed(&tokens)?;
        let kv_start: Vec<u32> = sequences.iter().map(|s| s.kv_start as u32).collect();
        let layers = self.layers.len();
        let first = replay.as_ref().map_or(layers, |replay| replay.first_layer);
        for layer in 0..first {
            state = self.pass(&ctx, layer, state, &all, KvStart::Host(&kv_start))?;
        }
        let hidden = match &replay {
            None => {
                let hidden = self.finish(&ctx, &state)?;
                ctx.mark(Mark::Scattered)?;
                hidden
            }
            Some(replay) => {
                let (layers, rows) = (&self.layers[first..], all.clone());
                let finish = |state: &RowState| self.finish(&ctx, state);
                run_replay(replay, layers, &ctx, state, rows, finish)?
            }
        };
        ctx.note(|| "final_norm".into(), &hidden);
        let (rows, ranges) = read_rows(requests, &all);
        let logits = self.logits(&ctx, &select(&hidden, &rows)?)?;
        Ok(StepOutput {
            logits,
            ranges,
            stats: stats(&all, layers, replay.as_ref()),
        })
    }

    /// `[rows, n, h]` copies of the embedding; the first sublayer reads stream 0.
    pub(crate) fn embed(&self, tokens: &Tensor) -> Result<RowState> {
        let (rows, n, device) = (tokens.dims1()?, self.config.hc_mult, tokens.device());
        let streams = embed(&self.embed, tokens, n)?;
        let first = Tensor::ones((rows, 1), DType::F32, device)?;
        let pre = if n > 1 {
            let rest = Tensor::zeros((rows, n - 1), DType::F32, device)?;
            Tensor::cat(&[&first, &rest], 1)?
        } else {
            first
        };
        Ok(RowState {
            streams,
            pre,
            choice: None,
            candidates: None,
        })
    }

    /// A state of one row as it comes to layer `index` on a device: which tensors there are, and their
    /// shapes.
    pub(crate) fn state_at(&self, index: usize) -> Result<RowState> {
        let (config, device) = (&self.config, &self.options.device);
        let chosen = |width: usize| -> Result<Choice> {
            let entries = Tensor::zeros((1, width), DType::U32, device)?;
            Ok(Choice { entries, width })
        };
        let mut before = self.config.layers[..index].iter().enumerate();
        let chooses = before.any(|(i, layer)| layer.index_source == Some(i));
        let keeps = config.candidates.filter(|c| c.source < index);
        let mut state = self.embed(&Tensor::zeros(1, DType::U32, device)?)?;
        state.choice = chooses.then(|| chosen(config.index_topk)).transpose()?;
        state.candidates = keeps.map(|c| chosen(c.top_blocks)).transpose()?;
        Ok(state)
    }

    /// A layer that all its rows go through: `rows` in, `rows` out.
    pub(crate) fn pass(
        &self,
        ctx: &StepContext<'_>,
        index: usize,
        state: RowState,
        rows: &Rows,
        kv_start: KvStart<'_>,
    ) -> Result<RowState> {
        let layer = &self.layers[index];
        if self.cut != Some(index) {
            return layer.pass(ctx, state, rows, kv_start);
        }
        ctx.mark(Mark::Encoded)?;
        let entered = layer.enter(ctx, state, rows)?;
        ctx.mark(Mark::KvWritten)?;
        ctx.mark(Mark::Gathered)?;
        let kv = entered.kv.clone();
        let state = layer.run(ctx, entered, (rows, rows), kv_start)?;
        layer.store(ctx, &kv, rows)?;
        Ok(state)
    }

    /// The final norm: `[rows, h]`.
    pub(crate) fn finish(&self, ctx: &StepContext<'_>, state: &RowState) -> Result<Tensor> {
        if self.cut.is_none() {
            ctx.mark(Mark::Encoded)?;
            ctx.mark(Mark::KvWritten)?;
            ctx.mark(Mark::Gathered)?;
        }
        let hidden = collapse_norm(
            &state.streams,
            &state.pre,
            &self.norm,
            self.config.rms_norm_eps,
            self.act,
        )?;
        ctx.mark(Mark::Replayed)?;
        Ok(hidden)
    }

    /// f32 logits `[rows, V]` of rows `[rows, h]` of the final norm.
    pub(crate) fn logits(&self, ctx: &StepContext<'_>, hidden: &Tensor) -> Result<Tensor> {
        let logits = self.head.forward(hidden, Act::F32)?;
        ctx.mark(Mark::End)?;
        Ok(logits)
    }

    /// What the layers of a step read, which nobody observes or profiles.
    pub(crate) fn context<'a>(
        &'a self,
        storage: &'a CacheStorage,
        pages: PageLists<'a>,
        engram: Vec<Tensor>,
    ) -> StepContext<'a> {
        StepContext {
            config: &self.config,
            act: self.act,
            window: self.window,
            round_cache: self.options.round_cache,
            frequencies: &self.frequencies,
            layers: &storage.layers,
            pages,
            faults: storage.faults.as_ref(),
            device: &self.options.device,
            engram,
            observer: None,
            profile: None,
        }
    }

    /// The rows of a step.
    pub(crate) fn pack(&self, requests: &[StepRequest<'_>], sequences: &[&Sequence]) -> Rows {
        let spans = requests.iter().zip(sequences);
        let spans = spans.map(|(r, s)| (r.sequence.slot(), s.len, r.tokens.len()));
        Rows::pack(&self.options.device, spans).after_shared(sequences.iter().map(|s| s.shared))
    }

    /// Values of every engram table for all rows of the step, `[rows, columns · head_dim]`.
    pub(crate) fn engram_values(
        &self,
        requests: &[StepRequest<'_>],
        sequences: &[&Sequence],
    ) -> Result<Vec<Tensor>> {
        let (Some(hasher), Some(config)) = (&self.hasher, &self.config.engram) else {
            return Ok(Vec::new());
        };
        let place = (self.act, &self.options.device);
        let tables = config.layers.iter().enumerate();
        let values = tables.map(|(table, &layer)| {
            let mut rows = Vec::new();
            for (request, sequence) in requests.iter().zip(sequences) {
                hasher.table_rows(table, request.tokens, &sequence.tail, &mut rows)?;
            }
            let engram = self.layers[layer].engram();
            let engram = engram.expect("a layer with a table has an engram");
            engram.look_up(config, &rows, place)
        });
        values.collect()
    }

    /// Memory for the values of every engram table, of at most so many rows.
    pub(crate) fn engram_buffers(&self, rows: usize) -> Result<Vec<Tensor>> {
        let Some(config) = &self.config.engram else {
            return Ok(Vec::new());
        };
        let width = config.columns() * config.head_dim;
        let (dtype, device) = (held_dtype(&self.options), &self.options.device);
        let buffers = config.layers.iter();
        let buffers = buffers.map(|_| Ok(Tensor::zeros((rows, width), dtype, device)?));
        buffers.collect()
    }
}

/// Batch rows whose logits are read, and each request's range among them.
pub(crate) fn read_rows(
    requests: &[StepRequest<'_>],
    all: &Rows,
) -> (Vec<u32>, Vec<std::ops::Range<usize>>) {
    let mut rows = Vec::new();
    let mut ranges = Vec::with_capacity(requests.len());
    for (request, span) in requests.iter().zip(all.spans()) {
        let start = rows.len();
        let all = span.rows();
        let read = all.end - request.logits.count(all.len())..all.end;
        rows.extend(read.map(|row| row as u32));
        ranges.push(start..rows.len());
    }
    (rows, ranges)
}

/// Rows of a tensor, in memory of their own.
pub(crate) fn select(hidden: &Tensor, rows: &[u32]) -> Result<Tensor> {
    Ok(replay_cuda::gather_rows(&[hidden], rows)?.remove(0))
}
