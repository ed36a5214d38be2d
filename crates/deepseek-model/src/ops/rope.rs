//! Rotary position embedding on interleaved pairs of the last channels, with YaRN.

use candle_core::{Device, Result, Tensor, bail};
use rayon::prelude::*;

use super::{Act, Rounding, cuda, f32s, from_f32s, round_groups, view::ROWS_PER_TASK};
use crate::config::Config;

/// One angular frequency per pair of rotated channels, in radians per position.
#[derive(Debug, Clone)]
pub(crate) struct RopeFrequencies {
    values: Vec<f32>,
    /// The same on the device of the model, if it is not the CPU.
    on_device: Option<Tensor>,
}

impl RopeFrequencies {
    /// Frequencies of a window-only layer (`compressed` false: `rope_theta`, no YaRN) or of a
    /// layer with compressed KV (`compress_rope_theta` and YaRN, at every length).
    pub(crate) fn new(config: &Config, compressed: bool, device: &Device) -> Result<Self> {
        Self::of(frequencies(config, compressed), device)
    }

    /// These frequencies.
    pub(super) fn of(values: Vec<f32>, device: &Device) -> Result<Self> {
        let on_device = if device.is_cpu() {
            None
        } else {
            Some(Tensor::new(values.as_slice(), device)?)
        };
        Ok(Self { values, on_device })
    }

    /// Cosines and sines for a list of positions.
    pub(crate) fn table(&self, positions: impl IntoIterator<Item = u32>) -> Result<RopeTable> {
        if let Some(frequencies) = &self.on_device {
            let positions: Vec<u32> = positions.into_iter().collect();
            return self.table_of(&Tensor::new(positions, frequencies.device())?);
        }
        let mut pairs = Vec::new();
        for position in positions {
            pairs.extend(self.values.iter().map(|freq| {
                // The product is an f32 one: the released runtime rotates by the rounded angle.
                let (sin, cos) = (position as f32 * freq).sin_cos();
                [cos, sin]
            }));
        }
        Ok(RopeTable::Host(Angles {
            pairs,
            width: self.values.len(),
        }))
    }

    /// Cosines and sines for positions `[rows]` (u32) that lie on the device.
    pub(crate) fn table_of(&self, positions: &Tensor) -> Result<RopeTable> {
        let Some(frequencies) = &self.on_device else {
            bail!("expected positions on the host");
        };
        Ok(RopeTable::Device(cuda::rope_table(positions, frequencies)?))
    }
}

/// The frequencies of a kind of layer.
fn frequencies(config: &Config, compressed: bool) -> Vec<f32> {
    let dim = config.rope_dim;
    let theta = if compressed {
        config.compress_rope_theta
    } else {
        config.rope_theta
    };
    let plain = (0..dim / 2).map(|k| 1.0 / (theta as f32).powf((2 * k) as f32 / dim as f32));
    let Some(yarn) = config.yarn.as_ref().filter(|_| compressed) else {
        return plain.collect();
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
    slowed.collect()
}

/// Cosine and sine of every row and pair.
#[derive(Debug, Clone)]
pub(crate) enum RopeTable {
    /// For the CPU.
    Host(Angles),
    /// `[rows, pairs, 2]`, f32.
    Device(Tensor),
}

impl RopeTable {
    /// The angles, if they lie on the host.
    pub(crate) fn host(&self) -> Result<&Angles> {
        match self {
            Self::Host(angles) => Ok(angles),
            Self::Device(_) => bail!("expected a table of angles on the cpu"),
        }
    }

    /// The angles, if they lie on a device.
    pub(crate) fn device(&self) -> Result<&Tensor> {
        match self {
            Self::Device(table) => Ok(table),
            Self::Host(_) => bail!("expected a table of angles on a device, got one on the cpu"),
        }
    }
}

/// `[cos, sin]` of every row and pair.
#[derive(Debug, Clone)]
pub(crate) struct Angles {
    pairs: Vec<[f32; 2]>,
    width: usize,
}

impl Angles {
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
    if x.device().is_cuda() {
        return cuda::rotate_heads(x, head_dim, table.device()?, rounding);
    }
    let table = table.host()?;
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

/// As [`rotate_heads`] without rounding, of a tensor that nobody else holds: on a GPU the channels that
/// rotate, a small part of a head, are overwritten, and the others stay where they are.
pub(crate) fn rotate_own_heads(
    x: Tensor,
    head_dim: usize,
    table: &RopeTable,
    act: Act,
) -> Result<Tensor> {
    if x.device().is_cuda() {
        cuda::rotate_in_place(&x, head_dim, table.device()?, false)?;
        return Ok(x);
    }
    rotate_heads(&x, head_dim, table, None, act)
}
