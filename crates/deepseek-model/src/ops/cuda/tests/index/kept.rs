//! Choices within kept blocks on tensor cores, which find the keys of each row by themselves.

use candle_core::{Device, Tensor};

use super::{Draw, Level, REQUESTS, Requests, Scene, gpu, lists, plain, shape, values};
use crate::{
    ops::{Act, Choice, FaultWord, Site, choose_entries},
    rows::Rows,
};

/// `width` blocks of each row, of those that it sees: none, all or the first ones, the newest, or any.
fn some_blocks(scene: &Scene<'_>, width: usize, draw: &mut Draw) -> Choice {
    let rows = Rows::pack(&Device::Cpu, scene.requests.iter().copied());
    let size = scene.shape.candidates.block_size;
    let mut all = Vec::new();
    for row in 0..rows.len() {
        let visible = (rows.locate(row).1 + 1) / scene.shape.ratio;
        let blocks = visible.div_ceil(size);
        let most = blocks.min(width);
        let mut list = match row % 5 {
            0 => Vec::new(),
            1 => (0..most as u32).collect(),
            2 => (blocks as u32).checked_sub(1).into_iter().collect(),
            _ => draw.shuffled(blocks)[..draw.below(most + 1)].to_vec(),
        };
        list.sort_unstable();
        list.resize(width, Choice::NONE);
        all.extend(list);
    }
    Choice {
        entries: Tensor::from_vec(all, (rows.len(), width), &Device::Cpu).unwrap(),
        width,
    }
}

/// More slots than a block of threads scores, and fewer than a warp; blocks that fill no step, cut by
/// what a row sees; rows that kept nothing; enough rows for the tensor cores, and too few.
#[test]
fn gpu_choice_within_any_blocks() {
    const LONG: [(usize, usize, usize); 4] = [(0, 3000, 14), (1, 1024, 5), (2, 130, 6), (3, 1, 2)];
    let (device, mut draw) = (gpu(), Draw::new());
    let cases: [(&Requests, usize, usize, usize); 7] = [
        (&REQUESTS, 1, 9, 8),
        (&REQUESTS, 2, 3, 1),
        (&REQUESTS, 1, 70, 3),
        (&LONG, 1, 300, 8),
        (&LONG, 1, 129, 8),
        (&LONG, 3, 250, 5),
        (&LONG[..1], 1, 130, 8),
    ];
    for (requests, ratio, width, size) in cases {
        let shape = shape(32, 128, ratio, 40, (width, size));
        let scene = Scene::new(shape, Act::Bf16, requests, true, &mut draw);
        let kept = some_blocks(&scene, width, &mut draw);
        let there = Choice {
            entries: plain(&device, &kept.entries),
            width,
        };
        for want_scores in [false, true] {
            let got = scene.run(&device, Level::Within(&there, size), want_scores);
            let expected = scene.run(&Device::Cpu, Level::Within(&kept, size), want_scores);
            assert_eq!(
                lists(&got.choice),
                lists(&expected.choice),
                "{width} {size}"
            );
            if let (Some(got), Some(expected)) = (&got.scores, &expected.scores) {
                assert_eq!(values(got), values(expected), "scores");
            }
        }
    }
}

/// A NaN in a block that a row kept is reported, and one in a block that none kept is not.
#[test]
fn gpu_scores_of_kept_blocks_that_are_no_numbers() {
    let (device, mut draw) = (gpu(), Draw::new());
    let shape = shape(32, 128, 1, 8, (6, 4));
    let mut scene = Scene::new(shape, Act::Bf16, &REQUESTS, true, &mut draw);
    let n_rows = Rows::pack(&Device::Cpu, REQUESTS).len();
    scene.spoil(2, 100);
    for (block, fault) in [(25u32, Some((3, Site::Index))), (24, None)] {
        // Row 49 sees 422 entries; the others keep their first block.
        let list = |row| {
            let blocks = if row == 49 { [3, block, 90] } else { [0; 3] };
            let used = if row == 49 { 3 } else { 1 };
            let end = std::iter::repeat_n(Choice::NONE, 6 - used);
            blocks.into_iter().take(used).chain(end)
        };
        let all: Vec<u32> = (0..n_rows).flat_map(list).collect();
        let kept = Choice {
            entries: Tensor::from_vec(all, (n_rows, 6), &device).unwrap(),
            width: 6,
        };
        let word = FaultWord::new(&device).unwrap();
        let chosen = scene.on(&device, Some(&word), |queries, keys| {
            choose_entries(queries, keys, Level::Within(&kept, 4), false).unwrap()
        });
        assert_eq!(word.take().unwrap(), fault, "block {block}");
        let decode = &lists(&chosen.choice)[49];
        assert!(
            decode.iter().all(|e| [3, block, 90].contains(&(e / 4))),
            "{decode:?}"
        );
        assert!(!decode.contains(&100), "{decode:?}");
        assert_eq!(decode.len(), 8);
    }
}
