//! Norms and hyper-connections.

use candle_core::{Device, Tensor};

use super::{ACTS, Draw, assert_close, assert_same, gpu, on, plain, small, values};
use crate::ops::{Act, Linear, Mix, collapse_norm, expand, expand_norm, mix, rms_norm};

/// Rows, streams and widths: every number of streams, rows as of a decode step and of a prefill, widths
/// that are no multiple of 16 bytes, one below a warp, one that only all streams together make whole, one
/// of several segments and a rest, the released one; the same of rows for tensor cores.
const SHAPES: [(usize, usize, usize); 20] = [
    (1, 4, 192),
    (3, 2, 31),
    (130, 4, 64),
    (7, 8, 257),
    (2, 4, 5120),
    (1, 1, 40),
    (33, 3, 72),
    (65, 5, 104),
    (2, 6, 36),
    (34, 7, 130),
    (100, 8, 64),
    (70, 4, 320),
    (1, 2, 33),
    (256, 1, 64),
    (300, 7, 130),
    (257, 8, 64),
    (513, 4, 336),
    (260, 3, 64),
    (256, 4, 5120),
    (4097, 4, 64),
];

fn shapes() -> impl Iterator<Item = (usize, usize, usize)> {
    SHAPES
        .into_iter()
        .filter(|(rows, ..)| *rows < 1000 || !small())
}

