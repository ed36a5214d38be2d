//! The indexer's choice.
#![allow(unsafe_code)]

use candle_core::{DType, Result, Tensor};
use replay_cuda::kernel::{Grid, Kernel};

use super::launch::{
    ByAct, by_act, count, expect, expect_fours, grid, has_shared, kernel, kernel_args, output, run,
    tensors,
};
use crate::{
    ops::index::{Chosen, IndexKeys, IndexQueries, Level},
    rows::DeviceRows,
};

mod sizes;

pub(super) use sizes::{Outputs, Sizes};

const OP: &str = "choose-entries";

const SCORES: ByAct = by_act!("index", INDEX, "index_scores");
const CHOOSE: Kernel = kernel!("index_choose", INDEX_CHOOSE, "index_choose");

/// On tensor cores, for bf16 rows that choose from all they see, or from blocks that were kept before.
const SCORES_TENSOR: Kernel = kernel!("index_tensor", INDEX_TENSOR, "index_scores_tensor");
const SCORES_KEPT: Kernel = kernel!("index_kept", INDEX_KEPT, "index_scores_kept");

/// What they are made for: heads, channels, rows of a block and slots that it scores at most. The second has a
/// warp for each row, and takes no shared memory; the first takes so much.
const TENSOR_HEADS: usize = 32;
const TENSOR_DIM: usize = 128;
const TENSOR_ROWS: usize = 4;
const TENSOR_SLOTS: usize = 1024;
const TENSOR_KEYS: usize = 128;
const TENSOR_SHARED: usize =
    (TENSOR_ROWS * TENSOR_HEADS + 2 * TENSOR_KEYS) * TENSOR_DIM * 2 + 2 * TENSOR_KEYS;

/// Slots that a block of the second scores at least, two steps of a warp, and blocks that make it score fewer
/// than the most: several of a multiprocessor, since a warp waits for the keys of one step after the other.
const KEPT_SLOTS: usize = 128;
const ENOUGH_KEPT: usize = 4 * ENOUGH_BLOCKS;

/// What the other kernels are made for: threads of a block of either, and heads and slots that one
/// multiplies at a time.
const THREADS: u32 = 256;
const CHOOSERS: u32 = 1024;
const PASS_HEADS: usize = 16;
const PASS_SLOTS: usize = 32;

/// Slots of a block where there are rows enough, so that its queries serve many; and the blocks that few
/// rows are shared out to, which keep a large device busy.
const SLOTS: usize = 256;
const ENOUGH_BLOCKS: usize = 264;

kernel_args! {
    struct IndexArgs {
        queries: u64, head_weights: u64, positions: u64, requests: u64, keys: u64, pages: u64,
        within: u64, work: u64, best: u64, scores: u64, choice: u64, candidates: u64, fault: u64,
        first_row: u32, tiles: u32, slots: u32, blocks: u32, most: u32, ratio: u32, topk: u32,
        top_blocks: u32, kept: u32, block_size: u32, heads: u32, dim: u32, n_requests: u32,
        max_pages: u32, per_page: u32, pool_rows: u32, code: u32, chunk_rows: u32, scale: f32,
        held: u32,
    }
}

/// As [`crate::ops::choose_entries`], but for the widths: those are `topk` and `top_blocks` whatever
/// the rows see.
pub(in crate::ops) fn choose_entries(
    queries: &IndexQueries<'_>,
    keys: &IndexKeys<'_>,
    level: Level<'_>,
    want_scores: bool,
) -> Result<Chosen> {
    let most = queries.rows.most_entries(keys.ratio);
    let sizes = Sizes::of(queries, keys, level, most)?;
    let outputs = Outputs::new(&sizes, queries.queries.device(), want_scores)?;
    if sizes.rows > 0 {
        choose(
            queries,
            queries.rows.on_device()?,
            keys,
            level,
            &sizes,
            &outputs,
        )?;
    }
    Ok(outputs.into())
}

