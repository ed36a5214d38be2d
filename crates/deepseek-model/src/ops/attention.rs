//! Attention of each row over its window and its chosen compressed entries, with a sink.

use candle_core::{Result, Tensor};
use rayon::prelude::*;
use replay_core::{Position, Window};

use super::{
    Act, RopeTable, cuda, f32s, from_f32s,
    gemm::{Mat, Threads, matmul_nn, matmul_nt},
    index::Choice,
    u32s,
};
use crate::{
    cache::{PageLists, PagedRows, RowRing},
    rows::Rows,
};

/// Where a layer's window KV lies.
pub(crate) struct WindowKeys<'a> {
    /// KV of the rows that entered the layer in this step, `[entering rows, D]`.
    pub(crate) current: &'a Tensor,
    /// Those rows.
    pub(crate) entering: &'a Rows,
    /// KV of earlier steps.
    pub(crate) ring: &'a RowRing,
    /// Which positions a row reads.
    pub(crate) window: Window,
    /// Which KV may be read.
    pub(crate) kv_start: KvStart<'a>,
}

/// For each request, the first position whose window KV may be read in a layer.
#[derive(Debug, Clone, Copy)]
pub(crate) enum KvStart<'a> {
    /// Known to the host.
    Host(&'a [u32]),
    /// On the device at a fixed address, u32 `[requests]`, as a captured step has it.
    #[allow(
        dead_code,
        reason = "kernels read it, which a build without CUDA lacks"
    )]
    Device(&'a Tensor),
}

impl<'a> KvStart<'a> {
    fn host(self) -> Result<&'a [u32]> {
        match self {
            Self::Host(starts) => Ok(starts),
            Self::Device(_) => candle_core::bail!("attention: expected KV bounds on the host"),
        }
    }
}

/// Where the chosen compressed entries lie.
pub(crate) struct EntryKeys<'a> {
    /// Chosen entries of each query row.
    pub(crate) choice: &'a Choice,
    /// Compressed KV of the source.
    pub(crate) pool: &'a PagedRows,
    /// Pages of each request.
    pub(crate) pages: &'a PageLists<'a>,
}

/// Query rows that one task takes.
const TILE: usize = 4;

/// Buffers of one task.
#[derive(Default)]
struct Scratch {
    keys: Vec<f32>,
    scores: Vec<f32>,
}

/// `Σ_k e^(s_k) · kv_k / (Σ_k e^(s_k) + e^sink)` per head, rotated back, `[rows, H · D]`.
///
/// `q` is `[rows, H · D]` (rotated), `sink` is `[H]`, `rope` has one entry per query row. A key is
/// a value too, and one for all heads. Only keys that a row may see are ever loaded, so what other
/// slots hold does not matter.
pub(crate) fn attention(
    q: &Tensor,
    rows: &Rows,
    window: &WindowKeys<'_>,
    entries: Option<&EntryKeys<'_>>,
    sink: &Tensor,
    rope: &RopeTable,
    act: Act,
) -> Result<Tensor> {
    if q.device().is_cuda() {
        let dim = window.current.dim(1)?;
        let out = cuda::attention(q, rows, window, entries, sink)?;
        cuda::rotate_in_place(&out, dim, rope.device()?, true)?;
        return Ok(out);
    }
    let (rope, kv_start) = (rope.host()?, window.kv_start.host()?);
    let (n_rows, width) = q.dims2()?;
    let dim = window.current.dim(1)?;
    let (q, sink) = (f32s(q)?, f32s(sink)?);
    let current = f32s(window.current)?;
    let ring = f32s(window.ring.data())?;
    let pool = entries.map(|e| f32s(e.pool.data())).transpose()?;
    let chosen = entries.map(|e| u32s(&e.choice.entries)).transpose()?;
    let row_at = |data: &[f32], row: usize, keys: &mut Vec<f32>| {
        keys.extend_from_slice(&data[row * dim..(row + 1) * dim]);
    };
    let gather = |row: usize, keys: &mut Vec<f32>| {
        keys.clear();
        let (request, pos) = rows.locate(row);
        let span = &window.entering.spans()[request];
        let seen = window
            .window
            .keys(Position::new(pos as u32), Position::new(kv_start[request]));
        let first = seen.start as usize;
        for old in first..span.first_pos {
            row_at(&ring, window.ring.row(span.slot, old), keys);
        }
        let from = span.first_row + first.max(span.first_pos) - span.first_pos;
        let to = span.first_row + pos - span.first_pos;
        keys.extend_from_slice(&current[from * dim..(to + 1) * dim]);
        if let (Some(entries), Some(chosen), Some(pool)) = (entries, &chosen, &pool) {
            let width = entries.choice.width;
            for &entry in chosen[row * width..(row + 1) * width]
                .iter()
                .take_while(|e| **e != Choice::NONE)
            {
                row_at(
                    pool,
                    entries.pool.row(entries.pages.of(request), entry as usize),
                    keys,
                );
            }
        }
    };
    let mut out = vec![0f32; n_rows * width];
    out.par_chunks_mut(width)
        .enumerate()
        .with_min_len(TILE)
        .for_each_init(Scratch::default, |scratch, (row, out)| {
            gather(row, &mut scratch.keys);
            attend(
                out,
                &q[row * width..(row + 1) * width],
                &scratch.keys,
                dim,
                &sink,
                &mut scratch.scores,
            );
            act.store_all(out);
            for head in out.chunks_exact_mut(dim) {
                rope.rotate_back(head, row, act);
            }
        });
    from_f32s(out, (n_rows, width))
}

/// All heads of one row over `keys` `[n, dim]`.
fn attend(
    out: &mut [f32],
    q: &[f32],
    keys: &[f32],
    dim: usize,
    sink: &[f32],
    scores: &mut Vec<f32>,
) {
    let (heads, n) = (sink.len(), keys.len() / dim);
    scores.resize(heads * n, 0.0);
    matmul_nt(
        scores,
        n,
        Mat::dense(q, heads, dim),
        Mat::dense(keys, n, dim),
        Threads::One,
    );
    let scale = 1.0 / (dim as f32).sqrt();
    for (scores, sink) in scores.chunks_exact_mut(n).zip(sink) {
        let top = scores.iter().fold(f32::NEG_INFINITY, |top, s| top.max(*s)) * scale;
        let top = top.max(*sink);
        let mut total = 0f32;
        for s in scores.iter_mut() {
            *s = (*s * scale - top).exp();
            total += *s;
        }
        let inv = 1.0 / (total + (sink - top).exp());
        scores.iter_mut().for_each(|s| *s *= inv);
    }
    matmul_nn(
        out,
        dim,
        Mat::dense(scores, heads, n),
        Mat::dense(keys, n, dim),
        Threads::One,
    );
}
