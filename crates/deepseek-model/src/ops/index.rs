//! The indexer: which compressed entries a row attends to, in one or two levels.

use candle_core::{Device, Result, Tensor, bail};
use rayon::prelude::*;

use super::{
    Faults, cuda, f32s,
    gemm::{Mat, Threads, matmul_nt},
    topk::keep_best,
    u32s,
    view::Elements,
};
use crate::{
    cache::{PageLists, PagedRows},
    config::CandidateConfig,
    rows::{Rows, Span},
};

#[cfg(test)]
mod tests;

/// A list of numbers per row, ascending, padded with [`Choice::NONE`].
#[derive(Debug, Clone)]
pub(crate) struct Choice {
    /// `[rows, width]`, u32.
    pub(crate) entries: Tensor,
    /// Most numbers in a row.
    pub(crate) width: usize,
}

impl Choice {
    /// Fills the places after a row's last number.
    pub(crate) const NONE: u32 = u32::MAX;

    fn new(lists: Vec<u32>, rows: usize, width: usize) -> Result<Self> {
        Ok(Self {
            entries: Tensor::from_vec(lists, (rows, width), &Device::Cpu)?,
            width,
        })
    }
}

/// Index queries of a layer.
pub(crate) struct IndexQueries<'a> {
    /// `[rows, heads · dim]`, rotated and rounded.
    pub(crate) queries: &'a Tensor,
    /// `[rows, heads]`, before the constant scale.
    pub(crate) head_weights: &'a Tensor,
    /// The query rows.
    pub(crate) rows: &'a Rows,
    /// Entries to choose per row.
    pub(crate) topk: usize,
    /// Where a device reports scores that are not numbers.
    #[allow(
        dead_code,
        reason = "kernels read it, which a build without CUDA lacks"
    )]
    pub(crate) faults: Faults<'a>,
}

/// Index keys of the layer's KV source.
pub(crate) struct IndexKeys<'a> {
    /// All keys, `dim` wide.
    pub(crate) pool: &'a PagedRows,
    /// Pages of each request.
    pub(crate) pages: &'a PageLists<'a>,
    /// Tokens per entry.
    pub(crate) ratio: usize,
}

/// The layer's part in two-level selection.
#[derive(Clone, Copy)]
pub(crate) enum Level<'a> {
    /// Chooses among all visible entries.
    Single,
    /// Chooses among all visible entries, and keeps blocks for later layers.
    Source(CandidateConfig),
    /// Chooses inside the blocks kept before.
    Within(&'a Choice, usize),
}

/// What [`choose_entries`] found.
pub(crate) struct Chosen {
    /// The `topk` best visible entries of each row (all when there are no more).
    pub(crate) choice: Choice,
    /// Blocks kept per row ([`Level::Source`]).
    pub(crate) candidates: Option<Choice>,
    /// `[rows, most visible entries]` with `-inf` where an entry was not eligible, if asked for.
    pub(crate) scores: Option<Tensor>,
}

/// Query rows scored together: enough rows for a product that pays, few enough for the cache.
const TILE: usize = 16;

/// A tile of rows of one request, with its parts of the outputs.
struct Tile<'a> {
    request: usize,
    span: Span,
    rows: std::ops::Range<usize>,
    choice: &'a mut [u32],
    candidates: &'a mut [u32],
    scores: &'a mut [f32],
}

/// Shapes shared by all tiles.
struct Shape {
    heads: usize,
    dim: usize,
    scale: f32,
    choice_width: usize,
    candidate_width: usize,
    score_width: usize,
}

