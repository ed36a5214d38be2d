//! Number formats of a checkpoint, bit by bit.

use half::{bf16, f16, vec::HalfBitsVecExt};

/// Values that share a scale along a row.
pub(super) const GROUP: usize = 32;

/// An element of a loaded tensor.
pub(super) trait Element: candle_core::WithDType {
    /// Rounded to nearest, ties to even.
    fn of(value: f32) -> Self;

    /// Neither NaN nor infinite.
    fn finite(self) -> bool;

    /// Whether all values are finite. Looks at every bit pattern without a branch: one more than
    /// the exponent reaches the sign bit only if the exponent is all ones.
    fn all_finite(values: &[Self]) -> bool;

    /// `len` zeros, in memory that the system hands out zeroed: no thread writes them first.
    fn zeros(len: usize) -> Vec<Self>;
}

impl Element for f32 {
    fn of(value: f32) -> Self {
        value
    }

    fn finite(self) -> bool {
        self.is_finite()
    }

    fn all_finite(values: &[Self]) -> bool {
        let carries = values.iter().fold(0, |carries, value| {
            carries | ((value.to_bits() & 0x7f80_0000) + 0x0080_0000)
        });
        carries >> 31 == 0
    }

    fn zeros(len: usize) -> Vec<Self> {
        vec![0.0; len]
    }
}

impl Element for bf16 {
    fn of(value: f32) -> Self {
        bf16::from_f32(value)
    }

    fn finite(self) -> bool {
        self.is_finite()
    }

    fn all_finite(values: &[Self]) -> bool {
        let carries = values.iter().fold(0, |carries, value| {
            carries | ((value.to_bits() & 0x7f80) + 0x0080)
        });
        carries >> 15 == 0
    }

    fn zeros(len: usize) -> Vec<Self> {
        // Only for integers and floats of the language does `vec!` ask for zeroed memory.
        vec![0_u16; len].reinterpret_into()
    }
}

/// E2M1: the three low bits choose the magnitude, bit 3 is the sign.
pub(super) const E2M1: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// Every E4M3 byte as f32.
pub(super) static E4M3: [f32; 256] = e4m3_table();

const fn e4m3_table() -> [f32; 256] {
    let mut table = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = e4m3(byte as u8);
        byte += 1;
    }
    table
}

/// 1-4-3 bits, bias 7, no infinities; the largest exponent and mantissa together are NaN.
const fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = ((byte >> 3 & 0xf) as u32, (byte & 7) as u32);
    let magnitude = match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        // Subnormal: steps of 2^-9.
        (0, _) => mantissa as f32 / 512.0,
        // The exponent rebiased from 7 to f32's 127, the mantissa from 3 to f32's 23 bits.
        _ => f32::from_bits((exponent + 120) << 23 | mantissa << 20),
    };
    if byte & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

/// The one E8M0 byte that is no number.
pub(super) const E8M0_NAN: u8 = 255;

/// E8M0: 2^(byte - 127).
pub(super) const fn e8m0(byte: u8) -> f32 {
    match byte {
        // The one exponent below f32's normal range.
        0 => f32::from_bits(1 << 22),
        E8M0_NAN => f32::NAN,
        _ => f32::from_bits((byte as u32) << 23),
    }
}

/// Decodes a row of E4M3 values; `scales` yields one scale per [`GROUP`] columns.
pub(super) fn fp8_row<T: Element>(bytes: &[u8], scales: impl Iterator<Item = f32>, out: &mut [T]) {
    let groups = bytes.chunks(GROUP).zip(out.chunks_mut(GROUP));
    for ((bytes, out), scale) in groups.zip(scales) {
        for (value, &byte) in out.iter_mut().zip(bytes) {
            *value = T::of(E4M3[byte as usize] * scale);
        }
    }
}

/// Decodes a row of E2M1 values, two in a byte, the even column in the low nibble.
pub(super) fn fp4_row<T: Element>(bytes: &[u8], scales: impl Iterator<Item = f32>, out: &mut [T]) {
    let groups = bytes.chunks(GROUP / 2).zip(out.chunks_mut(GROUP));
    for ((bytes, out), scale) in groups.zip(scales) {
        let scaled = E2M1.map(|value| T::of(value * scale));
        for (pair, &byte) in out.chunks_exact_mut(2).zip(bytes) {
            pair[0] = scaled[(byte & 0xf) as usize];
            pair[1] = scaled[(byte >> 4) as usize];
        }
    }
}

/// Plain floating-point formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Plain {
    F32,
    Bf16,
    F16,
}

impl Plain {
    pub(super) fn of(dtype: safetensors::Dtype) -> Option<Self> {
        match dtype {
            safetensors::Dtype::F32 => Some(Self::F32),
            safetensors::Dtype::BF16 => Some(Self::Bf16),
            safetensors::Dtype::F16 => Some(Self::F16),
            _ => None,
        }
    }

