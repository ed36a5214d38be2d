//! The two shapes of cache storage: a ring of the newest rows, and pages of all entries.

use candle_core::{DType, Device, Result, Tensor};

use crate::{ops::write_rows, rows::Rows};

/// For each sequence, the newest `capacity` rows by position: position `p` sits in slot
/// `p mod capacity` of the sequence's part.
///
/// A layer reads the rows of the step it is in from the step's own tensor and older ones from
/// here, and stores the step's rows only after reading; so a ring holds just what later steps read.
#[derive(Debug)]
pub(crate) struct RowRing {
    /// `[sequences · capacity, width]`, f32.
    data: Tensor,
    capacity: usize,
}

impl RowRing {
    pub(crate) fn new(
        sequences: usize,
        capacity: usize,
        width: usize,
        device: &Device,
    ) -> Result<Self> {
        Ok(Self {
            data: Tensor::zeros((sequences * capacity, width), DType::F32, device)?,
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
        slot * self.capacity + pos % self.capacity
    }

    /// Stores the last rows of each span of `rows`; `values` is `[rows, width]`.
    pub(crate) fn store(&self, values: &Tensor, rows: &Rows) -> Result<()> {
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
    /// `[pages · per_page, width]`, f32.
    data: Tensor,
    per_page: usize,
}

impl PagedRows {
    pub(crate) fn new(
        pages: usize,
        per_page: usize,
        width: usize,
        device: &Device,
    ) -> Result<Self> {
        Ok(Self {
            data: Tensor::zeros((pages * per_page, width), DType::F32, device)?,
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
        pages[entry / self.per_page] as usize * self.per_page + entry % self.per_page
    }

    /// Overwrites every slot.
    pub(crate) fn fill(&self, value: f32) -> Result<()> {
        fill(&self.data, value)
    }
}

fn fill(data: &Tensor, value: f32) -> Result<()> {
    let (rows, width) = data.dims2()?;
    let row = Tensor::full(value, (1, width), data.device())?;
    let pairs: Vec<_> = (0..rows).map(|to| (0, to)).collect();
    write_rows(data, &row, &pairs)
}
