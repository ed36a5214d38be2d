//! Attention over the window and the chosen entries.
#![allow(unsafe_code)]

use candle_core::{DType, Result, Tensor};
use replay_cuda::{Arguments, kernel::Kernel};

use super::launch::{
    ByAct, by_act, count, expect, expect_fours, grid, has_shared, kernel, kernel_args, output, run,
    tensors,
};
use crate::{
    memory::workspace::{ATTENTION_BLOCKS, ATTENTION_DIM, ATTENTION_HEADS},
    ops::attention::{EntryKeys, KvStart, WindowKeys},
    rows::{DeviceRows, Rows},
};

const OP: &str = "attention";

const ATTENTION: ByAct = by_act!("attention", ATTENTION, "attention");
const ATTENTION_FEW: ByAct = by_act!("attention", ATTENTION, "attention_few");

/// On tensor cores: for many rows, and for few, whose keys are split over blocks and joined.
const ATTENTION_TENSOR: Kernel = kernel!("attention_tensor", ATTENTION_TENSOR, "attention_tensor");
const ATTENTION_SPLIT: Kernel = kernel!("attention_split", ATTENTION_SPLIT, "attention_split");
const ATTENTION_JOIN: Kernel = kernel!("attention_split", ATTENTION_SPLIT, "attention_join");

/// What they are made for: bf16, as many channels, heads of a block of either, keys of a tile; threads
/// of a block that joins.
const TENSOR_DIM: usize = ATTENTION_DIM;
const TENSOR_HEADS: usize = 64;
const SPLIT_HEADS: usize = ATTENTION_HEADS;
const TENSOR_KEYS: usize = 64;
const JOINERS: u32 = 128;

/// The shared memory that they take with so many heads of a block.
const fn tensor_shared(heads: usize) -> usize {
    (heads + 2 * TENSOR_KEYS) * TENSOR_DIM * 2
        + heads * (TENSOR_KEYS + 16) * 4
        + heads * (TENSOR_KEYS + 8) * 2
        + heads * 4
        + 2 * TENSOR_KEYS
}

/// What the other kernels are made for: threads of a block, the widest head, keys of a tile, and heads of a
/// block of either kernel.
const THREADS: u32 = 256;
const MAX_DIM: usize = 512;
const TILE: usize = 32;
const HEADS: usize = 16;
const FEW_HEADS: usize = 4;

/// Blocks that keep a large device busy: two on each multiprocessor of an H200, or one of those that
/// take most of its shared memory.
const ENOUGH_BLOCKS: usize = ATTENTION_BLOCKS;
const ENOUGH_SPLITS: usize = ENOUGH_BLOCKS / 2;