/// Chooses for rows that are on the device; pad rows, whose request is none, choose nothing.
pub(super) fn choose(
    queries: &IndexQueries<'_>,
    rows: &DeviceRows,
    keys: &IndexKeys<'_>,
    level: Level<'_>,
    sizes: &Sizes,
    outputs: &Outputs,
) -> Result<()> {
    let device = queries.queries.device();
    // Tensors without elements, to which the kernels get no address.
    let (no_list, chunk) = (rows.positions.narrow(0, 0, 0)?, sizes.chunk);
    let no_table = no_list.reshape((0, 1))?;
    let work = output(&[chunk, sizes.slots.max(1)], DType::F32, device)?;
    let best = output(&[chunk, sizes.blocks.max(1)], DType::U32, device)?;
    let scores = outputs.scores.clone();
    let scores = scores.unwrap_or(work.narrow(0, 0, 0)?);
    let (fault, code) = queries.faults.target()?;
    let operands = Operands {
        queries,
        rows,
        keys,
        pages: if sizes.most > 0 {
            keys.pages.on_device(device)?
        } else {
            &no_table
        },
        within: match level {
            Level::Within(kept, _) => &kept.entries,
            _ => &no_table,
        },
        work: &work,
        best: &best,
        scores: &scores,
        choice: &outputs.choice,
        candidates: outputs.candidates.as_ref().unwrap_or(&no_list),
        fault,
        code,
    };
    operands.check(sizes)?;
    (0..sizes.rows)
        .step_by(chunk)
        .try_for_each(|first| operands.launch(sizes, first..sizes.rows.min(first + chunk)))
}

/// All that the kernels read and write.
struct Operands<'a> {
    queries: &'a IndexQueries<'a>,
    rows: &'a DeviceRows,
    keys: &'a IndexKeys<'a>,
    pages: &'a Tensor,
    within: &'a Tensor,
    work: &'a Tensor,
    best: &'a Tensor,
    scores: &'a Tensor,
    choice: &'a Tensor,
    candidates: &'a Tensor,
    fault: &'a Tensor,
    code: u32,
}

