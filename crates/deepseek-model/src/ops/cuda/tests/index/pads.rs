//! Choices of a step in a graph, which has pad rows.

use candle_core::{Device, Tensor};

use super::{
    super::super::index::{Outputs, Sizes, choose},
    Draw, Level, REQUESTS, Scene, gpu, lists, shape,
};
use crate::{
    ops::{Act, Choice, FaultWord, IndexQueries, index::Chosen},
    rows::DeviceRows,
};

/// Pad rows of a graph choose nothing, and the others do not depend on how many rows are scored at a
/// time, nor on how many of their numbers shared memory holds.
#[test]
fn gpu_choice_of_a_row_depends_on_no_other() {
    let (device, mut draw) = (gpu(), Draw::new());
    for (shape, act) in [
        (shape(4, 16, 1, 8, (6, 4)), Act::F32),
        (shape(32, 128, 1, 8, (6, 4)), Act::Bf16),
    ] {
        let scene = Scene::new(shape, act, &REQUESTS, true, &mut draw);
        let source = Level::Source(shape.candidates);
        let kept = scene.run(&device, source, false).candidates.unwrap();
        // Whatever the lists of the pad rows say.
        let more = Tensor::cat(&[&kept.entries, &kept.entries.narrow(0, 45, 2).unwrap()], 0);
        let more = Choice {
            entries: more.unwrap(),
            width: kept.width,
        };
        let size = shape.candidates.block_size;
        let within = (Level::Within(&kept, size), Level::Within(&more, size));
        for held in [None, Some(0), Some(20), Some(200)] {
            check_alone(&device, &scene, (source, source), held);
            check_alone(&device, &scene, within, held);
        }
    }
}

/// `padded` is the level for the rows and two pad rows.
fn check_alone(
    device: &Device,
    scene: &Scene<'_>,
    (level, padded): (Level<'_>, Level<'_>),
    held: Option<usize>,
) {
    let whole = scene.run(device, level, false);
    let word = FaultWord::new(device).unwrap();
    scene.on(device, Some(&word), |queries, keys| {
        let rows = queries.rows.on_device().unwrap();
        let pads = Tensor::full(Choice::NONE, 2, device).unwrap();
        let cat = |a: &Tensor, b: &Tensor| Tensor::cat(&[a, b], 0).unwrap();
        let more = |tensor: &Tensor| cat(tensor, &tensor.narrow(0, 0, 2).unwrap());
        let rows = DeviceRows {
            positions: cat(&rows.positions, &pads),
            requests: cat(&rows.requests, &pads),
            spans: rows.spans.clone(),
        };
        let (q, weights) = (more(queries.queries), more(queries.head_weights));
        let queries = IndexQueries {
            queries: &q,
            head_weights: &weights,
            ..*queries
        };
        let most = queries.rows.most_entries(keys.ratio);
        let mut sizes = Sizes::of(&queries, keys, padded, most).unwrap();
        sizes.chunk = 3;
        sizes.held = held.unwrap_or(sizes.held);
        let outputs = Outputs::new(&sizes, device, false).unwrap();
        choose(&queries, &rows, keys, padded, &sizes, &outputs).unwrap();
        let chosen = Chosen::from(outputs);
        let pairs = [
            (Some(chosen.choice), Some(whole.choice)),
            (chosen.candidates, whole.candidates),
        ];
        for (got, whole) in pairs {
            assert_eq!(got.is_some(), whole.is_some());
            let (Some(got), Some(whole)) = (got, whole) else {
                continue;
            };
            let (got, whole) = (lists(&got), lists(&whole));
            assert_eq!(got[..whole.len()], whole);
            assert!(got[whole.len()..].iter().all(Vec::is_empty));
        }
    });
    assert_eq!(word.take().unwrap(), None);
}
