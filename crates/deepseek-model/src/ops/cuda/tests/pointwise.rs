//! Norms, hyper-connections, `SwiGLU`, the engram gate, matrices.

use candle_core::{Device, Tensor};

use super::{ACTS, Draw, assert_close, gpu, on, plain, values};
use crate::ops::{
    Act, Linear, Mix, collapse_norm, engram_gate, expand, grouped_linear, mix, rms_norm, swiglu,
};

/// Rows, streams and widths; odd ones, one row, a width below a warp, the released width.
const SHAPES: [(usize, usize, usize); 5] = [
    (1, 4, 192),
    (3, 2, 31),
    (130, 4, 64),
    (7, 8, 257),
    (2, 4, 5120),
];

#[test]
fn gpu_norms() {
    let (device, mut draw) = (gpu(), Draw::new());
    for (act, tolerance) in ACTS {
        for (rows, n, h) in SHAPES {
            let x = draw.values(&[rows, h], act);
            let weight = draw.values(&[h], Act::F32);
            let got = rms_norm(&on(&device, act, &x), &plain(&device, &weight), 1e-6, act);
            let expected = rms_norm(&x, &weight, 1e-6, act);
            assert_close("rms norm", &got.unwrap(), &expected.unwrap(), tolerance);

            let streams = draw.values(&[rows, n, h], act);
            let pre = draw.values(&[rows, n], Act::F32);
            let got = collapse_norm(
                &on(&device, act, &streams),
                &plain(&device, &pre),
                &plain(&device, &weight),
                1e-6,
                act,
            );
            let expected = collapse_norm(&streams, &pre, &weight, 1e-6, act);
            assert_close(
                "collapse norm",
                &got.unwrap(),
                &expected.unwrap(),
                tolerance,
            );
        }
    }
}

/// The eps of the release, 1e-20, must not make a row of zeros infinite.
#[test]
fn gpu_norm_of_zeros_is_zero() {
    let x = candle_core::Tensor::zeros((2, 64), candle_core::DType::F32, &gpu()).unwrap();
    let weight = x.get(0).unwrap().ones_like().unwrap();
    let out = rms_norm(&x, &weight, 1e-20, Act::F32).unwrap();
    assert_eq!(super::values(&out), [0.0; 128]);
}

#[test]
fn gpu_mix_and_expand() {
    let (device, mut draw) = (gpu(), Draw::new());
    for (act, tolerance) in ACTS {
        for (rows, n, h) in SHAPES {
            let (project, base, scale) = (
                draw.values(&[(2 + n) * n, n * h], Act::F32),
                draw.values(&[(2 + n) * n], Act::F32),
                draw.values(&[3], Act::F32),
            );
            let site = |place: &dyn Fn(&candle_core::Tensor) -> candle_core::Tensor| Mix {
                project: Linear::new(place(&project)),
                base: place(&base),
                scale: place(&scale),
                streams: n,
                iterations: 20,
                eps: 1e-6,
                norm_eps: 1e-6,
            };
            let streams = draw.values(&[rows, n, h], act);
            let (pre, post_comb) = mix(&site(&Clone::clone), &streams).unwrap();
            let there = on(&device, act, &streams);
            let (got_pre, got_post_comb) = mix(&site(&|t| plain(&device, t)), &there).unwrap();
            // f32 throughout, also with bf16 streams; 20 divisions in a row.
            assert_close("pre", &got_pre, &pre, 2e-5);
            assert_close("post and comb", &got_post_comb, &post_comb, 2e-5);

            let y = draw.values(&[rows, h], act);
            let got = expand(
                &on(&device, act, &y),
                &there,
                &plain(&device, &post_comb),
                act,
            );
            let expected = expand(&y, &streams, &post_comb, act);
            assert_close("expand", &got.unwrap(), &expected.unwrap(), tolerance);
        }
    }
}

#[test]
fn gpu_swiglu_clamps_as_the_cpu() {
    let (device, mut draw) = (gpu(), Draw::new());
    for (act, tolerance) in ACTS {
        for (rows, _, m) in SHAPES {
            let hidden = (draw.values(&[rows, 2 * m], act) * 4.0).unwrap();
            for limit in [0.0, 1.5] {
                let got = swiglu(&on(&device, act, &hidden), limit, act).unwrap();
                let expected = swiglu(&hidden, limit, act).unwrap();
                assert_close("swiglu", &got, &expected, tolerance);
            }
        }
    }
}

/// A clamp may bound a number, not stand for one that is missing.
#[test]
fn gpu_swiglu_of_what_is_no_number_gives_none() {
    let device = gpu();
    for (act, _) in ACTS {
        let hidden = [f32::NAN, 1.0, 1e30, 1.0, f32::NAN, 1.0];
        let hidden = Tensor::new(&[hidden], &Device::Cpu).unwrap();
        for limit in [0.0, 10.0] {
            let got = values(&swiglu(&on(&device, act, &hidden), limit, act).unwrap());
            assert!(got[0].is_nan() && got[1].is_nan() && !got[2].is_nan());
        }
    }
}

#[test]
fn gpu_engram_gate() {
    let (device, mut draw) = (gpu(), Draw::new());
    for (act, tolerance) in ACTS {
        for (rows, n, h) in SHAPES {
            let streams = draw.values(&[rows, n, h], act);
            let key_value = draw.values(&[rows, (n + 1) * h], act);
            let (q, k) = (
                draw.values(&[n, h], Act::F32),
                draw.values(&[n, h], Act::F32),
            );
            let got = engram_gate(
                &on(&device, act, &streams),
                &on(&device, act, &key_value),
                &plain(&device, &q),
                &plain(&device, &k),
                1e-6,
                act,
            );
            let expected = engram_gate(&streams, &key_value, &q, &k, 1e-6, act);
            // The gate is steep where the dot product is small.
            assert_close(
                "engram gate",
                &got.unwrap(),
                &expected.unwrap(),
                tolerance.max(1e-4),
            );
        }
    }
}

#[test]
fn gpu_grouped_products() {
    let (device, mut draw) = (gpu(), Draw::new());
    for (act, tolerance) in ACTS {
        for (rows, groups, inner) in [(1, 1, 64), (5, 4, 32), (130, 2, 96)] {
            let x = draw.values(&[rows, groups * inner], act);
            let weight = draw.values(&[groups * 16, inner], act);
            for out in [act, Act::F32] {
                let there = (on(&device, act, &x), on(&device, act, &weight));
                let got = grouped_linear(&there.0, &there.1, groups, out).unwrap();
                let expected = grouped_linear(&x, &weight, groups, out).unwrap();
                assert_close("product", &got, &expected, tolerance);
            }
        }
    }
}
