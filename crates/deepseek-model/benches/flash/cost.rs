//! What a step must do: floating-point operations and bytes, phase by phase, from its plan.
//!
//! **Operations** are those of products: a product of `[rows, k]` and `[k, n]` is `2 · rows · k · n`;
//! attention `4 · H · D` for each row and key, index scores `2 · heads · width` for each row and entry.
//! Pad rows of a graph are multiplied and count; no kernel attends for them. Norms, rotations,
//! activations and the choice of entries do not count.
//!
//! **Bytes** are those that no implementation can leave where they are: each matrix once, of the
//! experts those that are expected to be chosen; the residual streams, read and written once by each
//! sublayer; keys and values that the step writes, and once each that any of its rows reads; for a
//! gather or scatter the rows, read and written. What lies between operations of a sublayer does not
//! count.

use std::iter::Sum;
use std::ops::{Add, AddAssign};

use deepseek_model::{Config, ReplayLaunch, StepMode, StepStats};
use serde::Serialize;

/// Work of a phase.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct Work {
    /// Floating-point operations.
    pub(crate) flops: f64,
    pub(crate) bytes: f64,
}

impl Add for Work {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self {
            flops: self.flops + other.flops,
            bytes: self.bytes + other.bytes,
        }
    }
}

impl AddAssign for Work {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sum for Work {
    fn sum<I: Iterator<Item = Self>>(works: I) -> Self {
        works.fold(Self::default(), Add::add)
    }
}

/// Work of each phase, in the order of [`deepseek_model::PhaseTimes::phases`].
pub(crate) type Phases = [Work; 6];

pub(crate) const ENCODER: usize = 0;
pub(crate) const WRITE_KV: usize = 1;
const GATHER: usize = 2;
const REPLAY: usize = 3;
const SCATTER: usize = 4;
pub(crate) const HEAD: usize = 5;

/// A step as it ran, or is planned to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step<'a> {
    /// Position of each request's first row.
    pub(crate) starts: &'a [usize],
    pub(crate) stats: &'a StepStats,
    /// Rows that become logits.
    pub(crate) read: usize,
    pub(crate) mode: StepMode,
}

/// Counts the work of steps of one model.
#[derive(Debug, Clone)]
pub(crate) struct Cost {
    config: Config,
    /// The layer that replay starts at, or the number of layers.
    cut: usize,
    /// Bytes of an activation, and of an element of most matrices.
    held: f64,
}

/// Bytes of what is always f32.
const F32: f64 = 4.0;

impl Cost {
    /// `held`: bytes of an activation.
    pub(crate) fn new(config: &Config, held: usize) -> Self {
        let cut = config.replay_layers().map(|layers| layers.first() as usize);
        Self {
            cut: cut.unwrap_or(config.layers.len()),
            held: held as f64,
            config: config.clone(),
        }
    }

    /// Work of a step.
    pub(crate) fn step(&self, step: &Step<'_>) -> Phases {
        let mut phases = Phases::default();
        let (batch, c) = (self.dense(step, 0), &self.config);
        // The embedding, and its copies as streams.
        phases[ENCODER].bytes += batch[0] * (1 + c.hc_mult) as f64 * self.row();
        for layer in 0..c.layers.len() {
            let [entering, running] = self.dense(step, layer);
            let (enter, run) = (
                self.enter(layer, entering),
                self.run(layer, running, &Reads::of(step, layer, c)),
            );
            if layer < self.cut {
                phases[ENCODER] += enter + run;
                continue;
            }
            let at_cut = layer == self.cut;
            phases[if at_cut { WRITE_KV } else { REPLAY }] += enter;
            phases[REPLAY] += run;
            if sum(&step.stats.layers[layer].run) < sum(&step.stats.layers[layer].written) {
                phases[if at_cut { GATHER } else { REPLAY }].bytes +=
                    2.0 * running * self.carried();
            }
        }
        let [_, left] = self.dense(step, c.layers.len() - 1);
        let finished = left * (c.hc_mult + 1) as f64 * self.row();
        phases[if self.cut < c.layers.len() {
            REPLAY
        } else {
            ENCODER
        }]
        .bytes += finished;
        if left < batch[0] {
            phases[SCATTER].bytes += 2.0 * left * self.row();
        }
        phases[HEAD] += self.head(step);
        phases
    }

    /// Rows that the products of a layer take, entering and running, with those of padding.
    fn dense(&self, step: &Step<'_>, layer: usize) -> [f64; 2] {
        let stats = &step.stats.layers[layer];
        let [entering, running] = [sum(&stats.written), sum(&stats.run)];
        let rows = match step.mode {
            StepMode::Full { padded_rows } => [padded_rows; 2],
            StepMode::Piecewise { padded_rows, broke } => {
                let kept = match broke {
                    _ if layer < self.cut => padded_rows,
                    None => padded_rows,
                    Some(ReplayLaunch::Graph { padded_rows }) => padded_rows.as_usize(),
                    Some(ReplayLaunch::Skip | ReplayLaunch::Eager) => running,
                };
                [
                    if layer <= self.cut {
                        padded_rows
                    } else {
                        kept.max(entering)
                    },
                    kept,
                ]
            }
            _ => [entering, running],
        };
        rows.map(|rows| rows as f64)
    }

    /// Bytes of a row as wide as the model.
    fn row(&self) -> f64 {
        self.config.hidden_size as f64 * self.held
    }

    /// Bytes of a row that goes from layer to layer, with the input of its attention.
    fn carried(&self) -> f64 {
        let c = &self.config;
        let blocks = c.candidates.map_or(0, |candidates| candidates.top_blocks);
        let lists = (c.hc_mult + c.index_topk + blocks) as f64;
        (c.hc_mult + 1) as f64 * self.row() + lists * F32
    }