kernel_args! {
    struct AttentionArgs {
        q: u64, positions: u64, requests: u64, spans: u64, kv_start: u64, current: u64, ring: u64,
        choice: u64, pool: u64, pages: u64, sink: u64, out: u64, sums: u64, totals: u64,
        heads: u32, dim: u32, n_requests: u32, entering: u32, ring_rows: u32, capacity: u32,
        window: u32, width: u32, pool_rows: u32, per_page: u32, max_pages: u32, splits: u32,
        split_keys: u32, scale: f32,
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
        let (n_rows, n_heads) = (self.q.dim(0)?, self.sink.dim(0)?);
        let few = n_rows * n_heads.div_ceil(HEADS) < ENOUGH_BLOCKS;
        if few && self.fits_tensor_cores(SPLIT_HEADS)? {
            return self.launch_split(out);
        }
        let dim = self.window.current.dim(1)?;
        let plain = |at_once: usize| (at_once + TILE) * dim * size_of::<f32>();
        let (kernel, at_once, shared_bytes) = if few {
            let kernel = ATTENTION_FEW.of(self.q.dtype())?;
            (kernel, FEW_HEADS, plain(FEW_HEADS))
        } else if self.fits_tensor_cores(TENSOR_HEADS)? {
            (ATTENTION_TENSOR, TENSOR_HEADS, tensor_shared(TENSOR_HEADS))
        } else {
            (ATTENTION.of(self.q.dtype())?, HEADS, plain(HEADS))
        };
        let grid = grid(n_rows * n_heads.div_ceil(at_once), THREADS, shared_bytes)?;
        let nothing = self.rows.positions.narrow(0, 0, 0)?;
        let tensors = self.tensors([out, &nothing, &nothing])?;
        let args = self.args(Split { n: 0, keys: 0 })?;
        // SAFETY: a block for each row and `at_once` heads, with room for as many queries and a tile
        // of keys, or for what `attention_tensor` has there, which takes rows of its width only,
        // aligned as it reads them. Shapes were compared; the kernel compares every request, row, page
        // and entry with the counts, which are those of the tensors, and reads aligned fours of
        // channels.
        unsafe { run(kernel, &tensors, grid, args) }
    }

    /// With keys split over blocks: a kernel for the splits, one that joins them.
    fn launch_split(&self, out: &Tensor) -> Result<()> {
        let (n_rows, n_heads) = (self.q.dim(0)?, self.sink.dim(0)?);
        let groups = n_heads.div_ceil(SPLIT_HEADS);
        let most_keys = self.window.window.get() as usize + self.entries.width;
        let split = Split::of(n_rows, groups, most_keys);
        let parts = n_rows * split.n * n_heads;
        let sums = output(&[parts, TENSOR_DIM], DType::F32, self.q.device())?;
        let totals = output(&[parts, 2], DType::F32, self.q.device())?;
        let tensors = self.tensors([out, &sums, &totals])?;
        let shared = tensor_shared(SPLIT_HEADS);
        let add = grid(n_rows * groups * split.n, THREADS, shared)?;
        let join = grid(n_rows * n_heads, JOINERS, 0)?;
        let args = self.args(split)?;
        // SAFETY: as in `launch`; a block for each row, SPLIT_HEADS heads and split, with room for
        // what it holds there, and one for each row and head. Sums and totals have a place for each
        // row, split and head, and what is used of them was written: the second kernel skips the
        // splits whose totals say that they have no sums, and the rows for which there are neither.
        unsafe {
            run(ATTENTION_SPLIT, &tensors, add, &args)?;
            run(ATTENTION_JOIN, &tensors, join, &args)
        }
    }

    /// Whether the kernel for tensor cores that takes `at_once` heads in a block takes these.
    fn fits_tensor_cores(&self, at_once: usize) -> Result<bool> {
        let read = [
            self.q,
            self.window.current,
            self.window.ring.data(),
            &self.entries.pool,
        ];
        Ok(self.q.dtype() == DType::BF16
            && self.window.current.dim(1)? == TENSOR_DIM
            && read
                .iter()
                .all(|t| t.layout().start_offset().is_multiple_of(8))
            && 2 * self.sink.dim(0)? >= at_once
            && has_shared(self.q.device(), tensor_shared(at_once))?)
    }

    /// What the kernels read and write, in the order of their argument.
    fn tensors<'a>(&'a self, [out, sums, totals]: [&'a Tensor; 3]) -> Result<Arguments<'a>> {
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
        let written = [("out", out), ("sums", sums), ("totals", totals)];
        tensors(OP, &read, &written)
    }

    /// The argument of the kernels, from the addresses.
    fn args(&self, split: Split) -> Result<impl Fn(&[u64]) -> AttentionArgs> {
        let (window, entries) = (self.window, &self.entries);
        let (entering, dim) = window.current.dims2()?;
        let constants = AttentionArgs {
            q: 0,
            positions: 0,
            requests: 0,
            spans: 0,
            kv_start: 0,
            current: 0,
            ring: 0,
            choice: 0,
            pool: 0,
            pages: 0,
            sink: 0,
            out: 0,
            sums: 0,
            totals: 0,
            heads: count(self.sink.dim(0)?)?,
            dim: count(dim)?,
            n_requests: count(self.spans.dim(0)?)?,
            entering: count(entering)?,
            ring_rows: count(window.ring.data().dim(0)?)?,
            capacity: count(window.ring.capacity())?,
            window: window.window.get(),
            width: count(entries.width)?,
            pool_rows: count(entries.pool.dim(0)?)?,
            per_page: count(entries.per_page)?,
            max_pages: count(entries.pages.dim(1)?)?,
            splits: count(split.n)?,
            split_keys: count(split.keys)?,
            scale: 1.0 / (dim as f32).sqrt(),
        };
        Ok(move |a: &[u64]| AttentionArgs {
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
            sums: a[12],
            totals: a[13],
            ..constants
        })
    }
}

/// How the keys of each row are split over blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Split {
    /// Splits of a row.
    pub(super) n: usize,
    /// Keys of each but the last one, whole tiles.
    pub(super) keys: usize,
}

impl Split {
    /// Splits for rows of at most `most_keys` keys, whose heads fill `groups` blocks. All sizes up to a
    /// power of two are split alike, so that a graph of such a size gives the bits of an eager step.
    pub(super) fn of(n_rows: usize, groups: usize, most_keys: usize) -> Self {
        let tiles = most_keys.div_ceil(TENSOR_KEYS).max(1);
        let blocks = n_rows.next_power_of_two() * groups;
        let n = (ENOUGH_SPLITS / blocks).clamp(1, tiles);
        let of_split = tiles.div_ceil(n);
        Self {
            n: tiles.div_ceil(of_split),
            keys: of_split * TENSOR_KEYS,
        }
    }
}
