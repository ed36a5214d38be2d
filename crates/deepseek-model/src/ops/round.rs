//! Rounding of cached values to the formats the released cache stores ("activation quantisation").
//!
//! Each function rounds groups of the channel axis in place and leaves the dequantised values
//! (`q · scale`). The formats are those of the OCP Microscaling specification (mxfp8, mxfp4) and
//! NVIDIA's nvfp4 without its per-tensor scale.

use super::fp::max_abs;

/// A cache format: element type, group length and scale type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// E4M3 elements, groups of 32, power-of-two scales: window KV.
    MxFp8,
    /// E2M1 elements, groups of 32, power-of-two scales: index queries and keys.
    MxFp4,
    /// E2M1 elements, groups of 16, E4M3 scales: compressed KV.
    NvFp4,
}

impl Rounding {
    /// Channels that share one scale.
    pub const fn group(self) -> usize {
        match self {
            Self::MxFp8 | Self::MxFp4 => 32,
            Self::NvFp4 => 16,
        }
    }
}

/// Rounds `row` in place, group by group.
///
/// # Panics
/// If the row is not a whole number of groups.
pub fn round_groups(row: &mut [f32], format: Rounding) {
    assert_eq!(
        row.len() % format.group(),
        0,
        "row of {} channels is not whole groups",
        row.len()
    );
    for group in row.chunks_exact_mut(format.group()) {
        match format {
            Rounding::MxFp8 => {
                let scale = pow2_ceil(max_abs(group).max(1e-4) * (1.0 / 448.0));
                for x in group {
                    *x = round_e4m3((*x / scale).clamp(-448.0, 448.0)) * scale;
                }
            }
            Rounding::MxFp4 => {
                let scale = pow2_ceil(max_abs(group).max(6.0 * f32::MIN_POSITIVE) * (1.0 / 6.0));
                for x in group {
                    *x = round_e2m1((*x / scale).clamp(-6.0, 6.0)) * scale;
                }
            }
            Rounding::NvFp4 => {
                // 6·2⁻⁹ keeps the scale at or above the smallest E4M3 subnormal.
                let scale = round_e4m3((max_abs(group).max(6.0 / 512.0) / 6.0).min(448.0));
                for x in group {
                    *x = round_e2m1((*x / scale).clamp(-6.0, 6.0)) * scale;
                }
            }
        }
    }
}

/// The least power of two that is not below `x`, for positive normal `x`; exact, from the bits.
#[inline]
fn pow2_ceil(x: f32) -> f32 {
    let bits = x.to_bits();
    let exponent = (bits >> 23) + u32::from(bits & 0x007f_ffff != 0);
    f32::from_bits(exponent << 23)
}

/// Rounds `|x| <= 448` to E4M3, ties to even, keeping the sign of zero.
#[inline]
fn round_e4m3(x: f32) -> f32 {
    // Adding and taking away 1.5·2²³ steps rounds to whole steps, ties to even.
    const SUBNORMAL: f32 = 1.5 * 8_388_608.0 / 512.0;
    let magnitude = x.abs();
    let subnormal = (magnitude + SUBNORMAL) - SUBNORMAL;
    // Normal numbers keep 3 of 23 mantissa bits.
    let bits = magnitude.to_bits();
    let normal = f32::from_bits((bits + 0x0007_ffff + ((bits >> 20) & 1)) & !0x000f_ffff);
    let rounded = if magnitude < 1.0 / 64.0 {
        subnormal
    } else {
        normal
    };
    rounded.copysign(x)
}

/// Rounds `|x| <= 6` to E2M1 {0, 0.5, 1, 1.5, 2, 3, 4, 6}, ties to the even code.
#[inline]
fn round_e2m1(x: f32) -> f32 {
    const STEP: f32 = 1.5 * 8_388_608.0;
    let magnitude = x.abs();
    // Steps of 0.5 below 2, of 1 below 4, of 2 above.
    let magic = if magnitude < 2.0 {
        0.5 * STEP
    } else if magnitude < 4.0 {
        STEP
    } else {
        2.0 * STEP
    };
    ((magnitude + magic) - magic).copysign(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nearest of `codes`, ties to the even code, by exhaustive search.
    fn nearest(codes: &[f32], x: f32) -> f32 {
        let x64 = f64::from(x.abs());
        let mut best = 0;
        for (i, &c) in codes.iter().enumerate() {
            let (d, b) = (
                (f64::from(c) - x64).abs(),
                (f64::from(codes[best]) - x64).abs(),
            );
            if d < b || (d == b && i % 2 == 0) {
                best = i;
            }
        }
        codes[best].copysign(x)
    }

    fn e4m3_codes() -> Vec<f32> {
        (0..127u32)
            .map(|code| {
                let (e, m) = ((code >> 3) as i32, (code & 7) as f32);
                if e == 0 {
                    m * 2f32.powi(-9)
                } else {
                    (1.0 + m / 8.0) * 2f32.powi(e - 7)
                }
            })
            .collect()
    }

    fn probes(limit: f32) -> impl Iterator<Item = f32> {
        (0..=40_000u32)
            .map(move |i| (i as f32 / 40_000.0).powi(3) * limit)
            .flat_map(|x| [x, -x])
    }

    #[test]
    fn e4m3_takes_the_nearest_code_with_ties_to_even() {
        let codes = e4m3_codes();
        assert_eq!(codes[126], 448.0);
        let middles = codes.windows(2).map(|w| f32::midpoint(w[0], w[1]));
        for x in probes(448.0).chain(codes.iter().copied()).chain(middles) {
            assert_eq!(round_e4m3(x).to_bits(), nearest(&codes, x).to_bits(), "{x}");
        }
    }

    #[test]
    fn e2m1_takes_the_nearest_code_with_ties_to_even() {
        let codes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
        for x in probes(6.0).chain(codes).chain(ties) {
            assert_eq!(round_e2m1(x).to_bits(), nearest(&codes, x).to_bits(), "{x}");
        }
    }

    #[test]
    fn pow2_ceil_is_exact_at_powers_of_two() {
        for e in -120..120 {
            let p = 2f32.powi(e);
            assert_eq!(pow2_ceil(p), p);
            assert_eq!(pow2_ceil(p * 1.000_001), 2.0 * p);
        }
    }
}
