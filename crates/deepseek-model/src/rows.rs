//! The rows of a step that are in flight in a layer, request by request.

use std::{
    collections::HashMap,
    ops::Range,
    sync::{Mutex, OnceLock, PoisonError},
};

use candle_core::{Device, Result, Tensor};
use replay_cuda::PAD_ROW;

use crate::cache::RowRing;
use crate::ops::{DeviceGroups, RopeFrequencies, RopeTable};

/// One request's rows: consecutive positions, adjacent in the packed tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    /// Cache slot of the request's sequence.
    pub(crate) slot: usize,
    /// Row of its first position in the packed tensors.
    pub(crate) first_row: usize,
    /// Position of its first row, in tokens from the start of the text.
    pub(crate) first_pos: usize,
    /// Number of rows; a request without rows keeps its place in the list.
    pub(crate) len: usize,
    /// Tokens from the start of the text whose entries are there already: rows of these write none.
    pub(crate) shared: usize,
}

impl Span {
    /// The rows in the packed tensors.
    pub(crate) fn rows(&self) -> Range<usize> {
        self.first_row..self.first_row + self.len
    }

    /// The position after the last row.
    pub(crate) fn end_pos(&self) -> usize {
        self.first_pos + self.len
    }

    /// Positions of the rows.
    pub(crate) fn positions(&self) -> impl Iterator<Item = u32> + use<> {
        (self.first_pos..self.end_pos()).map(|pos| pos as u32)
    }

    /// For each row, the row of a ring of `capacity` positions a slot that it is stored at;
    /// [`PAD_ROW`] for all but the last `capacity`.
    pub(crate) fn ring_rows(self, capacity: usize) -> impl Iterator<Item = u32> {
        let kept = self.end_pos().saturating_sub(capacity);
        (self.first_pos..self.end_pos()).map(move |pos| {
            if pos < kept {
                PAD_ROW
            } else {
                RowRing::place(capacity, self.slot, pos) as u32
            }
        })
    }
}

/// A set of packed rows: every request's rows are a suffix of those it has in the step.
///
/// On a CPU the host's numbers are all there is. On a device they are uploaded at first use; rows of
/// a captured step have none, and lie on the device from the start.
#[derive(Debug)]
pub(crate) struct Rows {
    device: Device,
    spans: Vec<Span>,
    /// Request of each row.
    request_of: Vec<u32>,
    /// Number of rows.
    len: usize,
    /// Tokens that any row sees at most.
    most_tokens: usize,
    /// Rotation angles of each row, made at first use: `[window-only, compressed]`.
    tables: [OnceLock<RopeTable>; 2],
    /// What kernels read of the rows.
    on_device: OnceLock<DeviceRows>,
    /// For each ring capacity, where every row goes; see [`Self::ring_rows`].
    rings: Mutex<HashMap<usize, Tensor>>,
    /// Groups that rows of a captured step close, by ratio.
    fixed_groups: HashMap<usize, DeviceGroups>,
}

/// Rows as kernels read them: lists of u32 on the device.
#[derive(Debug)]
#[allow(
    dead_code,
    reason = "kernels read it, which a build without CUDA lacks"
)]
pub(crate) struct DeviceRows {
    /// `[rows]`: the position of each row, in tokens from the start of the text.
    pub(crate) positions: Tensor,
    /// `[rows]`: the request of each row; of a pad row none, `u32::MAX`.
    pub(crate) requests: Tensor,
    /// `[requests, 4]`: cache slot, first row, first position and number of rows of each request.
    pub(crate) spans: Tensor,
}

impl Rows {
    /// Lays out `(cache slot, first position, rows)` of each request one after the other.
    pub(crate) fn pack(
        device: &Device,
        requests: impl IntoIterator<Item = (usize, usize, usize)>,
    ) -> Self {
        let (mut spans, mut request_of) = (Vec::new(), Vec::new());
        for (request, (slot, first_pos, len)) in requests.into_iter().enumerate() {
            spans.push(Span {
                slot,
                first_row: request_of.len(),
                first_pos,
                len,
                shared: 0,
            });
            request_of.resize(request_of.len() + len, request as u32);
        }
        let seen = spans.iter().filter(|span| span.len > 0);
        Self {
            most_tokens: seen.map(Span::end_pos).max().unwrap_or(0),
            len: request_of.len(),
            spans,
            request_of,
            tables: Default::default(),
            on_device: OnceLock::new(),
            rings: Mutex::default(),
            device: device.clone(),
            fixed_groups: HashMap::new(),
        }
    }

