//! Products with matrices.

use candle_core::{DType, Tensor};

use super::{ACTS, Draw, assert_close, assert_same, gpu, on, plain, values};
use crate::ops::{Act, Linear, grouped_linear};

/// Rows, groups and widths; decode rows and prefill rows, widths of the release.
const SHAPES: [(usize, usize, usize, usize); 14] = [
    (1, 1, 64, 16),
    (5, 4, 32, 16),
    (130, 2, 96, 16),
    (1, 8, 512, 128),
    (7, 3, 33, 5),
    (33, 8, 40, 24),
    (1025, 4, 64, 8),
    (1, 1, 5120, 1536),
    (4, 1, 2816, 1100),
    (3, 1, 1301, 1057),
    (2, 2, 2568, 600),
    (1, 16, 4096, 128),
    (4, 1, 5120, 9),
    (5, 1, 520, 1200),
];

#[test]
fn gpu_grouped_products() {
    let (device, mut draw) = (gpu(), Draw::new());
    for (act, tolerance) in ACTS {
        for (rows, groups, inner, width) in SHAPES {
            let x = draw.values(&[rows, groups * inner], act);
            let weight = draw.values(&[groups * width, inner], act);
            for out in [act, Act::F32] {
                let there = (on(&device, act, &x), on(&device, act, &weight));
                let got = grouped_linear(&there.0, &there.1, groups, out).unwrap();
                let expected = grouped_linear(&x, &weight, groups, out).unwrap();
                let what = format!("{rows} rows, {groups} groups of {inner} to {width}, {out:?}");
                assert_close(&what, &got, &expected, tolerance);
            }
        }
    }
}

/// A part of a tensor, and of a matrix: neither begins where its memory does.
#[test]
fn gpu_grouped_products_of_parts() {
    let (device, mut draw) = (gpu(), Draw::new());
    for (act, tolerance) in ACTS {
        let x = draw.values(&[9, 4 * 24], act);
        let weight = draw.values(&[3, 4 * 8, 24], act);
        let product = |x: &Tensor, weight: &Tensor| {
            let (x, weight) = (x.narrow(0, 2, 6).unwrap(), weight.get(1).unwrap());
            grouped_linear(&x, &weight, 4, act).unwrap()
        };
        let got = product(&on(&device, act, &x), &on(&device, act, &weight));
        assert_close("parts", &got, &product(&x, &weight), tolerance);
    }
}

/// bf16 rows with an f32 matrix: few by a kernel, more of whole steps and few columns in parts on tensor cores,
/// others by cuBLAS.
#[test]
fn gpu_f32_products_of_bf16_rows() {
    let (device, mut draw) = (gpu(), Draw::new());
    for rows in [1, 2, 4, 7, 8, 9, 33, 64, 65, 130] {
        // Whole steps of a warp, a rest of them, a width that is no multiple of 8, the release's.
        for (inner, width) in [
            (512, 3),
            (2568, 9),
            (257, 70),
            (31, 5),
            (5120, 384),
            (2048, 1100),
            (5120, 16),
            (64, 1),
            (384, 25),
        ] {
            let x = draw.values(&[rows, inner], Act::Bf16);
            let weight = draw.values(&[width, inner], Act::F32);
            let there = (on(&device, Act::Bf16, &x), plain(&device, &weight));
            for (act, tolerance) in [(Act::F32, 1e-5), (Act::Bf16, 8e-3)] {
                let got = Linear::new(there.1.clone()).forward(&there.0, act).unwrap();
                let expected = Linear::new(weight.clone()).forward(&x, act).unwrap();
                assert_eq!(got.dtype(), act.dtype());
                assert_close(
                    &format!("{rows} x {inner} x {width}"),
                    &got,
                    &expected,
                    tolerance,
                );
            }
        }
    }
}

/// By the kernels, a row's products do not depend on other rows.
#[test]
fn gpu_products_of_a_row_alone_and_in_a_batch() {
    let (device, mut draw) = (gpu(), Draw::new());
    for (groups, inner, width) in [(1, 5120, 600), (1, 2568, 1100), (2, 1301, 1060)] {
        let x = draw.values(&[4, groups * inner], Act::Bf16);
        let x = on(&device, Act::Bf16, &x);
        let weight = draw.values(&[width, inner], Act::Bf16);
        for act in [Act::Bf16, Act::F32] {
            // Of more columns, cuBLAS takes more than one row.
            if act == Act::Bf16 && width > 1000 {
                continue;
            }
            let weight = on(&device, act, &weight);
            let all = grouped_linear(&x, &weight, groups, act).unwrap();
            for (first, rows) in [(0, 1), (3, 1), (1, 2), (0, 3)] {
                let some = x.narrow(0, first, rows).unwrap();
                let some = grouped_linear(&some, &weight, groups, act).unwrap();
                let all = values(&all.narrow(0, first, rows).unwrap());
                assert_eq!(
                    values(&some),
                    all,
                    "{groups} x {inner} x {width}: {rows} rows"
                );
            }
        }
    }
}

/// What is no number in a row, or in a matrix, reaches the same products as on the CPU.
#[test]
fn gpu_products_of_what_is_no_number() {
    let device = gpu();
    for rows in [1usize, 3, 20] {
        let mut x = vec![0.5f32; rows * 520];
        x[3] = f32::NAN;
        x[(rows - 1) * 520 + 519] = f32::INFINITY;
        let mut weight = vec![0.25f32; 6 * 520];
        weight[2 * 520 + 519] = f32::NEG_INFINITY;
        let cpu = &candle_core::Device::Cpu;
        let x = Tensor::from_vec(x, (rows, 520), cpu).unwrap();
        let weight = Tensor::from_vec(weight, (6, 520), cpu).unwrap();
        let there = (on(&device, Act::Bf16, &x), plain(&device, &weight));
        let got = grouped_linear(&there.0, &there.1, 1, Act::F32).unwrap();
        let expected = grouped_linear(&x, &weight, 1, Act::F32).unwrap();
        assert_eq!(got.dtype(), DType::F32);
        assert_same(&format!("{rows} rows"), &got, &expected, 1e-5);
    }
}
