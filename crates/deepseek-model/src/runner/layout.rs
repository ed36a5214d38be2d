//! Where the numbers of a captured step lie among each other, and how many there are.

use std::collections::HashMap;

use replay_core::CaptureSizes;
use replay_cuda::PAD_ROW;

use crate::Config;

/// What a list holds, all u32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum List {
    /// `[rows]`: ids.
    Tokens,
    /// `[rows]`.
    Positions,
    /// `[rows]`.
    Requests,
    /// `[requests, 4]`.
    Spans,
    /// `[requests, most pages]`.
    Pages,
    /// `[requests]`: for the layers before the cut, which read from where a sequence begins, and for
    /// each replay layer.
    KvStart(usize),
    /// `[rows]`, for rings of a capacity.
    Ring(usize),
    /// `[groups, 2]`, of a ratio.
    Groups(usize),
    /// `[groups]`, of a ratio.
    GroupPositions(usize),
    /// `[groups]`, of a ratio.
    PoolRows(usize),
}

impl List {
    /// What stands where there is no row, request or group.
    pub(super) const fn padding(self) -> u32 {
        match self {
            Self::Tokens
            | Self::Positions
            | Self::Spans
            | Self::KvStart(_)
            | Self::GroupPositions(_) => 0,
            Self::Requests | Self::Pages | Self::Groups(_) => u32::MAX,
            Self::Ring(_) | Self::PoolRows(_) => PAD_ROW,
        }
    }
}

/// How large steps can be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Rows of a step.
    pub(crate) rows: usize,
    /// Requests of a step.
    pub(crate) requests: usize,
    /// Tokens of a sequence.
    pub(crate) tokens: usize,
    /// Tokens of a page.
    pub(crate) page_tokens: usize,
}

impl Limits {
    /// Pages of a request.
    pub(super) fn pages(self) -> usize {
        self.tokens.div_ceil(self.page_tokens)
    }

    /// Limits of the rows that are kept of a step, in graphs of their own of these sizes. Without such
    /// graphs, the layers read no lists of kept rows.
    pub(crate) fn of_kept(self, sizes: Option<&CaptureSizes>) -> Self {
        Self {
            rows: sizes.map_or(1, |sizes| sizes.largest().as_usize()),
            ..self
        }
    }

    /// Groups of `ratio` tokens that so many rows, of so many requests, can close.
    pub(super) fn groups(rows: usize, requests: usize, ratio: usize) -> usize {
        rows.min((rows / ratio).saturating_add(requests))
    }
}

/// Where each list begins in one tensor of them all, and how long it is. Lengths that no memory holds
/// saturate.
#[derive(Debug)]
pub(crate) struct Layout {
    pub(super) limits: Limits,
    /// Ratios of the KV sources whose groups are listed, each once.
    pub(super) ratios: Vec<usize>,
    /// Capacities of the rings, each once.
    pub(super) capacities: Vec<usize>,
    pub(super) places: HashMap<List, (usize, usize)>,
    /// Of all lists.
    pub(super) len: usize,
}

impl Layout {
    /// Lists of whole steps, with a KV bound for each of `replay_layers` layers.
    pub(crate) fn of_steps(config: &Config, limits: Limits, replay_layers: usize) -> Self {
        let sources = config.layers.iter().enumerate();
        let mut ratios: Vec<usize> = sources
            .filter(|(i, layer)| layer.kv_source == Some(*i))
            .map(|(_, layer)| layer.ratio)
            .collect();
        ratios.sort_unstable();
        ratios.dedup();
        let mut capacities = vec![config.sliding_window];
        capacities.extend(ratios.iter().filter(|ratio| **ratio > 1));
        capacities.sort_unstable();
        capacities.dedup();

        let mut lists = vec![
            (List::Tokens, limits.rows),
            (List::Pages, limits.requests.saturating_mul(limits.pages())),
        ];
        lists.extend((0..=replay_layers).map(|layer| (List::KvStart(layer), limits.requests)));
        for &ratio in &ratios {
            let groups = Limits::groups(limits.rows, limits.requests, ratio);
            lists.push((List::Groups(ratio), groups.saturating_mul(2)));
            lists.push((List::GroupPositions(ratio), groups));
            lists.push((List::PoolRows(ratio), groups));
        }
        Self::new(limits, ratios, capacities, lists)
    }

    /// Lists of the rows that are kept of a step, in layers that are no KV sources. They have
    /// neither tokens nor pages nor bounds: those are the step's.
    pub(crate) fn of_kept_rows(config: &Config, limits: Limits) -> Self {
        Self::new(limits, Vec::new(), vec![config.sliding_window], Vec::new())
    }

    fn new(
        limits: Limits,
        ratios: Vec<usize>,
        capacities: Vec<usize>,
        mut lists: Vec<(List, usize)>,
    ) -> Self {
        lists.extend([
            (List::Positions, limits.rows),
            (List::Requests, limits.rows),
            (List::Spans, limits.requests.saturating_mul(4)),
        ]);
        lists.extend(capacities.iter().map(|&c| (List::Ring(c), limits.rows)));
        let (mut places, mut len) = (HashMap::new(), 0_usize);
        for (list, numbers) in lists {
            places.insert(list, (len, numbers));
            len = len.saturating_add(numbers);
        }
        Self {
            limits,
            ratios,
            capacities,
            places,
            len,
        }
    }

    /// Bytes of all lists.
    pub(crate) fn bytes(&self) -> u64 {
        (self.len as u64).saturating_mul(size_of::<u32>() as u64)
    }
}
