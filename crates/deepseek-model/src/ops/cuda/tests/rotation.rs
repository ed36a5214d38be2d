//! Rotary embedding and the rounding of cached values.

use candle_core::{Device, Tensor};

use super::{ACTS, Draw, assert_close, gpu, on, plain, values};
use crate::ops::{Act, Rounding, cuda, round_groups};

#[test]
fn gpu_angles() {
    let device = gpu();
    let positions: Vec<u32> = vec![0, 1, 2, 127, 128, 4095, 65_535, 1_048_575];
    let frequencies: Vec<f32> = (0..32).map(|k| 10000f32.powf(-(k as f32) / 32.0)).collect();
    let table = cuda::rope_table(
        &Tensor::new(positions.as_slice(), &device).unwrap(),
        &Tensor::new(frequencies.as_slice(), &device).unwrap(),
    );
    let mut expected = Vec::new();
    for p in &positions {
        for f in &frequencies {
            let (sin, cos) = f64::from(*p as f32 * f).sin_cos();
            expected.extend([cos as f32, sin as f32]);
        }
    }
    // Two units in the last place.
    for (got, expected) in values(&table.unwrap()).iter().zip(&expected) {
        assert!(
            (got - expected).abs() <= 2.4e-7,
            "expected {expected}, got {got}"
        );
    }
}

/// A rotation by the same angles, bit for bit where nothing is fused.
#[test]
fn gpu_rotation_and_its_inverse() {
    let (device, mut draw) = (gpu(), Draw::new());
    for (act, _) in ACTS {
        for (rows, heads, dim, pairs) in [
            (1, 1, 16, 8),
            (3, 5, 48, 8),
            (9, 2, 128, 32),
            (2, 3, 512, 32),
            // Heads and tails that are no multiples of 16 bytes, and a head that rotates wholly.
            (7, 3, 30, 5),
            (33, 2, 72, 9),
            (2, 1, 64, 32),
        ] {
            let x = draw.values(&[rows, heads * dim], act);
            let angles = draw.values(&[rows, pairs, 2], Act::F32);
            let there = (on(&device, act, &x), plain(&device, &angles));
            for sign in [1.0f32, -1.0] {
                let mut expected = values(&x);
                let angles = values(&angles);
                for (i, head) in expected.chunks_exact_mut(dim).enumerate() {
                    let angles = &angles[i / heads * 2 * pairs..][..2 * pairs];
                    let rotated = &mut head[dim - 2 * pairs..];
                    for (pair, angle) in rotated.chunks_exact_mut(2).zip(angles.chunks_exact(2)) {
                        let (a, b, cos, sin) = (pair[0], pair[1], angle[0], sign * angle[1]);
                        pair[0] = act.store(a * cos - b * sin);
                        pair[1] = act.store(a * sin + b * cos);
                    }
                }
                let expected = Tensor::from_vec(expected, x.dims(), &Device::Cpu).unwrap();
                let own = there.0.copy().unwrap();
                cuda::rotate_in_place(&own, dim, &there.1, sign < 0.0).unwrap();
                assert_close("rotation in place", &own, &expected, 0.0);
                if sign > 0.0 {
                    let got = cuda::rotate_heads(&there.0, dim, &there.1, None).unwrap();
                    assert_close("rotation", &got, &expected, 0.0);
                }
            }
        }
    }
}

/// Rounding bit for bit, at magnitudes from the smallest scale to beyond the largest.
#[test]
fn gpu_rounding_takes_the_same_bins() {
    let (device, mut draw) = (gpu(), Draw::new());
    for (format, width) in [
        (Rounding::MxFp8, 96),
        (Rounding::MxFp4, 64),
        (Rounding::NvFp4, 48),
    ] {
        for power in [-40i32, -12, -3, 0, 5, 12, 30] {
            let x = (draw.values(&[64, width], Act::F32) * f64::from(power).exp2()).unwrap();
            // Angles of 0 leave the values as they are.
            let table = Tensor::from_vec([1f32, 0.0].repeat(64), (64, 1, 2), &device).unwrap();
            let got = cuda::rotate_heads(&plain(&device, &x), width, &table, Some(format));
            let mut expected = values(&x);
            for row in expected.chunks_exact_mut(width) {
                round_groups(row, format);
            }
            let got = values(&got.unwrap());
            for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
                assert_eq!(got, expected, "{format:?}, 2^{power}, value {i}");
            }
        }
    }
}
