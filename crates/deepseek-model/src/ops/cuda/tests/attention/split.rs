//! Attention of few rows in bf16, whose keys are split over blocks.

use candle_core::{Device, Tensor};

use super::{
    super::super::attention::{Split, attend},
    Draw, Request, Scene, Shape, assert_close, gpu, requests, small, values,
};
use crate::{
    ops::{Act, Choice, EntryKeys},
    rows::DeviceRows,
};

/// As ACTS has it, for sums of hundreds of keys whose weights are rounded.
const TOLERANCE: f32 = 8e-3;

/// Steps of few rows: decode of one sequence and more, within the window and beyond it, chunks, and a
/// request of which no row goes on.
fn steps() -> Vec<Vec<Request>> {
    let decode = |slot, pos| (slot, pos, 1, 1, 0);
    vec![
        requests(&[decode(1, 700)]),
        requests(&[decode(0, 0), decode(4, 300)]),
        requests(&[
            decode(2, 127),
            (1, 40, 3, 0, 0),
            decode(5, 128),
            decode(0, 1),
        ]),
        requests(&[(3, 260, 4, 4, 0), decode(2, 5)]),
        requests(&[(3, 0, 9, 7, 0), (0, 200, 3, 2, 190)]),
        requests(&[(1, 90, 20, 17, 0)]),
        requests(&[(2, 0, 33, 33, 0)]),
    ]
}

fn shape(heads: usize, window: usize, width: usize) -> Shape {
    Shape {
        heads,
        dim: 512,
        window,
        width,
        per_page: 16,
        longest: 0,
    }
}

/// Splits of one tile and of several, with all keys and without any; heads that fill no block.
#[test]
fn gpu_attention_of_few_rows_splits_keys() {
    let (device, mut draw) = (gpu(), Draw::new());
    let mut shapes = vec![shape(20, 24, 150), shape(9, 130, 0)];
    if !small() {
        shapes.extend([shape(64, 128, 512), shape(40, 50, 70)]);
    }
    for shape in shapes {
        for requests in steps() {
            let scene = Scene::of(shape, Act::Bf16, requests, &mut draw);
            let (got, expected) = (scene.run(&device), scene.run(&Device::Cpu));
            assert_close("attention", &got, &expected, TOLERANCE);
        }
    }
}

#[test]
fn gpu_attention_of_few_rows_with_sinks_of_any_size() {
    let (device, mut draw) = (gpu(), Draw::new());
    for sink in [-1e4f32, -30.0, 30.0, 1e4] {
        let requests = requests(&[(1, 300, 1, 1, 0), (0, 2, 1, 1, 0)]);
        let mut scene = Scene::of(shape(20, 24, 150), Act::Bf16, requests, &mut draw);
        scene.sink = Tensor::full(sink, 20, &Device::Cpu).unwrap();
        let (got, expected) = (scene.run(&device), scene.run(&Device::Cpu));
        assert_close("attention", &got, &expected, TOLERANCE);
    }
}

/// A key that is no number makes its row none, in all heads, and no other.
#[test]
fn gpu_attention_of_few_rows_hides_no_missing_number() {
    let (device, mut draw) = (gpu(), Draw::new());
    let requests = requests(&[(1, 300, 2, 2, 0)]);
    let mut scene = Scene::of(shape(20, 24, 150), Act::Bf16, requests, &mut draw);
    // The first row has all entries that it may have, the second has none.
    let entry = scene.choice.to_vec2::<u32>().unwrap()[0][100] as usize;
    let row = scene.pages[0][entry / 16] as usize * 16 + entry % 16;
    let nan = Tensor::full(f32::NAN, (1, 1), &Device::Cpu).unwrap();
    scene.pool = scene.pool.slice_assign(&[row..=row, 7..=7], &nan).unwrap();
    let got = values(&scene.run(&device));
    let (first, second) = got.split_at(20 * 512);
    assert!(first.iter().all(|x| x.is_nan()));
    assert!(second.iter().all(|x| x.is_finite()));
}

/// Pad rows of a graph are zero whatever their positions and choices say. The others keep their bits
/// if they fill the graph by more than half, and so they do from one run to the next.
#[test]
fn gpu_attention_of_few_rows_in_a_graph() {
    let (device, mut draw) = (gpu(), Draw::new());
    let requests = requests(&[(1, 300, 2, 2, 0), (0, 2, 1, 1, 0)]);
    let scene = Scene::of(shape(20, 24, 150), Act::Bf16, requests, &mut draw);
    scene.on(&device, |operands| {
        let rows = operands.running.on_device().unwrap();
        let entries = operands.entries.as_ref().unwrap();
        let attend = |q: &Tensor, rows: &DeviceRows, choice: &Tensor| {
            let choice = Choice {
                entries: choice.clone(),
                width: entries.choice.width,
            };
            let entries = EntryKeys {
                choice: &choice,
                ..*entries
            };
            let out = attend(q, rows, &operands.window, Some(&entries), &operands.sink);
            values(&out.unwrap())
        };
        let (q, choice) = (&operands.q, &entries.choice.entries);
        let alone = attend(q, rows, choice);
        assert_eq!(attend(q, rows, choice), alone);
        let pad = Tensor::full(Choice::NONE, 1, &device).unwrap();
        let more = |tensor: &Tensor, pad: &Tensor| Tensor::cat(&[tensor, pad], 0).unwrap();
        let padded = DeviceRows {
            positions: more(&rows.positions, &pad),
            requests: more(&rows.requests, &pad),
            spans: rows.spans.clone(),
        };
        let choice = more(choice, &choice.narrow(0, 0, 1).unwrap());
        let out = attend(&more(q, &q.narrow(0, 0, 1).unwrap()), &padded, &choice);
        assert_eq!(out[..alone.len()], alone);
        assert!(out[alone.len()..].iter().all(|x| *x == 0.0));
    });
}

/// Every key is in one split, and no split is empty when all keys are there.
#[test]
fn gpu_splits_cover_the_keys() {
    for rows in 1..66 {
        for groups in 1..=4 {
            for keys in [1, 64, 65, 128, 640, 1152] {
                let split = Split::of(rows, groups, keys);
                assert!(split.n * split.keys >= keys, "{rows} {groups} {keys}");
                assert!((split.n - 1) * split.keys < keys, "{rows} {groups} {keys}");
                assert_eq!(split.keys % 64, 0);
                assert!(rows * groups * split.n < 264, "{rows} {groups} {keys}");
            }
        }
    }
    assert_eq!(Split::of(1, 4, 640), Split { n: 10, keys: 64 });
    assert_eq!(Split::of(32, 4, 640), Split { n: 1, keys: 640 });
}
