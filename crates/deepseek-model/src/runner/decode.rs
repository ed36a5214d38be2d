//! Decode steps as one graph each.

use std::rc::Rc;

use candle_core::{Device, Tensor};
use replay_core::{CaptureSizes, RowCount};
use replay_graph::{CacheConfig, CaptureMode, CaptureReport, Error as GraphError, GraphCache};

use super::{
    StepMode,
    lists::{Limits, StepLists},
};
use crate::{
    Error, KvCache, LayerStats, Model, Result, StepOutput, StepRequest, StepStats, cache::PageLists,
};

/// The sizes to capture: those asked for, or powers of two and the most.
pub(super) fn sizes(asked: &[u32], max_sequences: usize) -> Result<CaptureSizes> {
    let most = u32::try_from(max_sequences).unwrap_or(u32::MAX);
    let sizes = if asked.is_empty() {
        let powers = (0..32).map(|power| 1 << power);
        let below = powers.take_while(|size| *size < most);
        below.chain([most]).collect()
    } else {
        asked.to_vec()
    };
    CaptureSizes::new(&sizes, most).map_err(Error::from)
}

/// Graphs of a forward over one row for each of so many requests.
#[derive(Debug)]
pub(super) struct DecodeGraphs {
    graphs: GraphCache<Tensor>,
    lists: StepLists,
    /// Looked-up values of each engram table, `[rows, columns · head_dim]`.
    engram: Vec<Tensor>,
    device: Device,
}

impl DecodeGraphs {
    pub(super) fn new(model: &Model, cache: &KvCache, sizes: CaptureSizes) -> Result<Self> {
        let most = sizes.largest().as_usize();
        let device = model.device().clone();
        let limits = Limits {
            rows: most,
            requests: most,
            tokens: cache.max_sequence_tokens(),
            page_tokens: cache.pool.page_tokens(),
        };
        let mut config = CacheConfig::default();
        config.knob = "the capture sizes";
        Ok(Self {
            graphs: GraphCache::new(sizes, config),
            lists: StepLists::new(model.config(), limits, &device)?,
            engram: model.engram_buffers(most)?,
            device,
        })
    }

    /// Captures all sizes. The captured runs have pad rows only, so they write to no slot.
    pub(super) fn capture(
        &mut self,
        model: &Model,
        cache: &KvCache,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<CaptureReport> {
        self.lists.clear()?;
        let (lists, engram) = (&self.lists, &self.engram);
        Ok(self.graphs.capture_all(
            &self.device,
            &[(CaptureMode::Full, ())],
            &mut (),
            |descriptor, _| {
                let rows = descriptor.rows.as_usize();
                let logits = forward(model, cache, lists, engram, rows);
                logits.map_err(GraphError::program)
            },
            |done| progress(done.done, done.total),
        )?)
    }

    /// Whether a step decodes one token of each request, and a graph holds it.
    pub(super) fn takes(&self, cache: &KvCache, requests: &[StepRequest<'_>]) -> bool {
        let decodes = |request: &StepRequest<'_>| {
            let sequence = cache.sequences.get(request.sequence);
            request.tokens.len() == 1 && sequence.is_ok_and(|s| s.len >= s.options.prompt_len)
        };
        let rows = RowCount::new(requests.len() as u32);
        let descriptor = self.graphs.descriptor(rows, CaptureMode::Full, ());
        let captured = descriptor.is_some_and(|d| self.graphs.contains(&d));
        captured && requests.iter().all(decodes)
    }

    /// Runs a step that it [takes](Self::takes), which was checked.
    pub(super) fn run(
        &mut self,
        model: &Model,
        cache: &KvCache,
        requests: &[StepRequest<'_>],
    ) -> Result<(StepOutput, StepMode)> {
        let sequences: Vec<_> = requests
            .iter()
            .map(|r| cache.sequences.get(r.sequence))
            .collect::<Result<_, _>>()?;
        let n = requests.len();
        let rows = model.pack(requests, &sequences);
        let tokens: Vec<u32> = requests.iter().flat_map(|r| r.tokens).copied().collect();
        let pages = PageLists::new(sequences.iter().map(|s| s.pages.as_slice()));
        self.lists.write(&tokens, &rows, &pages)?;
        let values = model.engram_values(requests, &sequences)?;
        for (fixed, values) in self.engram.iter().zip(&values) {
            fixed.slice_set(values, 0, 0)?;
        }
        let padded = RowCount::new(n as u32);
        let graph = self.graphs.get(padded, CaptureMode::Full, ());
        let logits = graph.expect("the step has a graph").launch()?;
        let mode = StepMode::Full {
            padded_rows: logits.dim(0)?,
        };
        Ok((output(requests, logits, model.config().layers.len())?, mode))
    }
}

/// The forward of a step whose numbers are on the device: logits `[rows, V]`.
fn forward(
    model: &Model,
    cache: &KvCache,
    lists: &StepLists,
    engram: &[Tensor],
    rows: usize,
) -> Result<Tensor> {
    let engram = engram
        .iter()
        .map(|values| values.narrow(0, 0, rows))
        .collect::<candle_core::Result<_>>()?;
    model.forward_fixed(
        cache,
        &lists.tokens(rows)?,
        &Rc::new(lists.rows(rows, rows)?),
        lists.pages(rows)?,
        engram,
    )
}

/// The logits that the requests read, in memory of their own: the next launch overwrites the graph's.
fn output(requests: &[StepRequest<'_>], logits: &Tensor, layers: usize) -> Result<StepOutput> {
    let mut ranges = Vec::with_capacity(requests.len());
    let mut read = Vec::new();
    for (row, request) in requests.iter().enumerate() {
        let start = read.len();
        read.extend((request.logits.count(1) > 0).then_some(row as u32));
        ranges.push(start..read.len());
    }
    let ones = vec![1; requests.len()];
    let layer = LayerStats {
        written: ones.clone(),
        run: ones.clone(),
    };
    Ok(StepOutput {
        logits: replay_cuda::gather_rows(&[logits], &read)?.remove(0),
        ranges,
        stats: StepStats {
            query_rows: ones,
            layers: vec![layer; layers],
        },
    })
}
