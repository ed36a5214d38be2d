//! Attention over the window and the chosen entries.
#![allow(unsafe_code)]

use candle_core::{DType, Result, Tensor};
use replay_cuda::kernel::Kernel;

use super::launch::{
    ByAct, by_act, count, expect, expect_fours, grid, has_shared, kernel, kernel_args, output, run,
    tensors,
};
use crate::{
    ops::attention::{EntryKeys, KvStart, WindowKeys},
    rows::{DeviceRows, Rows},
};

const OP: &str = "attention";

const ATTENTION: ByAct = by_act!("attention", ATTENTION, "attention");
const ATTENTION_FEW: ByAct = by_act!("attention", ATTENTION, "attention_few");

/// On tensor cores, for many rows.
const ATTENTION_TENSOR: Kernel = kernel!("attention_tensor", ATTENTION_TENSOR, "attention_tensor");

/// What it is made for: bf16, as many channels, heads of a block; and the shared memory it takes.
const TENSOR_DIM: usize = 512;
const TENSOR_HEADS: usize = 64;
const TENSOR_KEYS: usize = 64;
const TENSOR_SHARED: usize = (TENSOR_HEADS + 2 * TENSOR_KEYS) * TENSOR_DIM * 2
    + TENSOR_HEADS * (TENSOR_KEYS + 16) * 4
    + TENSOR_HEADS * (TENSOR_KEYS + 8) * 2
    + TENSOR_HEADS * 4
    + 2 * TENSOR_KEYS;

/// What the other kernels are made for: threads of a block, the widest head, keys of a tile, and heads of a
/// block of either kernel.
const THREADS: u32 = 256;
const MAX_DIM: usize = 512;
const TILE: usize = 32;
const HEADS: usize = 16;
const FEW_HEADS: usize = 4;

/// Blocks that keep a large device busy: two on each multiprocessor of an H200.
const ENOUGH_BLOCKS: usize = 264;

kernel_args! {
    struct AttentionArgs {
        q: u64, positions: u64, requests: u64, spans: u64, kv_start: u64, current: u64, ring: u64,
        choice: u64, pool: u64, pages: u64, sink: u64, out: u64,
        heads: u32, dim: u32, n_requests: u32, entering: u32, ring_rows: u32, capacity: u32,
        window: u32, width: u32, pool_rows: u32, per_page: u32, max_pages: u32, scale: f32,
    }
}

/// As [`crate::ops::attention`], but for the rotation back.
pub(in crate::ops) fn attention(
    q: &Tensor,
    rows: &Rows,
    window: &WindowKeys<'_>,
    entries: Option<&EntryKeys<'_>>,
    sink: &Tensor,
) -> Result<Tensor> {
    if rows.len() == 0 {
        return output(q.dims(), q.dtype(), q.device());
    }
    attend(q, rows.on_device()?, window, entries, sink)
}

/// Entries as the kernel takes them.
struct Entries {
    choice: Tensor,
    pool: Tensor,
    pages: Tensor,
    width: usize,
    per_page: usize,
}

impl Entries {
    /// Those of the rows, or tensors without elements, to which the kernel gets no address.
    fn of(entries: Option<&EntryKeys<'_>>, current: &Tensor, positions: &Tensor) -> Result<Self> {
        let Some(entries) = entries.filter(|entries| entries.choice.width > 0) else {
            let no_list = positions.narrow(0, 0, 0)?;
            return Ok(Self {
                choice: no_list.clone(),
                pool: current.narrow(0, 0, 0)?,
                pages: no_list.reshape((0, 1))?,
                width: 0,
                per_page: 1,
            });
        };
        Ok(Self {
            choice: entries.choice.entries.clone(),
            pool: entries.pool.data().clone(),
            pages: entries.pages.on_device(current.device())?.clone(),
            width: entries.choice.width,
            per_page: entries.pool.per_page(),
        })
    }
}

/// Attention of rows that are on the device; pad rows, whose request is none, get zeros.
pub(super) fn attend(
    q: &Tensor,
    rows: &DeviceRows,
    window: &WindowKeys<'_>,
    entries: Option<&EntryKeys<'_>>,
    sink: &Tensor,
) -> Result<Tensor> {
    let operands = Operands {
        q,
        rows,
        window,
        spans: &window.entering.on_device()?.spans,
        kv_start: match window.kv_start {
            KvStart::Device(starts) => starts.clone(),
            KvStart::Host(starts) => Tensor::new(starts, q.device())?,
        },
        entries: Entries::of(entries, window.current, &rows.positions)?,
        sink,
    };
    operands.check()?;
    let out = output(q.dims(), q.dtype(), q.device())?;
    operands.launch(&out)?;
    Ok(out)
}

/// All that the kernel reads.
struct Operands<'a> {
    q: &'a Tensor,
    rows: &'a DeviceRows,
    window: &'a WindowKeys<'a>,
    /// Of the entering rows.
    spans: &'a Tensor,
    kv_start: Tensor,
    entries: Entries,
    sink: &'a Tensor,
}

