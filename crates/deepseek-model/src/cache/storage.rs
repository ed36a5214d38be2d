//! The two shapes of cache storage: a ring of the newest rows, and pages of all entries.

use candle_core::{DType, Device, Error, Result, Tensor};
use replay_cuda::{PAD_ROW, write_rows_into};

use super::PageLists;
use crate::{
    ops::{ClosedGroups, write_rows},
    rows::Rows,
};

/// For each sequence, the newest `capacity` rows by position: position `p` sits in slot
/// `p mod capacity` of the sequence's part.
///
/// A layer reads the rows of the step it is in from the step's own tensor and older ones from
/// here, and stores the step's rows only after reading; so a ring holds just what later steps read.
#[derive(Debug)]
pub(crate) struct RowRing {
    /// `[sequences · capacity, width]`.
    data: Tensor,
    capacity: usize,
}

impl RowRing {
    pub(crate) fn new(
        sequences: usize,
        capacity: usize,
        width: usize,
        (dtype, device): (DType, &Device),
    ) -> Result<Self> {
        Ok(Self {
            data: Tensor::zeros((sequences * capacity, width), dtype, device)?,
            capacity,
        })
    }

    /// `[sequences · capacity, width]`.
    pub(crate) fn data(&self) -> &Tensor {
        &self.data
    }

    /// Rows kept per sequence.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Row of `data` that holds position `pos` of the sequence in `slot`.
    #[inline]
    pub(crate) fn row(&self, slot: usize, pos: usize) -> usize {
        Self::place(self.capacity, slot, pos)
    }

    /// As [`Self::row`], of a ring of this capacity.
    #[inline]
    pub(crate) fn place(capacity: usize, slot: usize, pos: usize) -> usize {
        slot * capacity + pos % capacity
    }

    /// Stores the last rows of each span of `rows`; `values` is `[rows, width]`.
    pub(crate) fn store(&self, values: &Tensor, rows: &Rows) -> Result<()> {
        if values.device().is_cuda() {
            let list = rows.ring_rows(self.capacity)?;
            return write_rows_into(&[values], &list, &[&self.data]).map_err(Error::wrap);
        }
        let mut pairs = Vec::new();
        for span in rows.spans() {
            let kept = span.len.min(self.capacity);
            for pos in span.end_pos() - kept..span.end_pos() {
                pairs.push((
                    span.first_row + pos - span.first_pos,
                    self.row(span.slot, pos),
                ));
            }
        }
        write_rows(&self.data, values, &pairs)
    }

    /// Overwrites every slot.
    pub(crate) fn fill(&self, value: f32) -> Result<()> {
        fill(&self.data, value)
    }
}

/// Entries of all sequences in pages of equal size.
#[derive(Debug)]
pub(crate) struct PagedRows {
    /// `[pages · per_page, width]`.
    data: Tensor,
    per_page: usize,
}

impl PagedRows {
    pub(crate) fn new(
        pages: usize,
        per_page: usize,
        width: usize,
        (dtype, device): (DType, &Device),
    ) -> Result<Self> {
        Ok(Self {
            data: Tensor::zeros((pages * per_page, width), dtype, device)?,
            per_page,
        })
    }

    /// `[pages · per_page, width]`.
    pub(crate) fn data(&self) -> &Tensor {
        &self.data
    }

    /// Entries of one page.
    pub(crate) fn per_page(&self) -> usize {
        self.per_page
    }

    /// Row of `data` that holds entry `entry` of the sequence with these pages.
    #[inline]
    pub(crate) fn row(&self, pages: &[u32], entry: usize) -> usize {
        Self::place(self.per_page, pages, entry)
    }

    /// As [`Self::row`], with so many entries a page.
    #[inline]
    pub(crate) fn place(per_page: usize, pages: &[u32], entry: usize) -> usize {
        pages[entry / per_page] as usize * per_page + entry % per_page
    }

    /// Stores one row of `values` `[groups, width]` for each group.
    pub(crate) fn store(
        &self,
        values: &Tensor,
        groups: &ClosedGroups,
        pages: &PageLists<'_>,
    ) -> Result<()> {
        let row = |&(request, entry): &(usize, usize)| {
            (entry >= groups.shared[request]).then(|| self.row(pages.of(request), entry))
        };
        let rows = groups.entries.iter().map(row);
        if values.device().is_cuda() {
            let list = if let Some(list) = &groups.on_device(values.device())?.pool_rows {
                list.clone()
            } else {
                let list = rows.map(|row| row.map_or(PAD_ROW, |row| row as u32));
                let list: Vec<u32> = list.collect();
                Tensor::new(list, values.device())?
            };
            return write_rows_into(&[values], &list, &[&self.data]).map_err(Error::wrap);
        }
        let pairs = rows.enumerate().filter_map(|(i, row)| Some((i, row?)));
        let pairs: Vec<_> = pairs.collect();
        write_rows(&self.data, values, &pairs)
    }

    /// Overwrites every slot.
    pub(crate) fn fill(&self, value: f32) -> Result<()> {
        fill(&self.data, value)
    }
}

/// candle takes the bits of the scalar as they are, so it must be of the tensor's dtype.
fn fill(data: &Tensor, value: f32) -> Result<()> {
    data.const_set(match data.dtype() {
        DType::BF16 => half::bf16::from_f32(value).into(),
        _ => value.into(),
    })
}
