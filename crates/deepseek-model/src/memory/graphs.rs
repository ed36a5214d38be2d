//! What captured graphs take on a GPU, estimated from above.

use candle_core::DType;
use replay_core::CaptureSizes;
use replay_graph::CaptureMode;

use super::{
    widths::Widths,
    workspace::{StepSize, workspace_bytes},
};
use crate::{
    Config,
    replay::first_layer,
    runner::{Layout, Sizes},
};

/// In which a driver gives out the memory of a graph.
const PIECE: u64 = 32 << 20;

/// What a driver keeps of a graph beside its memory: 2 MiB of one like these.
const KEPT: u64 = 4 << 20;

/// Memory of graphs, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct GraphBytes {
    /// What comes and goes in a run of the largest. Graphs share it; and as much again comes from where
    /// eager steps take theirs, in the run before a capture.
    pub(crate) run: u64,
    /// What each keeps between launches, all together.
    pub(crate) kept: u64,
    /// Lists and buffers at fixed addresses.
    pub(crate) fixed: u64,
}

impl GraphBytes {
    /// Of graphs of these sizes, with activations held as `dtype`.
    pub(crate) fn new(config: &Config, dtype: DType, sizes: &Sizes) -> Self {
        let mut all = Self::default();
        for mode in [CaptureMode::Full, CaptureMode::Piecewise] {
            let Some((of_mode, limits)) = sizes.of_mode(mode) else {
                continue;
            };
            let rows = limits.rows;
            let step = StepSize {
                rows,
                // The head is captured where every row is read.
                logit_rows: match mode {
                    CaptureMode::Full => rows,
                    CaptureMode::Piecewise => 0,
                },
                tokens: limits.tokens,
            };
            all.run = all.run.max(workspace_bytes(config, dtype, step));
            let row = RowBytes::new(config, dtype);
            for &rows in of_mode.as_slice() {
                all.keep(rows, row.result(mode, sizes.breaks(rows)));
            }
            let replay_layers = match (mode, first_layer(config)) {
                (CaptureMode::Piecewise, Some(first)) if sizes.replays() => {
                    config.layers.len() - first
                }
                _ => 0,
            };
            // Beside a list is the copy that is written to it.
            let lists = |layout: Layout| layout.bytes().saturating_mul(2);
            all.hold(lists(Layout::of_steps(config, limits, replay_layers)));
            all.hold(row.tables.saturating_mul(rows as u64));
            if replay_layers > 0 {
                let kept = limits.of_kept(sizes.replay.as_ref());
                for &rows in sizes.replay.iter().flat_map(CaptureSizes::as_slice) {
                    all.keep(rows, row.hidden);
                }
                all.hold(lists(Layout::of_kept_rows(config, kept)));
                all.hold(row.state.saturating_mul(kept.rows as u64));
                all.hold((row.hidden + row.cut_kv).saturating_mul(rows as u64));
            }
        }
        all.run = mapped(all.run);
        all
    }

    fn keep(&mut self, rows: u32, bytes: u64) {
        let graph = mapped(bytes.saturating_mul(u64::from(rows))).saturating_add(KEPT);
        self.kept = self.kept.saturating_add(graph);
    }

    fn hold(&mut self, bytes: u64) {
        self.fixed = self.fixed.saturating_add(bytes);
    }
}

/// Bytes of a row.
struct RowBytes {
    /// What comes to the cut.
    state: u64,
    /// The final norm.
    hidden: u64,
    logits: u64,
    /// Window KV of the cut.
    cut_kv: u64,
    /// Rotation angles, of layers with and without compressed KV.
    angles: u64,
    /// Values of the n-gram tables.
    tables: u64,
}

impl RowBytes {
    fn new(config: &Config, dtype: DType) -> Self {
        let (w, act) = (Widths::of(config), dtype.size_in_bytes() as u64);
        Self {
            state: w.state_bytes(config, act),
            hidden: w.hidden * act,
            logits: w.vocab * size_of::<f32>() as u64,
            cut_kv: w.head * act,
            angles: 2 * config.rope_dim as u64 * size_of::<f32>() as u64,
            tables: w.engram * act,
        }
    }