/// Chooses compressed entries for every query row:
/// `score(p, e) = Σ_head weight[p, head] · relu(query[p, head] · key[e]) / sqrt(heads · dim)`
/// over the entries whose group is complete at the row's position.
pub(crate) fn choose_entries(
    queries: &IndexQueries<'_>,
    keys: &IndexKeys<'_>,
    level: Level<'_>,
    want_scores: bool,
) -> Result<Chosen> {
    if queries.queries.device().is_cuda() {
        return cuda::choose_entries(queries, keys, level, want_scores);
    }
    let n = queries.rows.len();
    let (_, heads) = queries.head_weights.dims2()?;
    let dim = queries.queries.dim(1)? / heads;
    let most = queries.rows.most_entries(keys.ratio);
    let shape = Shape {
        heads,
        dim,
        scale: 1.0 / (heads as f32).sqrt() / (dim as f32).sqrt(),
        choice_width: most.min(queries.topk),
        candidate_width: match level {
            Level::Source(c) => most.div_ceil(c.block_size).min(c.top_blocks),
            _ => 0,
        },
        score_width: if want_scores { most } else { 0 },
    };
    let mut choice = vec![Choice::NONE; n * shape.choice_width];
    let mut candidates = vec![Choice::NONE; n * shape.candidate_width];
    let mut scores = vec![f32::NEG_INFINITY; n * shape.score_width];
    let data = Data {
        queries: &f32s(queries.queries)?,
        head_weights: &f32s(queries.head_weights)?,
        keys: &f32s(keys.pool.data())?,
        within: match level {
            Level::Within(within, block) => Some((u32s(&within.entries)?, within.width, block)),
            _ => None,
        },
    };
    let tiles = tiles(
        queries.rows,
        &shape,
        &mut choice,
        &mut candidates,
        &mut scores,
    );
    tiles
        .into_par_iter()
        .try_for_each_init(Scratch::default, |scratch, mut tile| {
            choose_tile(&mut tile, &data, keys, level, &shape, queries.topk, scratch)
        })?;
    Ok(Chosen {
        choice: Choice::new(choice, n, shape.choice_width)?,
        candidates: match level {
            Level::Source(_) => Some(Choice::new(candidates, n, shape.candidate_width)?),
            _ => None,
        },
        scores: want_scores
            .then(|| Tensor::from_vec(scores, (n, shape.score_width), &Device::Cpu))
            .transpose()?,
    })
}

/// The operands as slices.
struct Data<'a> {
    queries: &'a [f32],
    head_weights: &'a [f32],
    keys: &'a [f32],
    /// Blocks kept per row, their number per row, entries per block.
    within: Option<(Elements<'a, u32>, usize, usize)>,
}

/// Buffers of one task.
#[derive(Default)]
struct Scratch {
    products: Vec<f32>,
    scores: Vec<f32>,
    pairs: Vec<(f32, u32)>,
}

/// Cuts the outputs into tiles that stay inside one request.
fn tiles<'a>(
    rows: &Rows,
    shape: &Shape,
    mut choice: &'a mut [u32],
    mut candidates: &'a mut [u32],
    mut scores: &'a mut [f32],
) -> Vec<Tile<'a>> {
    let mut tiles = Vec::new();
    for (request, span) in rows.spans().iter().enumerate() {
        let mut start = span.rows().start;
        while start < span.rows().end {
            let end = (start + TILE).min(span.rows().end);
            let n = end - start;
            let (a, rest) = choice.split_at_mut(n * shape.choice_width);
            choice = rest;
            let (b, rest) = candidates.split_at_mut(n * shape.candidate_width);
            candidates = rest;
            let (c, rest) = scores.split_at_mut(n * shape.score_width);
            scores = rest;
            tiles.push(Tile {
                request,
                span: *span,
                rows: start..end,
                choice: a,
                candidates: b,
                scores: c,
            });
            start = end;
        }
    }
    tiles
}

fn choose_tile(
    tile: &mut Tile<'_>,
    data: &Data<'_>,
    keys: &IndexKeys<'_>,
    level: Level<'_>,
    shape: &Shape,
    topk: usize,
    scratch: &mut Scratch,
) -> Result<()> {
    let visible = |row: usize| (tile.span.first_pos + row - tile.span.first_row + 1) / keys.ratio;
    let most = visible(tile.rows.end - 1);
    let all_blocks = match level {
        Level::Source(c) => most.div_ceil(c.block_size) <= c.top_blocks,
        _ => true,
    };
    let scored = most > topk || !all_blocks || shape.score_width > 0;
    if scored {
        score_tile(tile, data, keys, shape, most, scratch);
    }
    for (i, row) in tile.rows.clone().enumerate() {
        let n = visible(row);
        let scores = if scored {
            &scratch.scores[i * most..i * most + n]
        } else {
            &[]
        };
        let pairs = &mut scratch.pairs;
        if let Level::Source(config) = level {
            let out = &mut tile.candidates[i * shape.candidate_width..][..shape.candidate_width];
            keep_blocks(out, scores, n, config, pairs);
        }
        eligible(pairs, scores, n, row, data);
        if pairs.iter().any(|(score, _)| score.is_nan()) {
            bail!("the index scores of a row are not numbers");
        }
        if shape.score_width > 0 {
            for &(score, entry) in pairs.iter() {
                tile.scores[i * shape.score_width + entry as usize] = score;
            }
        }
        keep_best(pairs, topk);
        write_ascending(
            &mut tile.choice[i * shape.choice_width..][..shape.choice_width],
            pairs,
        );
    }
    Ok(())
}