    /// The same rows, of sequences whose entries of so many tokens are there already.
    pub(crate) fn after_shared(mut self, shared: impl IntoIterator<Item = usize>) -> Self {
        for (span, shared) in self.spans.iter_mut().zip(shared) {
            span.shared = shared;
        }
        self
    }

    /// Rows of a captured step, whose numbers are written to the device before each launch: `len` of
    /// them, each of which sees at most `most_tokens`. `rings` are those of
    /// [`Self::ring_rows`], by capacity; `fixed_groups` by ratio.
    pub(crate) fn fixed(
        device: &Device,
        (len, most_tokens): (usize, usize),
        rows: DeviceRows,
        rings: HashMap<usize, Tensor>,
        fixed_groups: HashMap<usize, DeviceGroups>,
    ) -> Self {
        Self {
            device: device.clone(),
            spans: Vec::new(),
            request_of: Vec::new(),
            len,
            most_tokens,
            tables: Default::default(),
            on_device: OnceLock::from(rows),
            rings: Mutex::new(rings),
            fixed_groups,
        }
    }

    /// One span per request of the step.
    pub(crate) fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Rows of each request.
    pub(crate) fn counts(&self) -> Vec<usize> {
        self.spans.iter().map(|span| span.len).collect()
    }

    /// Number of rows.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Request and position of a row.
    pub(crate) fn locate(&self, row: usize) -> (usize, usize) {
        let request = self.request_of[row] as usize;
        let span = &self.spans[request];
        (request, span.first_pos + row - span.first_row)
    }

    /// Request and number of every group of `ratio` tokens, aligned to position 0, whose last row is
    /// among these, in the order of the requests.
    pub(crate) fn closed_groups(&self, ratio: usize) -> impl Iterator<Item = (usize, usize)> {
        let spans = self.spans.iter().enumerate();
        spans.flat_map(move |(request, span)| {
            (span.first_pos / ratio..span.end_pos() / ratio).map(move |entry| (request, entry))
        })
    }

    /// Most complete groups of `ratio` tokens that any row sees.
    pub(crate) fn most_entries(&self, ratio: usize) -> usize {
        self.most_tokens / ratio
    }

    /// Rotation angles of every row for a layer with (`compressed`) or without compressed KV.
    pub(crate) fn rope(
        &self,
        frequencies: &[RopeFrequencies; 2],
        compressed: bool,
    ) -> Result<&RopeTable> {
        let (table, frequencies) = (
            &self.tables[usize::from(compressed)],
            &frequencies[usize::from(compressed)],
        );
        if let Some(table) = table.get() {
            return Ok(table);
        }
        let made = if self.device.is_cpu() {
            frequencies.table(self.spans.iter().flat_map(Span::positions))?
        } else {
            frequencies.table_of(&self.on_device()?.positions)?
        };
        Ok(table.get_or_init(|| made))
    }

    /// The device that the rows' tensors are on.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// The rows as kernels read them.
    pub(crate) fn on_device(&self) -> Result<&DeviceRows> {
        if let Some(rows) = self.on_device.get() {
            return Ok(rows);
        }
        let positions: Vec<u32> = self.spans.iter().flat_map(Span::positions).collect();
        let spans = self.spans.iter();
        let spans = spans.flat_map(|s| [s.slot, s.first_row, s.first_pos, s.len]);
        let spans: Vec<u32> = spans.map(|x| x as u32).collect();
        let rows = DeviceRows {
            positions: Tensor::new(positions, &self.device)?,
            requests: Tensor::new(self.request_of.as_slice(), &self.device)?,
            spans: Tensor::from_vec(spans, (self.spans.len(), 4), &self.device)?,
        };
        Ok(self.on_device.get_or_init(|| rows))
    }

    /// The groups of `ratio` tokens that rows of a captured step close.
    pub(crate) fn fixed_groups(&self, ratio: usize) -> Option<&DeviceGroups> {
        self.fixed_groups.get(&ratio)
    }

    /// For each row, the row of a ring of `capacity` positions a slot that it is stored at, as u32
    /// `[rows]` on the device; [`PAD_ROW`] for all but the last `capacity` rows of a request.
    pub(crate) fn ring_rows(&self, capacity: usize) -> Result<Tensor> {
        let mut lists = self.rings.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(list) = lists.get(&capacity) {
            return Ok(list.clone());
        }
        let mut list = Vec::with_capacity(self.len());
        for span in &self.spans {
            list.extend(span.ring_rows(capacity));
        }
        let list = Tensor::new(list, &self.device)?;
        lists.insert(capacity, list.clone());
        Ok(list)
    }
}
