//! The forward pass over a packed batch.

use std::rc::Rc;

use candle_core::{DType, Module, Tensor};

use crate::{
    KvCache, LayerStats, ModelError, Result, StepOutput, StepRequest, StepStats,
    cache::{PageLists, Sequence},
    layers::{Observer, RowState, StepContext},
    model::{Model, held_dtype},
    ops::{Act, FaultWord, collapse_norm},
    replay::Replay,
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
        let checked = cache.check(requests, &self.config)?;
        cache.reserve(requests, &checked)?;
        let output = run(cache);
        // Taken after a failed step as well, or the next one would be blamed.
        let fault = cache.faults.as_ref().map(FaultWord::take).transpose();
        let output = output?;
        if let Some((layer, site)) = fault?.flatten() {
            return Err(ModelError::NotFiniteOnDevice { layer, site }.into());
        }
        cache.advance(requests, self.lookback());
        Ok(output)
    }

    pub(crate) fn run(
        &self,
        requests: &[StepRequest<'_>],
        cache: &KvCache,
        observer: Option<Observer<'_>>,
    ) -> Result<StepOutput> {
        let sequences: Vec<_> = requests
            .iter()
            .map(|r| cache.sequences.get(r.sequence))
            .collect::<Result<_, _>>()?;
        let all = Rc::new(self.pack(requests, &sequences));
        let replay = cache.planner.plan(requests, &sequences)?;
        let pages = PageLists::new(sequences.iter().map(|s| s.pages.as_slice()));
        let engram = self.engram_values(requests, &sequences)?;
        let ctx = self.context(cache, pages, engram, observer);
        let tokens: Vec<u32> = requests.iter().flat_map(|r| r.tokens).copied().collect();
        let mut state = self.embed(&Tensor::new(tokens, &self.options.device)?)?;
        let mut stats = StepStats {
            query_rows: all.counts(),
            layers: Vec::with_capacity(self.layers.len()),
        };
        let whole = vec![0; requests.len()];
        let first = replay
            .as_ref()
            .map_or(self.layers.len(), Replay::first_layer);
        for layer in &self.layers[..first] {
            let entered = layer.enter(&ctx, state, &all)?;
            state = layer.run(&ctx, entered, &all, &all, &whole)?;
            stats.layers.push(LayerStats {
                written: all.counts(),
                run: all.counts(),
            });
        }
        let hidden = match &replay {
            None => self.finish(&state)?,
            Some(replay) => replay.run(
                &self.layers[first..],
                &ctx,
                state,
                all.clone(),
                &mut stats,
                |state| self.finish(state),
            )?,
        };
        ctx.note(|| "final_norm".into(), &hidden);
        let (rows, ranges) = read_rows(requests, &all);
        let logits = self.head.forward(&select(&hidden, &rows)?, Act::F32)?;
        Ok(StepOutput {
            logits,
            ranges,
            stats,
        })
    }

    /// `[rows, n, h]` copies of the embedding; the first sublayer reads stream 0.
    fn embed(&self, tokens: &Tensor) -> Result<RowState> {
        let (rows, n, h) = (
            tokens.dims1()?,
            self.config.hc_mult,
            self.config.hidden_size,
        );
        let device = tokens.device();
        let x = self.embed.forward(tokens)?;
        let streams = x.unsqueeze(1)?.broadcast_as((rows, n, h))?.contiguous()?;
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

    /// The final norm: `[rows, h]`.
    fn finish(&self, state: &RowState) -> Result<Tensor> {
        Ok(collapse_norm(
            &state.streams,
            &state.pre,
            &self.norm,
            self.config.rms_norm_eps,
            self.act,
        )?)
    }

    /// The forward of a step whose numbers are on the device, at fixed addresses, and in which no
    /// row is dropped: logits `[rows, V]` of all its rows.
    pub(crate) fn forward_fixed(
        &self,
        cache: &KvCache,
        tokens: &Tensor,
        rows: &Rc<Rows>,
        pages: PageLists<'_>,
        engram: Vec<Tensor>,
    ) -> Result<Tensor> {
        let ctx = self.context(cache, pages, engram, None);
        let mut state = self.embed(tokens)?;
        for layer in &self.layers {
            let entered = layer.enter(&ctx, state, rows)?;
            state = layer.run(&ctx, entered, rows, rows, &[])?;
        }
        Ok(self.head.forward(&self.finish(&state)?, Act::F32)?)
    }

    fn context<'a>(
        &'a self,
        cache: &'a KvCache,
        pages: PageLists<'a>,
        engram: Vec<Tensor>,
        observer: Option<Observer<'a>>,
    ) -> StepContext<'a> {
        StepContext {
            config: &self.config,
            act: self.act,
            window: self.window,
            round_cache: self.options.round_cache,
            frequencies: &self.frequencies,
            layers: &cache.layers,
            pages,
            faults: cache.faults.as_ref(),
            device: &self.options.device,
            engram,
            observer,
        }
    }

    /// The rows of a step.
    pub(crate) fn pack(&self, requests: &[StepRequest<'_>], sequences: &[&Sequence]) -> Rows {
        let spans = requests.iter().zip(sequences);
        let spans = spans.map(|(r, s)| (r.sequence.slot(), s.len, r.tokens.len()));
        Rows::pack(&self.options.device, spans)
    }

    /// Token ids that a later step's n-grams reach back to.
    fn lookback(&self) -> usize {
        self.config.engram.as_ref().map_or(0, |e| e.max_ngram - 1)
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
fn read_rows(requests: &[StepRequest<'_>], all: &Rows) -> (Vec<u32>, Vec<std::ops::Range<usize>>) {
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

fn select(hidden: &Tensor, rows: &[u32]) -> Result<Tensor> {
    Ok(replay_cuda::gather_rows(&[hidden], rows)?.remove(0))
}