/// `scratch.scores[row][entry]` for all entries below `most`.
fn score_tile(
    tile: &Tile<'_>,
    data: &Data<'_>,
    keys: &IndexKeys<'_>,
    shape: &Shape,
    most: usize,
    scratch: &mut Scratch,
) {
    let (heads, dim, rows) = (shape.heads, shape.dim, tile.rows.len());
    let queries = &data.queries[tile.rows.start * heads * dim..tile.rows.end * heads * dim];
    let per_page = keys.pool.per_page();
    scratch.scores.clear();
    scratch.scores.resize(rows * most, 0.0);
    // A page may be far longer than the text: it covers whole groups of every ratio.
    scratch
        .products
        .resize(rows * heads * per_page.min(most), 0.0);
    for first in (0..most).step_by(per_page) {
        let n = per_page.min(most - first);
        let at = keys.pool.row(keys.pages.of(tile.request), first) * dim;
        let page = Mat::dense(&data.keys[at..at + n * dim], n, dim);
        matmul_nt(
            &mut scratch.products,
            n,
            Mat::dense(queries, rows * heads, dim),
            page,
            Threads::One,
        );
        for row in 0..rows {
            let out = &mut scratch.scores[row * most + first..][..n];
            let weights = &data.head_weights[(tile.rows.start + row) * heads..][..heads];
            for (head, weight) in weights.iter().enumerate() {
                let products = &scratch.products[(row * heads + head) * n..][..n];
                let weight = weight * shape.scale;
                for (out, x) in out.iter_mut().zip(products) {
                    // `max` would turn a NaN into 0 and hide it.
                    *out += weight * if *x <= 0.0 { 0.0 } else { *x };
                }
            }
        }
    }
}

/// Keeps the best blocks of a row: by their best visible score, the newest block always.
fn keep_blocks(
    out: &mut [u32],
    scores: &[f32],
    visible: usize,
    config: CandidateConfig,
    pairs: &mut Vec<(f32, u32)>,
) {
    let blocks = visible.div_ceil(config.block_size);
    pairs.clear();
    if blocks <= config.top_blocks {
        pairs.extend((0..blocks as u32).map(|b| (0.0, b)));
    } else {
        pairs.extend(
            scores
                .chunks(config.block_size)
                .zip(0u32..)
                .map(|(block, b)| {
                    let newest = b as usize + 1 == blocks;
                    let best = block.iter().fold(f32::NEG_INFINITY, |a, s| a.max(*s));
                    (if newest { f32::INFINITY } else { best }, b)
                }),
        );
        keep_best(pairs, config.top_blocks);
    }
    write_ascending(out, pairs);
}

/// The entries a row may choose from, with their scores (0 when nothing had to be scored).
fn eligible(
    pairs: &mut Vec<(f32, u32)>,
    scores: &[f32],
    visible: usize,
    row: usize,
    data: &Data<'_>,
) {
    pairs.clear();
    let score = |e: usize| scores.get(e).copied().unwrap_or(0.0);
    match &data.within {
        None => pairs.extend((0..visible).map(|e| (score(e), e as u32))),
        Some((blocks, width, size)) => {
            let blocks = blocks[row * width..(row + 1) * width]
                .iter()
                .take_while(|b| **b != Choice::NONE);
            for &block in blocks {
                let first = block as usize * size;
                pairs.extend((first..(first + size).min(visible)).map(|e| (score(e), e as u32)));
            }
        }
    }
}

fn write_ascending(out: &mut [u32], pairs: &mut [(f32, u32)]) {
    pairs.sort_unstable_by_key(|pair| pair.1);
    for (out, (_, entry)) in out.iter_mut().zip(pairs) {
        *out = *entry;
    }
}
