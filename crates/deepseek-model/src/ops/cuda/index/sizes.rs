//! How many there are of everything when entries are chosen, and what is written.

use candle_core::{DType, Device, Error, Result, Tensor};
use replay_cuda::kernel::shared_limit;

use super::{super::launch::output, OP};
use crate::{
    memory::workspace::INDEX_SCORES,
    ops::index::{Choice, Chosen, IndexKeys, IndexQueries, Level},
};

/// Scores that are held at a time: 128 MiB of them. Rows beyond that are taken later.
const WORK_SCORES: usize = INDEX_SCORES;

/// Shared memory that `index_choose` has for other things, rounded up, and rows that do not fill a
/// large device.
const CHOOSE_STATIC: usize = 2048;
const FEW_ROWS: usize = 128;

/// How many there are of everything.
pub(in super::super) struct Sizes {
    pub(super) rows: usize,
    pub(super) heads: usize,
    pub(super) dim: usize,
    /// Entries that any row sees.
    pub(super) most: usize,
    /// Entries that any row chooses from, with the vacant ones of the blocks kept before.
    pub(super) slots: usize,
    /// Blocks kept before; 0: a row chooses from all it sees.
    pub(super) kept: usize,
    pub(super) topk: usize,
    /// Blocks to keep; 0: none are.
    pub(super) top_blocks: usize,
    /// Blocks of visible entries, if some are to be kept.
    pub(super) blocks: usize,
    pub(super) block_size: usize,
    /// Rows whose scores are held at a time.
    pub(in super::super) chunk: usize,
    /// Numbers of slots and blocks that a block of `index_choose` has room for in shared memory.
    pub(in super::super) held: usize,
}

impl Sizes {
    pub(in super::super) fn of(
        queries: &IndexQueries<'_>,
        keys: &IndexKeys<'_>,
        level: Level<'_>,
        most: usize,
    ) -> Result<Self> {
        let (rows, heads) = queries.head_weights.dims2()?;
        let (kept, top_blocks, block_size) = match level {
            Level::Single => (0, 0, 1),
            Level::Source(c) => (0, c.top_blocks, c.block_size),
            Level::Within(kept, block_size) => (kept.width, 0, block_size),
        };
        let slots = match level {
            Level::Within(..) => most
                .next_multiple_of(block_size)
                .min(kept.saturating_mul(block_size)),
            _ => most,
        };
        let blocks = if top_blocks > 0 {
            most.div_ceil(block_size)
        } else {
            0
        };
        let chunk = (WORK_SCORES / slots.max(1)).clamp(1, rows.max(1));
        let sizes = Self {
            rows,
            heads,
            dim: keys.pool.data().dim(1)?,
            most,
            slots,
            kept,
            topk: queries.topk,
            top_blocks,
            blocks,
            block_size,
            chunk,
            held: held(queries.queries.device(), slots + blocks, chunk)?,
        };
        let none = match level {
            Level::Single => false,
            Level::Source(_) => top_blocks == 0,
            Level::Within(..) => kept == 0,
        };
        if none || sizes.topk == 0 || heads == 0 {
            candle_core::bail!("{OP}: expected heads, and entries and blocks to choose, got none");
        }
        Ok(sizes)
    }
}

/// So many of `needed` numbers as shared memory holds. Where it does not hold them all, a step of few
/// rows gets all that there is, for those of its rows that see less than the widest; with many rows,
/// more blocks on a multiprocessor are better than a few rows that fit.
fn held(device: &Device, needed: usize, rows: usize) -> Result<usize> {
    let limit = shared_limit(device).map_err(Error::wrap)?;
    let room = limit.saturating_sub(CHOOSE_STATIC) / size_of::<u32>();
    Ok(match needed <= room {
        true => needed,
        false if rows <= FEW_ROWS => room,
        false => 0,
    })
}

/// What the kernels write, all of `[rows, ...]`.
pub(in super::super) struct Outputs {
    pub(super) choice: Tensor,
    pub(super) candidates: Option<Tensor>,
    pub(super) scores: Option<Tensor>,
}

impl Outputs {
    pub(in super::super) fn new(sizes: &Sizes, device: &Device, want_scores: bool) -> Result<Self> {
        let list = |width| output(&[sizes.rows, width], DType::U32, device);
        let n = sizes.rows * sizes.most;
        let scores = || {
            // A device has no memory of 0 bytes.
            let scores = Tensor::full(f32::NEG_INFINITY, n.max(1), device)?;
            scores.narrow(0, 0, n)?.reshape((sizes.rows, sizes.most))
        };
        Ok(Self {
            choice: list(sizes.topk)?,
            candidates: (sizes.top_blocks > 0)
                .then(|| list(sizes.top_blocks))
                .transpose()?,
            scores: want_scores.then(scores).transpose()?,
        })
    }
}

impl From<Outputs> for Chosen {
    fn from(outputs: Outputs) -> Self {
        let choice = |entries: Tensor| Choice {
            width: entries.dims()[1],
            entries,
        };
        Self {
            choice: choice(outputs.choice),
            candidates: outputs.candidates.map(choice),
            scores: outputs.scores,
        }
    }
}