impl Operands<'_> {
    /// Refuses shapes and dtypes that do not go together.
    fn check(&self) -> Result<()> {
        let (op, act, window) = (OP, self.q.dtype(), self.window);
        let (n_rows, heads) = (self.q.dims2()?.0, self.sink.dims1()?);
        let (entering, dim) = window.current.dims2()?;
        let (ring, pool) = (window.ring.data(), &self.entries.pool);
        if dim > MAX_DIM {
            candle_core::bail!("{op}: expected heads of at most {MAX_DIM} channels, got {dim}");
        }
        expect(op, "q", self.q, act, &[n_rows, heads * dim])?;
        expect(op, "sink", self.sink, DType::F32, &[heads])?;
        let (positions, requests) = (&self.rows.positions, &self.rows.requests);
        expect(op, "positions", positions, DType::U32, &[n_rows])?;
        expect(op, "requests", requests, DType::U32, &[n_rows])?;
        let n_requests = self.spans.dim(0)?;
        expect(op, "spans", self.spans, DType::U32, &[n_requests, 4])?;
        expect(op, "kv_start", &self.kv_start, DType::U32, &[n_requests])?;
        expect(op, "current", window.current, act, &[entering, dim])?;
        expect(op, "ring", ring, act, &[ring.dim(0)?, dim])?;
        if self.entries.width > 0 {
            let (choice, pages) = (&self.entries.choice, &self.entries.pages);
            let width = self.entries.width;
            expect(op, "choice", choice, DType::U32, &[n_rows, width])?;
            expect(op, "pool", pool, act, &[pool.dim(0)?, dim])?;
            let max_pages = pages.dims2()?.1;
            expect(op, "pages", pages, DType::U32, &[n_requests, max_pages])?;
        }
        for (name, keys) in [("current", window.current), ("ring", ring), ("pool", pool)] {
            expect_fours(op, name, keys, dim)?;
        }
        Ok(())
    }

    fn launch(&self, out: &Tensor) -> Result<()> {
        let (window, entries) = (self.window, &self.entries);
        let read = [
            ("q", self.q),
            ("positions", &self.rows.positions),
            ("requests", &self.rows.requests),
            ("spans", self.spans),
            ("kv_start", &self.kv_start),
            ("current", window.current),
            ("ring", window.ring.data()),
            ("choice", &entries.choice),
            ("pool", &entries.pool),
            ("pages", &entries.pages),
            ("sink", self.sink),
        ];
        let tensors = tensors(OP, &read, &[("out", out)])?;
        let (n_rows, n_heads) = (self.q.dim(0)?, self.sink.dim(0)?);
        let (entering, n_dim) = window.current.dims2()?;
        let few = n_rows * n_heads.div_ceil(HEADS) < ENOUGH_BLOCKS;
        let fits_tensor_cores = self.q.dtype() == DType::BF16
            && n_dim == TENSOR_DIM
            && [self.q, window.current, window.ring.data(), &entries.pool]
                .iter()
                .all(|t| t.layout().start_offset().is_multiple_of(8))
            && 2 * n_heads >= TENSOR_HEADS
            && has_shared(self.q.device(), TENSOR_SHARED)?;
        let plain = |at_once: usize| (at_once + TILE) * n_dim * size_of::<f32>();
        let (kernel, at_once, shared_bytes) = match few {
            true => (
                ATTENTION_FEW.of(self.q.dtype())?,
                FEW_HEADS,
                plain(FEW_HEADS),
            ),
            false if fits_tensor_cores => (ATTENTION_TENSOR, TENSOR_HEADS, TENSOR_SHARED),
            false => (ATTENTION.of(self.q.dtype())?, HEADS, plain(HEADS)),
        };
        let grid = grid(n_rows * n_heads.div_ceil(at_once), THREADS, shared_bytes)?;
        let (heads, dim) = (count(n_heads)?, count(n_dim)?);
        let (n_requests, entering) = (count(self.spans.dim(0)?)?, count(entering)?);
        let (ring_rows, pool_rows) = (window.ring.data().dim(0)?, entries.pool.dim(0)?);
        let (ring_rows, pool_rows) = (count(ring_rows)?, count(pool_rows)?);
        let (capacity, per_page) = (count(window.ring.capacity())?, count(entries.per_page)?);
        let (width, max_pages) = (count(entries.width)?, count(entries.pages.dim(1)?)?);
        // SAFETY: a block for each row and `at_once` heads, with room for as many queries and a tile
        // of keys, or for what `attention_tensor` has there, which takes rows of its width only. Shapes were compared; the kernel compares every request, row, page and entry with
        // the counts, which are those of the tensors, and reads aligned fours of channels.
        unsafe {
            run(kernel, &tensors, grid, |a| AttentionArgs {
                q: a[0],
                positions: a[1],
                requests: a[2],
                spans: a[3],
                kv_start: a[4],
                current: a[5],
                ring: a[6],
                choice: a[7],
                pool: a[8],
                pages: a[9],
                sink: a[10],
                out: a[11],
                heads,
                dim,
                n_requests,
                entering,
                ring_rows,
                capacity,
                window: window.window.get(),
                width,
                pool_rows,
                per_page,
                max_pages,
                scale: 1.0 / (n_dim as f32).sqrt(),
            })
        }
    }
}