impl Operands<'_> {
    /// Refuses shapes and dtypes that do not go together.
    fn check(&self, sizes: &Sizes) -> Result<()> {
        let (rows, heads, dim) = (sizes.rows, sizes.heads, sizes.dim);
        let (q, pool) = (self.queries.queries, self.keys.pool.data());
        let (act, weights) = (q.dtype(), self.queries.head_weights);
        expect(OP, "queries", q, act, &[rows, heads * dim])?;
        expect(OP, "head_weights", weights, act, &[rows, heads])?;
        expect(OP, "keys", pool, act, &[pool.dim(0)?, dim])?;
        expect_fours(OP, "keys", pool, dim)?;
        let (positions, requests) = (&self.rows.positions, &self.rows.requests);
        expect(OP, "positions", positions, DType::U32, &[rows])?;
        expect(OP, "requests", requests, DType::U32, &[rows])?;
        expect(OP, "pages", self.pages, DType::U32, self.pages.dims())?;
        if sizes.kept > 0 {
            expect(OP, "within", self.within, DType::U32, &[rows, sizes.kept])?;
        }
        expect(OP, "fault", self.fault, DType::U32, &[1])
    }

    /// Scores the entries of some rows, and chooses among them.
    fn launch(&self, sizes: &Sizes, rows: std::ops::Range<usize>) -> Result<()> {
        let read = [
            ("queries", self.queries.queries),
            ("head_weights", self.queries.head_weights),
            ("positions", &self.rows.positions),
            ("requests", &self.rows.requests),
            ("keys", self.keys.pool.data()),
            ("pages", self.pages),
            ("within", self.within),
        ];
        let written = [
            ("work", self.work),
            ("best", self.best),
            ("scores", self.scores),
            ("choice", self.choice),
            ("candidates", self.candidates),
            ("fault", self.fault),
        ];
        let tensors = tensors(OP, &read, &written)?;
        let (kernel, tiles, score) = self.scoring(sizes, rows.len())?;
        let args = self.args(sizes, &rows, tiles)?;
        let choose = grid(rows.len(), CHOOSERS, sizes.held * size_of::<u32>())?;
        // SAFETY: a block for each row of the chunk, or for so many of its slots, with room for the
        // row's heads, or the same for TENSOR_ROWS rows whose heads and channels are those that the
        // kernel is made for, and aligned as it reads them; `work` and `best` have a row for each row
        // of a chunk, and a block that chooses room for `held` numbers. Shapes were compared; the
        // kernels compare every request, entry, block and page with the counts, which are those of the
        // tensors, and read aligned fours of channels.
        unsafe {
            run(kernel, &tensors, score, &args)?;
            run(CHOOSE, &tensors, choose, &args)
        }
    }

    /// The kernel that scores `n_rows` rows, the blocks that it has for each of them or for
    /// `TENSOR_ROWS`, and the grid of both.
    fn scoring(&self, sizes: &Sizes, n_rows: usize) -> Result<(Kernel, usize, Grid)> {
        if self.fits_tensor_cores(sizes)? {
            let tiles = sizes.slots.div_ceil(TENSOR_SLOTS);
            let row_blocks = n_rows.div_ceil(TENSOR_ROWS);
            if sizes.kept == 0 {
                let grid = grid(row_blocks * tiles, THREADS, TENSOR_SHARED)?;
                return Ok((SCORES_TENSOR, tiles, grid));
            }
            let wanted = ENOUGH_KEPT / row_blocks.max(1);
            let tiles = tiles.max(wanted.min(sizes.slots.div_ceil(KEPT_SLOTS)));
            let threads = 32 * TENSOR_ROWS as u32;
            return Ok((SCORES_KEPT, tiles, grid(row_blocks * tiles, threads, 0)?));
        }
        let most = sizes.slots.div_ceil(PASS_SLOTS);
        let wanted = (ENOUGH_BLOCKS / n_rows.max(1)).min(most);
        let tiles = sizes.slots.div_ceil(SLOTS).max(wanted);
        let heads = sizes.heads.next_multiple_of(PASS_HEADS);
        let shared = heads * (sizes.dim + 1) * size_of::<f32>();
        let kernel = SCORES.of(self.queries.queries.dtype())?;
        Ok((kernel, tiles, grid(n_rows * tiles, THREADS, shared)?))
    }

    /// Whether the kernels for tensor cores take the rows. Few of them are too little work for those.
    fn fits_tensor_cores(&self, sizes: &Sizes) -> Result<bool> {
        let aligned = |tensor: &Tensor| tensor.layout().start_offset().is_multiple_of(8);
        let (queries, keys) = (self.queries.queries, self.keys.pool.data());
        Ok(queries.dtype() == DType::BF16
            && (sizes.heads, sizes.dim) == (TENSOR_HEADS, TENSOR_DIM)
            && sizes.rows >= 4 * TENSOR_ROWS
            && aligned(queries)
            && aligned(keys)
            && (sizes.kept > 0 || has_shared(queries.device(), TENSOR_SHARED)?))
    }

    /// The argument of both kernels, from the addresses.
    fn args(
        &self,
        sizes: &Sizes,
        rows: &std::ops::Range<usize>,
        tiles: usize,
    ) -> Result<impl Fn(&[u64]) -> IndexArgs> {
        let constants = IndexArgs {
            queries: 0,
            head_weights: 0,
            positions: 0,
            requests: 0,
            keys: 0,
            pages: 0,
            within: 0,
            work: 0,
            best: 0,
            scores: 0,
            choice: 0,
            candidates: 0,
            fault: 0,
            first_row: count(rows.start)?,
            tiles: count(tiles)?,
            slots: count(sizes.slots)?,
            blocks: count(sizes.blocks)?,
            most: count(sizes.most)?,
            ratio: count(self.keys.ratio)?,
            topk: count(sizes.topk)?,
            top_blocks: count(sizes.top_blocks)?,
            kept: count(sizes.kept)?,
            block_size: count(sizes.block_size)?,
            heads: count(sizes.heads)?,
            dim: count(sizes.dim)?,
            n_requests: count(self.pages.dim(0)?)?,
            max_pages: count(self.pages.dim(1)?)?,
            per_page: count(self.keys.pool.per_page())?,
            pool_rows: count(self.keys.pool.data().dim(0)?)?,
            code: self.code,
            chunk_rows: count(rows.len())?,
            held: count(sizes.held)?,
            scale: 1.0 / (sizes.heads as f32).sqrt() / (sizes.dim as f32).sqrt(),
        };
        Ok(move |a: &[u64]| IndexArgs {
            queries: a[0],
            head_weights: a[1],
            positions: a[2],
            requests: a[3],
            keys: a[4],
            pages: a[5],
            within: a[6],
            work: a[7],
            best: a[8],
            scores: a[9],
            choice: a[10],
            candidates: a[11],
            fault: a[12],
            ..constants
        })
    }
}