    /// Of what a graph leaves for the time after its launch: of one that breaks, also what the break
    /// and the segment after it read.
    fn result(&self, mode: CaptureMode, breaks: bool) -> u64 {
        match mode {
            CaptureMode::Full => self.logits,
            CaptureMode::Piecewise if breaks => self.state + self.hidden + 2 * self.angles,
            CaptureMode::Piecewise => self.hidden,
        }
    }
}

fn mapped(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(PIECE).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use replay_core::ReplayPolicy;

    use super::*;
    use crate::{CacheOptions, Graphs, ReplaySizes, RunnerOptions};

    fn bytes(config: &Config, options: &RunnerOptions, max_sequences: usize) -> GraphBytes {
        let cache = CacheOptions {
            max_sequences,
            max_tokens: 1 << 20,
            page_tokens: CacheOptions::PAGE_TOKENS,
            policy: ReplayPolicy::PromptTail,
            sampled_rows: NonZeroU32::MIN,
        };
        let sizes = Sizes::new(options, config, &cache).unwrap();
        GraphBytes::new(config, DType::BF16, &sizes)
    }

    /// A large model, so that rows make out more than pieces.
    fn config() -> Config {
        let mut config = Config::load("tests/data/engram-s1".as_ref()).unwrap();
        (config.hidden_size, config.max_positions) = (1 << 14, 1 << 20);
        config
    }

    /// Graphs that may break end before the head; those of decode steps have it.
    #[test]
    fn the_head_counts_where_it_is_captured() {
        let (small, mut large) = (config(), config());
        large.vocab_size = 1 << 20;
        let of = |graphs| {
            let options = RunnerOptions {
                graphs,
                ..RunnerOptions::default()
            };
            [&small, &large].map(|config| bytes(config, &options, 64))
        };
        let [small, large] = of(Graphs::Piecewise);
        assert_eq!(small, large);
        let [small, large] = of(Graphs::Full);
        assert!(large.kept > small.kept && large.run > small.run);
    }

    /// A graph of the replay layers keeps their result alone, one that breaks also what the break
    /// reads, and one that does not break only its result.
    #[test]
    fn graphs_keep_what_is_read_of_them() {
        let config = config();
        let kept = |sizes: &[u32], replay: ReplaySizes, threshold| {
            let options = RunnerOptions {
                graphs: Graphs::Piecewise,
                capture_sizes: sizes.to_vec(),
                replay_sizes: replay,
                trim_threshold: Some(threshold),
                ..RunnerOptions::default()
            };
            bytes(&config, &options, 8).kept
        };
        let rows = 1 << 13;
        let breaks = kept(&[rows], ReplaySizes::Eager, 64);
        let whole = kept(&[rows], ReplaySizes::Eager, rows + 1);
        let hidden = u64::from(rows) * (1 << 14) * 2 + KEPT;
        assert_eq!(whole, hidden);
        assert!(breaks > whole + u64::from(rows) * (1 << 14) * 2, "{breaks}");
        let both = kept(&[rows], ReplaySizes::Of(vec![rows]), 64);
        assert_eq!(both, breaks + hidden);
        let unused = kept(&[rows], ReplaySizes::Of(vec![rows]), rows + 1);
        assert_eq!(unused, whole, "no graph breaks to launch it");
    }

    /// Tables of pages and index scores follow the longest sequence, not the pool.
    #[test]
    fn shorter_sequences_take_less() {
        let config = config();
        let of = |max_sequence_tokens| {
            let options = RunnerOptions {
                max_sequence_tokens,
                ..RunnerOptions::default()
            };
            bytes(&config, &options, 64)
        };
        let (pool, short) = (of(None), of(Some(1000)));
        assert!(short.fixed < pool.fixed && short.run < pool.run);
        let table = 2 * (64 + 64) * ((1 << 20) / 128 - 1000_u64.div_ceil(128)) * 4;
        assert_eq!(pool.fixed - short.fixed, table);
    }
}
