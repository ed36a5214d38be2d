//! Rotary position embedding on interleaved pairs of the last channels, with YaRN.

use candle_core::{Result, Tensor};
use rayon::prelude::*;

use super::{Act, Rounding, f32s, from_f32s, round_groups, view::ROWS_PER_TASK};
use crate::config::Config;

/// One angular frequency per pair of rotated channels, in radians per position.
#[derive(Debug, Clone)]
pub(crate) struct RopeFrequencies(Vec<f32>);

impl RopeFrequencies {
    /// Frequencies of a window-only layer (`compressed` false: `rope_theta`, no YaRN) or of a
    /// layer with compressed KV (`compress_rope_theta` and YaRN, at every length).
    pub(crate) fn new(config: &Config, compressed: bool) -> Self {
        let dim = config.rope_dim;
        let theta = if compressed {
            config.compress_rope_theta
        } else {
            config.rope_theta
        };
        let plain = (0..dim / 2).map(|k| 1.0 / (theta as f32).powf((2 * k) as f32 / dim as f32));
        let Some(yarn) = config.yarn.as_ref().filter(|_| compressed) else {
            return Self(plain.collect());
        };
        // The pair that makes `turns` full turns over the original context.
        let pair_of = |turns: f64| {
            let original = yarn.original_max_position as f64;
            dim as f64 * (original / (turns * std::f64::consts::TAU)).ln() / (2.0 * theta.ln())
        };
        let low = pair_of(yarn.beta_fast).floor().max(0.0) as f32;
        let high = pair_of(yarn.beta_slow).ceil().min((dim - 1) as f64) as f32;
        let factor = yarn.factor as f32;
        let slowed = plain.enumerate().map(|(k, freq)| {
            let ramp = ((k as f32 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
            freq / factor * ramp + freq * (1.0 - ramp)
        });
        Self(slowed.collect())
    }

    /// Cosines and sines for a list of positions.
    pub(crate) fn table(&self, positions: impl IntoIterator<Item = u32>) -> RopeTable {
        let mut pairs = Vec::new();
        for position in positions {
            pairs.extend(self.0.iter().map(|freq| {
                // The product is an f32 one: the released runtime rotates by the rounded angle.
                let (sin, cos) = (position as f32 * freq).sin_cos();
                [cos, sin]
            }));
        }
        RopeTable {
            pairs,
            width: self.0.len(),
        }
    }
}

/// `[cos, sin]` of every row and pair.
#[derive(Debug, Clone)]
pub(crate) struct RopeTable {
    pairs: Vec<[f32; 2]>,
    width: usize,
}

impl RopeTable {
    /// Rotates the last channels of `head` forward by the angles of row `row`.
    #[inline]
    pub(crate) fn rotate(&self, head: &mut [f32], row: usize, act: Act) {
        self.turn(head, row, 1.0, act);
    }

    /// Rotates the last channels of `head` back.
    #[inline]
    pub(crate) fn rotate_back(&self, head: &mut [f32], row: usize, act: Act) {
        self.turn(head, row, -1.0, act);
    }

    #[inline]
    fn turn(&self, head: &mut [f32], row: usize, sign: f32, act: Act) {
        let start = head.len() - 2 * self.width;
        let angles = &self.pairs[row * self.width..(row + 1) * self.width];
        for (pair, [cos, sin]) in head[start..].chunks_exact_mut(2).zip(angles) {
            let (a, b, sin) = (pair[0], pair[1], sign * sin);
            pair[0] = act.store(a * cos - b * sin);
            pair[1] = act.store(a * sin + b * cos);
        }
    }
}

/// Rotates every head of every row and, if a cache format is given, rounds it to that format.
///
/// `x` is `[rows, heads · head_dim]`; `table` has one entry per row.
pub(crate) fn rotate_heads(
    x: &Tensor,
    head_dim: usize,
    table: &RopeTable,
    rounding: Option<Rounding>,
    act: Act,
) -> Result<Tensor> {
    let mut out = f32s(x)?.to_vec();
    let width = x.dim(1)?;
    out.par_chunks_mut(width)
        .enumerate()
        .with_min_len(ROWS_PER_TASK)
        .for_each(|(row, heads)| {
            for head in heads.chunks_exact_mut(head_dim) {
                table.rotate(head, row, act);
            }
            if let Some(format) = rounding {
                round_groups(heads, format);
                act.store_all(heads);
            }
        });
    from_f32s(out, x.shape())
}