    /// A matrix `[out, inner]` of elements of so many bytes, and rows through it.
    fn product(rows: f64, [out, inner]: [usize; 2], element: f64) -> Work {
        let elements = (out * inner) as f64;
        Work {
            flops: 2.0 * rows * elements,
            bytes: if rows > 0.0 { elements * element } else { 0.0 },
        }
    }

    /// Window KV of the rows; of a KV source compressed KV and index keys.
    pub(crate) fn enter(&self, layer: usize, rows: f64) -> Work {
        let c = &self.config;
        let (h, d, ratio) = (c.hidden_size, c.head_dim, c.layers[layer].ratio);
        let mut work = Self::product(rows, [d, h], self.held);
        work.bytes += rows * (c.hc_mult * h + d) as f64 * self.held;
        if c.layers[layer].kv_source == Some(layer) {
            let entries = (rows / ratio as f64).floor();
            let wide = if ratio > 1 { 2 * d } else { d };
            work += Self::product(rows, [wide, h], F32);
            work += Self::product(entries, [c.index_dim, d], self.held);
            work.bytes += entries * (d + c.index_dim) as f64 * self.held;
        }
        work
    }

    /// Attention and experts.
    pub(crate) fn run(&self, layer: usize, rows: f64, reads: &Reads) -> Work {
        if rows == 0.0 {
            return Work::default();
        }
        let c = &self.config;
        let (h, n, latent) = (c.hidden_size, c.hc_mult, c.q_lora_rank);
        let (heads, grouped) = (c.num_heads * c.head_dim, c.o_groups * c.o_lora_rank);
        let held = |shape| Self::product(rows, shape, self.held);
        let mix = Self::product(rows, [(2 + n) * n, n * h], F32);
        let mut work = mix + mix + held([latent, h]) + held([heads, latent]);
        work += held([c.o_lora_rank, heads]) + held([h, grouped]);
        work += self.experts(rows);
        work.flops += 4.0 * reads.keys * heads as f64;
        work.bytes += reads.distinct_keys * c.head_dim as f64 * self.held;
        if c.layers[layer].index_source == Some(layer) {
            let width = c.index_heads * c.index_dim;
            work += held([width, latent]) + held([c.index_heads, h]);
            work.flops += 2.0 * reads.scores * width as f64;
            work.bytes += reads.distinct_scored * c.index_dim as f64 * self.held;
        }
        // Two sublayers.
        work.bytes += rows * (2 * 2 * n) as f64 * self.row();
        work
    }

    /// The router, the shared expert, and those that rows choose evenly.
    fn experts(&self, rows: f64) -> Work {
        let c = &self.config;
        let (h, m, all) = (c.hidden_size, c.moe_intermediate_size, c.num_experts);
        let expert = [3 * m, h];
        let mut work = Self::product(rows, [all, h], F32) + Self::product(rows, expert, self.held);
        work.flops += Self::product(rows * c.experts_per_token as f64, expert, 0.0).flops;
        let untouched = (1.0 - c.experts_per_token as f64 / all as f64).powf(rows);
        work.bytes += all as f64 * (1.0 - untouched) * (3 * m * h) as f64 * self.held;
        work
    }

    fn head(&self, step: &Step<'_>) -> Work {
        let rows = match step.mode {
            StepMode::Full { padded_rows } => padded_rows,
            _ => step.read,
        } as f64;
        let vocab = self.config.vocab_size;
        let mut work = Self::product(rows, [vocab, self.config.hidden_size], F32);
        work.bytes += rows * vocab as f64 * F32;
        work
    }
}

/// What the running rows of a layer read.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Reads {
    /// Keys over all rows.
    pub(crate) keys: f64,
    /// Keys that some row reads.
    pub(crate) distinct_keys: f64,
    /// Index scores over all rows.
    pub(crate) scores: f64,
    /// Index keys that some row scores.
    pub(crate) distinct_scored: f64,
}

impl Reads {
    pub(crate) fn of(step: &Step<'_>, layer: usize, config: &Config) -> Self {
        let schedule = config.layers[layer];
        let scorable = match config.candidates {
            Some(c) if c.source < layer => c.top_blocks.saturating_mul(c.block_size),
            _ => usize::MAX,
        };
        let (window, stats) = (config.sliding_window, &step.stats.layers[layer]);
        let mut reads = Self::default();
        for (request, &start) in step.starts.iter().enumerate() {
            let (written, run) = (stats.written[request], stats.run[request]);
            let end = start + step.stats.query_rows[request];
            // Rows that did not enter left no window KV.
            let first = if written < end - start {
                end - written
            } else {
                0
            };
            let visible = |pos: usize| (pos + 1).checked_div(schedule.ratio).unwrap_or(0);
            let (mut chosen, mut scores) = (0, 0);
            for pos in end - run..end {
                reads.keys += window.min(pos + 1 - first) as f64;
                chosen += config.index_topk.min(visible(pos));
                scores += scorable.min(visible(pos));
            }
            if run > 0 {
                let oldest = first.max((end - run + 1).saturating_sub(window));
                let last = visible(end - 1);
                reads.keys += chosen as f64;
                reads.distinct_keys += (end - oldest + chosen.min(last)) as f64;
                reads.scores += scores as f64;
                reads.distinct_scored += scores.min(last) as f64;
            }
        }
        reads
    }
}

fn sum(rows: &[usize]) -> usize {
    rows.iter().sum()
}