    /// Bytes of a value.
    pub(super) fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Decodes as many values as `out` holds.
    pub(super) fn decode<T: Element>(self, bytes: &[u8], out: &mut [T]) {
        match self {
            Self::F32 => decode(bytes, out, f32::from_le_bytes),
            Self::Bf16 => decode(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
            Self::F16 => decode(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
        }
    }
}

fn decode<T: Element, const N: usize>(bytes: &[u8], out: &mut [T], value: impl Fn([u8; N]) -> f32) {
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *out = T::of(value(*bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The format's definition, in f64.
    fn e4m3_by_formula(byte: u8) -> f64 {
        let sign = if byte & 0x80 == 0 { 1.0 } else { -1.0 };
        let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
        match exponent {
            15 if mantissa == 7.0 => f64::NAN,
            0 => sign * mantissa / 8.0 * 2_f64.powi(-6),
            _ => sign * (1.0 + mantissa / 8.0) * 2_f64.powi(exponent - 7),
        }
    }

    #[test]
    fn every_e4m3_byte_has_the_value_of_the_formula() {
        for byte in 0..=u8::MAX {
            let (value, formula) = (E4M3[byte as usize], e4m3_by_formula(byte));
            assert_eq!(value.is_nan(), formula.is_nan(), "{byte:#04x}");
            if !formula.is_nan() {
                // By bits, so that -0 is told from 0.
                assert_eq!(value.to_bits(), (formula as f32).to_bits(), "{byte:#04x}");
            }
        }
        assert_eq!((E4M3[0x7e], E4M3[0x01]), (448.0, 0.001_953_125));
        assert!(E4M3[0x7f].is_nan() && E4M3[0xff].is_nan());
    }

    #[test]
    fn every_e8m0_byte_is_a_power_of_two() {
        for byte in 0..u8::MAX {
            assert_eq!(
                e8m0(byte),
                2_f64.powi(i32::from(byte) - 127) as f32,
                "{byte}"
            );
        }
        assert!(e8m0(0) > 0.0 && !e8m0(0).is_normal());
        assert_eq!((e8m0(127), e8m0(254)), (1.0, 2_f32.powi(127)));
        assert!(e8m0(E8M0_NAN).is_nan());
    }

    #[test]
    fn the_even_column_of_e2m1_is_in_the_low_nibble() {
        let magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for byte in 0..=u8::MAX {
            let mut out = [0_f32; 2];
            fp4_row(&[byte], std::iter::once(0.25), &mut out);
            for (value, nibble) in out.iter().zip([byte & 15, byte >> 4]) {
                let magnitude: f32 = magnitudes[(nibble & 7) as usize] * 0.25;
                let expected = if nibble < 8 { magnitude } else { -magnitude };
                assert_eq!(value.to_bits(), expected.to_bits(), "{byte:#04x}");
            }
        }
    }

    #[test]
    fn a_scale_serves_32_columns_and_the_last_may_serve_fewer() {
        let mut out = [0_f32; 70];
        fp8_row(&[0x38; 70], [1.0, 2.0, 4.0].into_iter(), &mut out);
        assert_eq!(
            out.map(|v| v as u8),
            std::array::from_fn(|i| [1, 2, 4][i / 32])
        );

        let mut out = [0_f32; 70];
        fp4_row(&[0x22; 35], [1.0, 2.0, 4.0].into_iter(), &mut out);
        assert_eq!(
            out.map(|v| v as u8),
            std::array::from_fn(|i| [1, 2, 4][i / 32])
        );
    }

    #[test]
    fn finiteness_is_told_from_the_exponent() {
        let finite = [
            0.0,
            -0.0,
            f32::MAX,
            f32::MIN,
            f32::MIN_POSITIVE,
            1e-45,
            -1.0,
        ];
        assert!(f32::all_finite(&finite) && finite.iter().all(|v| v.finite()));
        let rest = [bf16::MAX, bf16::MIN, bf16::MIN_POSITIVE_SUBNORMAL];
        assert!(bf16::all_finite(&rest) && rest.iter().all(|v| v.finite()));
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(!f32::all_finite(&[1.0, bad, 1.0]) && !bad.finite());
            let bad = bf16::from_f32(bad);
            assert!(!bf16::all_finite(&[bf16::ONE, bad]) && !bad.finite());
        }
    }

    #[test]
    fn plain_formats_are_little_endian_and_rounded_to_nearest_even() {
        let mut out = [0_f32; 2];
        Plain::F32.decode(&[0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0], &mut out);
        assert_eq!(out, [1.0, -2.0]);
        Plain::Bf16.decode(&[0x80, 0x3f, 0, 0xc0], &mut out);
        assert_eq!(out, [1.0, -2.0]);
        Plain::F16.decode(&[0, 0x3c, 0, 0xc0], &mut out);
        assert_eq!(out, [1.0, -2.0]);

        // 1 + 2^-8 lies between the bf16 values 1 and 1 + 2^-7; the even one is 1.
        let mut rounded = [bf16::ZERO];
        Plain::F32.decode(&(1.0 + 2_f32.powi(-8)).to_le_bytes(), &mut rounded);
        assert_eq!(rounded[0], bf16::ONE);
        assert_eq!(bf16::zeros(3), [bf16::ZERO; 3]);
    }
}
