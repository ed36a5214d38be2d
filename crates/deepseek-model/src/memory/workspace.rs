//! What the tensors of a step take on a GPU, estimated from above.

use candle_core::DType;

use super::widths::Widths;
use crate::Config;

/// A step, as far as its tensors depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSize {
    /// Rows of all requests.
    pub rows: usize,
    /// Rows whose logits are read.
    pub logit_rows: usize,
    /// Tokens that any row sees at most.
    pub tokens: usize,
}

/// Index scores that are held at a time, 128 MiB of them; more rows take turns.
pub(crate) const INDEX_SCORES: usize = 32 << 20;

/// Blocks that attention over few rows takes at most. In bf16, with as many channels, each of them
/// leaves sums of so many heads and two numbers more.
pub(crate) const ATTENTION_BLOCKS: usize = 264;
pub(crate) const ATTENTION_DIM: usize = 512;
pub(crate) const ATTENTION_HEADS: usize = 16;

/// What libraries take for themselves: cuBLAS by its documentation 32 MiB on the GPUs that take most,
/// and as much again for the code of kernels, which is loaded when it is first needed.
pub(super) const LIBRARIES: u64 = 64 << 20;

/// Bytes of a step's tensors on a GPU, with activations held as `dtype`.
///
/// This is an upper estimate: of a layer's parts, of which one runs after the other, the largest
/// counts, and of that part every tensor, as if none were dropped before its end. Beside it count the
/// residual streams, as they are handed from part to part and gathered at the cut, the chosen
/// entries, the index scores, what attention adds up in parts, and the logits. Sizes that no memory holds saturate.
pub(crate) fn workspace_bytes(config: &Config, dtype: DType, step: StepSize) -> u64 {
    let act = dtype.size_in_bytes() as u64;
    let w = Widths::of(config);
    let row = Row { config, w, act };
    let parts = [row.attention(), row.experts(), row.engram()];
    let largest = parts.into_iter().max().unwrap_or(0);
    let of_rows = (row.always() + largest).saturating_mul(step.rows as u64);
    let of_logits = row.logits().saturating_mul(step.logit_rows as u64);
    let of_index = index_bytes(config, step);
    let of_splits = match dtype {
        DType::BF16 if config.head_dim == ATTENTION_DIM => {
            (ATTENTION_BLOCKS * ATTENTION_HEADS * (ATTENTION_DIM + 2)) as u64 * F32
        }
        _ => 0,
    };
    [of_rows, of_logits, of_index, of_splits]
        .into_iter()
        .fold(0, u64::saturating_add)
}

const F32: u64 = 4;
const U32: u64 = 4;

/// Bytes of one row.
struct Row<'a> {
    config: &'a Config,
    w: Widths,
    /// Of a value of an activation.
    act: u64,
}

impl Row<'_> {
    /// What lives through a layer, and its handing over to the next.
    fn always(&self) -> u64 {
        let (config, w, act) = (self.config, &self.w, self.act);
        let n = config.hc_mult as u64;
        // As they enter, after attention, after the experts, and gathered at the cut; and in f32
        // where the mixing reads them.
        let streams = w.streams * (4 * act + F32);
        let mixing = 2 * (2 * n + n * n) * F32;
        // The input of either part and its result, and window KV as it is made.
        let inputs = 4 * w.hidden * act + 3 * w.head * act;
        let chosen = 2 * (w.chosen + w.blocks) * U32;
        // Held as activations, and one table at a time uploaded in f32.
        let uploaded = config.engram.as_ref().map_or(0, |engram| {
            engram.columns() as u64 * engram.head_dim as u64 * F32
        });
        let tables = w.engram * act + uploaded;
        let angles = 2 * config.rope_dim as u64 * F32;
        // Token, position, request, and where rows go, of every ring and source.
        let lists = (8 + 6 * config.layers.len() as u64) * U32;
        streams + mixing + inputs + chosen + tables + angles + lists
    }

    fn attention(&self) -> u64 {
        let (config, w, act) = (self.config, &self.w, self.act);
        let [index_heads, index_dim] = [config.index_heads, config.index_dim].map(|x| x as u64);
        let grouped = config.o_groups as u64 * config.o_lora_rank as u64;
        // Projected and rotated, attended and rotated back, by groups.
        let queries = 2 * w.latent * act + 5 * w.queries * act;
        let index = (2 * index_heads * index_dim + index_heads) * act;
        let output = 3 * grouped * act + w.hidden * act;
        // The input in f32; keys, gates and their pools; entries and index keys of each row.
        let compressor = w.hidden * F32 + 4 * w.head * F32 + 3 * w.head * act + 3 * index_dim * act;
        queries + index + output + compressor
    }

    fn experts(&self) -> u64 {
        let (w, act, k) = (&self.w, self.act, self.w.choices);
        let router = w.hidden * F32 + self.config.num_experts as u64 * F32 + 2 * k * U32;
        let shared = (3 * w.expert + w.hidden) * act;
        // Lists of the sort, tiles included, and of each choice hidden values, product and result.
        let routed = k * (5 * U32 + (3 * w.expert + w.hidden) * act);
        router + shared + routed + w.hidden * act
    }

    fn engram(&self) -> u64 {
        match self.config.engram {
            Some(_) => (self.w.streams + self.w.hidden) * self.act,
            None => 0,
        }
    }

    /// The final norm in either dtype, and logits; those of a graph are copied out of it.
    fn logits(&self) -> u64 {
        self.w.hidden * (self.act + F32) + 2 * self.w.vocab * F32
    }
}

/// Scores of entries, and the best of each block.
fn index_bytes(config: &Config, step: StepSize) -> u64 {
    let ratios = config.layers.iter().map(|layer| layer.ratio);
    let Some(ratio) = ratios.filter(|ratio| *ratio > 0).min() else {
        return 0;
    };
    let entries = (step.tokens / ratio).max(1);
    let rows = (INDEX_SCORES / entries).clamp(1, step.rows.max(1)) as u64;
    let blocks = config
        .candidates
        .map_or(1, |c| entries.div_ceil(c.block_size.max(1)));
    rows.saturating_mul((entries as u64).saturating_add(blocks as u64))
        .saturating_mul(F32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(rows: usize, logit_rows: usize, tokens: usize) -> StepSize {
        StepSize {
            rows,
            logit_rows,
            tokens,
        }
    }

    #[test]
    fn more_of_anything_takes_more() {
        let config = Config::load("tests/data/engram-s1".as_ref()).unwrap();
        let bytes = |step| workspace_bytes(&config, DType::BF16, step);
        let base = bytes(step(64, 1, 256));
        for larger in [step(65, 1, 256), step(64, 2, 256), step(64, 1, 512)] {
            assert!(bytes(larger) > base, "{larger:?}");
        }
        assert!(workspace_bytes(&config, DType::F32, step(64, 1, 256)) > base);
        assert_eq!(bytes(step(usize::MAX, usize::MAX, usize::MAX)), u64::MAX);
    }

    /// A million tokens of context do not make a million scores of each row.
    #[test]
    fn index_scores_are_bounded() {
        let config = Config::load("tests/data/bf16-s1".as_ref()).unwrap();
        let bytes = index_bytes(&config, step(8192, 1, 1 << 20));
        let bound = (INDEX_SCORES as u64) * F32;
        assert!(bytes >= bound && bytes <= 2 * bound, "{bytes}");
        assert!(index_bytes(&config, step(1, 1, 1 << 20)) < bound);
    }
}
