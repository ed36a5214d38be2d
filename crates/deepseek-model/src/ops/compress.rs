//! The compressor: pools each complete group of rows into one entry.

use std::sync::OnceLock;

use candle_core::{Device, Result, Tensor};
use rayon::prelude::*;

use super::{Act, RopeFrequencies, RopeTable, cuda, f32s, from_f32s, view::ROWS_PER_TASK};
use crate::{cache::RowRing, rows::Rows};

/// Groups that a step completes, in the order of the step's requests.
#[derive(Debug, Default)]
pub(crate) struct ClosedGroups {
    /// Request and entry number of each group; empty for rows of a captured step.
    pub(crate) entries: Vec<(usize, usize)>,
    /// For each request, how many entries are there already: these groups are written nowhere.
    pub(crate) shared: Vec<usize>,
    ratio: usize,
    on_device: OnceLock<DeviceGroups>,
}

/// Groups as kernels read them: u32 on the device. Rows of a captured step have places for as many
/// groups as they can close; those that are not closed have no request, `u32::MAX`, and no pool row.
#[derive(Debug, Clone)]
#[allow(
    dead_code,
    reason = "kernels read it, which a build without CUDA lacks"
)]
pub(crate) struct DeviceGroups {
    /// `[groups, 2]`: request and entry number.
    pub(crate) entries: Tensor,
    /// `[groups]`: position of the first token.
    pub(crate) positions: Tensor,
    /// `[groups]`: the row of the source's pages that an entry goes to; known ahead only of a
    /// captured step.
    pub(crate) pool_rows: Option<Tensor>,
}

impl ClosedGroups {
    /// Groups of `ratio` rows, aligned to position 0, whose last row is among `rows`.
    pub(crate) fn of(rows: &Rows, ratio: usize) -> Self {
        Self {
            entries: rows.closed_groups(ratio).collect(),
            shared: rows.spans().iter().map(|s| s.shared / ratio).collect(),
            ratio,
            on_device: match rows.fixed_groups(ratio) {
                Some(groups) => OnceLock::from(groups.clone()),
                None => OnceLock::new(),
            },
        }
    }

    /// Whether there is nothing to make an entry of.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.on_device.get().is_none()
    }

    /// The groups as kernels read them, uploaded at first use.
    pub(crate) fn on_device(&self, device: &Device) -> Result<&DeviceGroups> {
        if let Some(groups) = self.on_device.get() {
            return Ok(groups);
        }
        let n = self.entries.len();
        let entries = self.entries.iter();
        let entries: Vec<u32> = entries.flat_map(|&(r, e)| [r as u32, e as u32]).collect();
        let positions: Vec<u32> = self.positions().collect();
        let groups = DeviceGroups {
            entries: Tensor::from_vec(entries, (n, 2), device)?,
            positions: Tensor::new(positions, device)?,
            pool_rows: None,
        };
        Ok(self.on_device.get_or_init(|| groups))
    }

    /// Rotation angles of the entries: those of each group's first token.
    pub(crate) fn rope(&self, frequencies: &RopeFrequencies, device: &Device) -> Result<RopeTable> {
        if device.is_cpu() {
            frequencies.table(self.positions())
        } else {
            frequencies.table_of(&self.on_device(device)?.positions)
        }
    }

    fn positions(&self) -> impl Iterator<Item = u32> {
        self.entries.iter().map(|&(_, e)| (e * self.ratio) as u32)
    }
}

/// Pools each closed group channel by channel: `Σ softmax(gate)[row] · key[row]`, `[groups, D]`.
///
/// `keys` and `gates` are `[rows, D]`; rows of earlier steps come from the pending rings.
pub(crate) fn close_groups(
    groups: &ClosedGroups,
    ratio: usize,
    rows: &Rows,
    keys: (&Tensor, &RowRing),
    gates: (&Tensor, &RowRing),
    act: Act,
) -> Result<Tensor> {
    if keys.0.device().is_cuda() {
        return cuda::close_groups(groups, ratio, rows, keys, gates, act);
    }
    let width = keys.0.dim(1)?;
    let (new_keys, old_keys) = (f32s(keys.0)?, f32s(keys.1.data())?);
    let (new_gates, old_gates) = (f32s(gates.0)?, f32s(gates.1.data())?);
    let mut out = vec![0f32; groups.entries.len() * width];
    out.par_chunks_mut(width)
        .zip(&groups.entries)
        .with_min_len(ROWS_PER_TASK)
        .for_each_init(
            || Softmax::new(width),
            |softmax, (out, &(request, entry))| {
                let span = &rows.spans()[request];
                let source = |pos: usize| {
                    if pos >= span.first_pos {
                        let at = (span.first_row + pos - span.first_pos) * width;
                        (&new_keys[at..at + width], &new_gates[at..at + width])
                    } else {
                        let at = keys.1.row(span.slot, pos) * width;
                        (&old_keys[at..at + width], &old_gates[at..at + width])
                    }
                };
                softmax.pool(out, (entry * ratio..(entry + 1) * ratio).map(source));
                act.store_all(out);
            },
        );
    from_f32s(out, (groups.entries.len(), width))
}

/// Buffers of a softmax that runs over the rows of a group, for each channel by itself.
struct Softmax {
    top: Vec<f32>,
    total: Vec<f32>,
}

impl Softmax {
    fn new(width: usize) -> Self {
        Self {
            top: vec![0.0; width],
            total: vec![0.0; width],
        }
    }

    /// `out[c] = Σ softmax(gate[·][c]) · key[·][c]` over the `(key, gate)` rows of one group.
    fn pool<'a>(
        &mut self,
        out: &mut [f32],
        group: impl Iterator<Item = (&'a [f32], &'a [f32])> + Clone,
    ) {
        self.top.fill(f32::NEG_INFINITY);
        self.total.fill(0.0);
        out.fill(0.0);
        for (_, gate) in group.clone() {
            for (top, gate) in self.top.iter_mut().zip(gate) {
                *top = top.max(*gate);
            }
        }
        for (key, gate) in group {
            for c in 0..out.len() {
                let weight = (gate[c] - self.top[c]).exp();
                self.total[c] += weight;
                out[c] += weight * key[c];
            }
        }
        for (out, total) in out.iter_mut().zip(&self.total) {
            *out /= total;
        }
    }
}
