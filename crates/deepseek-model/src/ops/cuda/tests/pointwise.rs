//! The embedding, `SwiGLU`, the engram gate.

use candle_core::{Device, Tensor};
use candle_nn::Embedding;

use super::{ACTS, Draw, assert_close, gpu, on, plain, values};
use crate::ops::{Act, embed, engram_gate, swiglu};

/// Rows, streams and widths; odd ones, one row, a width below a warp, the released width.
const SHAPES: [(usize, usize, usize); 5] = [
    (1, 4, 192),
    (3, 2, 31),
    (130, 4, 64),
    (7, 8, 257),
    (2, 4, 5120),
];

/// Bits of the table in every stream, also of a width that is no multiple of 16 bytes; zeros for a token
/// that no row of it has.
#[test]
fn gpu_embedding_is_the_table_s() {
    let (device, mut draw) = (gpu(), Draw::new());
    for (act, _) in ACTS {
        for (rows, n, h) in SHAPES {
            let table = draw.values(&[19, h], act);
            let mut tokens: Vec<u32> = (0..rows).map(|_| draw.below(19) as u32).collect();
            let on_cpu = |tokens: &[u32]| Tensor::new(tokens, &Device::Cpu).unwrap();
            let held = Embedding::new(on(&device, act, &table), h);
            let table = Embedding::new(table, h);
            let got = embed(&held, &plain(&device, &on_cpu(&tokens)), n).unwrap();
            let expected = embed(&table, &on_cpu(&tokens), n).unwrap();
            assert_eq!(got.dims(), expected.dims());
            assert_eq!(values(&got), values(&expected), "{rows} rows of {n} x {h}");
            tokens[rows - 1] = 19;
            let got = embed(&held, &plain(&device, &on_cpu(&tokens)), n).unwrap();
            let last = &values(&got)[(rows - 1) * n * h..];
            assert_eq!(last, vec![0.0; n * h]);
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
