//! The rows of a step that are in flight in a layer, request by request.

use std::{ops::Range, sync::OnceLock};

use crate::ops::{RopeFrequencies, RopeTable};

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
}

/// A set of packed rows: every request's rows are a suffix of those it has in the step.
#[derive(Debug)]
pub(crate) struct Rows {
    spans: Vec<Span>,
    /// Request of each row.
    request_of: Vec<u32>,
    /// Rotation angles of each row, made at first use: `[window-only, compressed]`.
    tables: [OnceLock<RopeTable>; 2],
}

impl Rows {
    /// Lays out `(cache slot, first position, rows)` of each request one after the other.
    pub(crate) fn pack(requests: impl IntoIterator<Item = (usize, usize, usize)>) -> Self {
        let (mut spans, mut request_of) = (Vec::new(), Vec::new());
        for (request, (slot, first_pos, len)) in requests.into_iter().enumerate() {
            spans.push(Span {
                slot,
                first_row: request_of.len(),
                first_pos,
                len,
            });
            request_of.resize(request_of.len() + len, request as u32);
        }
        Self {
            spans,
            request_of,
            tables: Default::default(),
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
        self.request_of.len()
    }

    /// Request and position of a row.
    pub(crate) fn locate(&self, row: usize) -> (usize, usize) {
        let request = self.request_of[row] as usize;
        let span = &self.spans[request];
        (request, span.first_pos + row - span.first_row)
    }

    /// Rotation angles of every row for a layer with (`compressed`) or without compressed KV.
    pub(crate) fn rope(&self, frequencies: &[RopeFrequencies; 2], compressed: bool) -> &RopeTable {
        self.tables[usize::from(compressed)].get_or_init(|| {
            let positions = self.spans.iter().flat_map(|s| s.first_pos..s.end_pos());
            frequencies[usize::from(compressed)].table(positions.map(|p| p as u32))
        })
    }
}