#[test]
fn gpu_norms() {
    let (device, mut draw) = (gpu(), Draw::new());
    for (act, tolerance) in ACTS {
        for (rows, n, h) in shapes() {
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

/// Rows that a block takes in more than one round, and whose threads take more memory than every block
/// is granted.
#[test]
fn gpu_norms_of_wide_rows() {
    let (device, mut draw) = (gpu(), Draw::new());
    for (act, tolerance) in ACTS {
        for h in [8200, 13_001, 25_600] {
            let x = draw.values(&[2, h], act);
            let weight = draw.values(&[h], Act::F32);
            let got = rms_norm(&on(&device, act, &x), &plain(&device, &weight), 1e-6, act);
            let expected = rms_norm(&x, &weight, 1e-6, act);
            // Sums of so many squares differ by more than a bit, on the CPU above all.
            let tolerance = tolerance.max(1e-5);
            assert_close("wide", &got.unwrap(), &expected.unwrap(), tolerance);
        }
    }
}

/// The eps of the release, 1e-20, must not make a row of zeros infinite.
#[test]
fn gpu_norm_of_zeros_is_zero() {
    let x = Tensor::zeros((2, 64), candle_core::DType::F32, &gpu()).unwrap();
    let weight = x.get(0).unwrap().ones_like().unwrap();
    let out = rms_norm(&x, &weight, 1e-20, Act::F32).unwrap();
    assert_eq!(values(&out), [0.0; 128]);
}

/// The weights of a site of `n` streams of `h`, on the CPU.
fn site(draw: &mut Draw, n: usize, h: usize) -> Mix {
    Mix {
        project: Linear::new(draw.values(&[(2 + n) * n, n * h], Act::F32)),
        base: draw.values(&[(2 + n) * n], Act::F32),
        scale: draw.values(&[3], Act::F32),
        streams: n,
        iterations: 20,
        eps: 1e-6,
        norm_eps: 1e-6,
    }
}

fn site_on(device: &Device, site: &Mix) -> Mix {
    Mix {
        project: Linear::new(plain(device, site.project.weight())),
        base: plain(device, &site.base),
        scale: plain(device, &site.scale),
        ..site.clone()
    }
}

#[test]
fn gpu_mix_and_expand() {
    let (device, mut draw) = (gpu(), Draw::new());
    for (act, tolerance) in ACTS {
        for (rows, n, h) in shapes() {
            let site = site(&mut draw, n, h);
            let streams = draw.values(&[rows, n, h], act);
            let (pre, post_comb) = mix(&site, &streams).unwrap();
            let there = on(&device, act, &streams);
            let (got_pre, got_post_comb) = mix(&site_on(&device, &site), &there).unwrap();
            // f32 throughout, also with bf16 streams; 20 divisions in a row.
            let what = format!("{rows} rows, {n} streams of {h}");
            assert_close(&format!("pre: {what}"), &got_pre, &pre, 2e-5);
            assert_close(
                &format!("post and comb: {what}"),
                &got_post_comb,
                &post_comb,
                2e-5,
            );

            let y = draw.values(&[rows, h], act);
            let got = expand(
                &on(&device, act, &y),
                &there,
                &plain(&device, &post_comb),
                act,
            );
            let expected = expand(&y, &streams, &post_comb, act);
            assert_close(
                &format!("expand: {what}"),
                &got.unwrap(),
                &expected.unwrap(),
                tolerance,
            );
        }
    }
}

/// A row's coefficients are the same bits alone and in a small batch, and in batches from 96 rows on, where bf16
/// is for tensor cores.
#[test]
fn gpu_mix_of_a_row_does_not_depend_on_others() {
    let (device, mut draw) = (gpu(), Draw::new());
    for (act, _) in ACTS {
        for h in [33, 256] {
            let site = site_on(&device, &site(&mut draw, 4, h));
            for (batch, parts) in [
                (95, [(0, 1), (62, 2), (5, 83)]),
                (300, [(0, 96), (190, 110), (17, 200)]),
            ] {
                let streams = on(&device, act, &draw.values(&[batch, 4, h], act));
                let (pre, post_comb) = mix(&site, &streams).unwrap();
                for (first, rows) in parts {
                    let some = streams.narrow(0, first, rows).unwrap();
                    let (some_pre, some_post_comb) = mix(&site, &some).unwrap();
                    for (some, all) in [(some_pre, &pre), (some_post_comb, &post_comb)] {
                        let all = values(&all.narrow(0, first, rows).unwrap());
                        let what = format!("{rows} of {batch} rows, from {first}");
                        assert_eq!(values(&some), all, "{act:?}, {h}: {what}");
                    }
                }
            }
        }
    }
}

/// In one launch as in two, for every number of streams.
#[test]
fn gpu_expand_norm_is_both() {
    let (device, mut draw) = (gpu(), Draw::new());
    for (act, tolerance) in ACTS {
        for (rows, n, h) in shapes() {
            let y = on(&device, act, &draw.values(&[rows, h], act));
            let streams = on(&device, act, &draw.values(&[rows, n, h], act));
            let post_comb = plain(&device, &draw.values(&[rows, n + n * n], Act::F32));
            let pre = plain(&device, &draw.values(&[rows, n], Act::F32));
            let weight = plain(&device, &draw.values(&[h], Act::F32));
            let (streams_then, normed) =
                expand_norm(&y, &streams, &post_comb, &pre, &weight, 1e-6, act).unwrap();
            let expected = expand(&y, &streams, &post_comb, act).unwrap();
            let what = format!("{act:?}: {rows} rows, {n} streams of {h}");
            assert_eq!(values(&streams_then), values(&expected), "{what}");
            // Blocks of other sizes add squares up in another order.
            let expected = collapse_norm(&expected, &pre, &weight, 1e-6, act).unwrap();
            assert_close(&what, &normed, &expected, tolerance);
        }
    }
}

/// What is no number in one row stays in that row, and is none in the same places as on the CPU.
#[test]
fn gpu_mixing_of_what_is_no_number() {
    let (device, mut draw) = (gpu(), Draw::new());
    let n = 4;
    for (act, tolerance) in ACTS {
        for (rows, h) in [(5, 64), (5, 37), (300, 64)] {
            let site = site(&mut draw, n, h);
            let mut x = values(&draw.values(&[rows, n, h], act));
            x[7] = f32::NAN;
            x[2 * n * h + 1] = f32::INFINITY;
            x[4 * n * h - 1] = f32::NEG_INFINITY;
            let streams = Tensor::from_vec(x, (rows, n, h), &Device::Cpu).unwrap();
            let there = on(&device, act, &streams);
            let (pre, post_comb) = mix(&site, &streams).unwrap();
            let (got_pre, got_post_comb) = mix(&site_on(&device, &site), &there).unwrap();
            assert_same("pre", &got_pre, &pre, 2e-5);
            assert_same("post and comb", &got_post_comb, &post_comb, 2e-5);

            let weight = draw.values(&[h], Act::F32);
            let even = draw.values(&[rows, n], Act::F32);
            let (there_even, there_weight) = (plain(&device, &even), plain(&device, &weight));
            let got = collapse_norm(&there, &there_even, &there_weight, 1e-6, act).unwrap();
            let expected = collapse_norm(&streams, &even, &weight, 1e-6, act).unwrap();
            assert_same("collapse norm", &got, &expected, tolerance);

            let y = draw.values(&[rows, h], act);
            let given = draw.values(&[rows, n + n * n], Act::F32);
            let there_y = on(&device, act, &y);
            let got = expand(&there_y, &there, &plain(&device, &given), act).unwrap();
            let expected = expand(&y, &streams, &given, act).unwrap();
            assert_same("expand", &got, &expected, tolerance);
        }
    }
}
