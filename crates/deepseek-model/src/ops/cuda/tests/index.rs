//! The indexer's choice, on keys that are NaN wherever no row may read.
//!
//! Where choices are compared with those of the CPU, all values are small whole numbers: every sum is
//! exact in any order, and many are equal, so that ties matter.

use candle_core::{DType, Device, Tensor};

use super::{ACTS, Draw, Sparse, assert_close, gpu, on, plain, small, values};
use crate::{
    cache::{PageLists, PagedRows},
    config::CandidateConfig,
    ops::{
        Act, Choice, FaultWord, Faults, IndexKeys, IndexQueries, Level, Site, choose_entries,
        index::Chosen, topk::keep_best,
    },
    rows::Rows,
};

mod kept;
mod pads;

/// Sizes of a case.
#[derive(Clone, Copy)]
struct Shape {
    heads: usize,
    dim: usize,
    ratio: usize,
    per_page: usize,
    topk: usize,
    candidates: CandidateConfig,
}

fn shape(heads: usize, dim: usize, ratio: usize, topk: usize, blocks: (usize, usize)) -> Shape {
    Shape {
        heads,
        dim,
        ratio,
        per_page: 16,
        topk,
        candidates: CandidateConfig {
            source: 0,
            top_blocks: blocks.0,
            block_size: blocks.1,
        },
    }
}

/// `(slot, first position, rows)`: a first chunk, a later one, decode, and one without rows.
type Requests = [(usize, usize, usize)];
const REQUESTS: [(usize, usize, usize); 5] =
    [(0, 0, 40), (3, 150, 9), (1, 421, 1), (4, 9, 0), (2, 0, 1)];

/// What is the same on both devices.
struct Scene<'a> {
    shape: Shape,
    act: Act,
    requests: &'a Requests,
    queries: Tensor,
    head_weights: Tensor,
    pool: Sparse,
    pages: Vec<Vec<u32>>,
}

impl<'a> Scene<'a> {
    /// With whole numbers if `whole`, else with any.
    fn new(shape: Shape, act: Act, requests: &'a Requests, whole: bool, draw: &mut Draw) -> Self {
        let rows = Rows::pack(&Device::Cpu, requests.iter().copied());
        let entries = |request: usize| rows.spans()[request].end_pos() / shape.ratio;
        let n_pages: Vec<_> = (0..requests.len())
            .map(|request| entries(request).div_ceil(shape.per_page).max(1))
            .collect();
        let total = n_pages.iter().sum::<usize>() + 2;
        let mut order = draw.shuffled(total);
        let pages: Vec<Vec<u32>> = n_pages
            .iter()
            .map(|n| order.split_off(order.len() - n))
            .collect();
        let mut value = || {
            if whole {
                draw.below(7) as f32 - 3.0
            } else {
                draw.value(act)
            }
        };
        let mut pool = Sparse::new(total * shape.per_page, shape.dim);
        for (request, pages) in pages.iter().enumerate() {
            for entry in 0..entries(request) {
                let page = pages[entry / shape.per_page] as usize;
                pool.draw(page * shape.per_page + entry % shape.per_page, &mut value);
            }
        }
        let mut table = |width: usize| {
            let values: Vec<f32> = (0..rows.len() * width).map(|_| value()).collect();
            Tensor::from_vec(values, (rows.len(), width), &Device::Cpu).unwrap()
        };
        Self {
            shape,
            act,
            requests,
            queries: table(shape.heads * shape.dim),
            head_weights: table(shape.heads),
            pool,
            pages,
        }
    }

    /// Makes an entry's key NaN.
    fn spoil(&mut self, request: usize, entry: usize) {
        let (per_page, width) = (self.shape.per_page, self.shape.dim);
        let page = self.pages[request][entry / per_page] as usize;
        self.pool.values[(page * per_page + entry % per_page) * width] = f32::NAN;
    }

    /// Calls `body` with the operands on a device, CPU or GPU.
    fn on<R>(
        &self,
        device: &Device,
        word: Option<&FaultWord>,
        body: impl FnOnce(&IndexQueries<'_>, &IndexKeys<'_>) -> R,
    ) -> R {
        let (shape, cpu) = (self.shape, device.is_cpu());
        let place = |tensor: &Tensor| {
            if cpu {
                tensor.clone()
            } else {
                on(device, self.act, tensor)
            }
        };
        let (content, held) = (place(&self.pool.tensor()), self.act.dtype());
        let held = if cpu { DType::F32 } else { held };
        let n_pages = content.dim(0).unwrap() / shape.per_page;
        let pool = PagedRows::new(n_pages, shape.per_page, shape.dim, (held, device)).unwrap();
        pool.data().slice_set(&content, 0, 0).unwrap();
        let queries = IndexQueries {
            queries: &place(&self.queries),
            head_weights: &place(&self.head_weights),
            rows: &Rows::pack(device, self.requests.iter().copied()),
            topk: shape.topk,
            faults: Faults::new(word, 3, Site::Index),
        };
        let keys = IndexKeys {
            pool: &pool,
            pages: &PageLists::new(self.pages.iter().map(Vec::as_slice)),
            ratio: shape.ratio,
        };
        body(&queries, &keys)
    }

    /// The whole operation, which finds no fault.
    fn run(&self, device: &Device, level: Level<'_>, want_scores: bool) -> Chosen {
        let word = (!device.is_cpu()).then(|| FaultWord::new(device).unwrap());
        let chosen = self.on(device, word.as_ref(), |queries, keys| {
            choose_entries(queries, keys, level, want_scores).unwrap()
        });
        assert_eq!(word.and_then(|word| word.take().unwrap()), None);
        chosen
    }
}

/// The numbers of each row, after which there is nothing.
fn lists(choice: &Choice) -> Vec<Vec<u32>> {
    let (rows, width) = choice.entries.dims2().unwrap();
    assert_eq!(width, choice.width);
    let all = choice
        .entries
        .flatten_all()
        .unwrap()
        .to_vec1::<u32>()
        .unwrap();
    let lists = (0..rows).map(|row| {
        let row = &all[row * width..(row + 1) * width];
        let n = row.iter().take_while(|e| **e != Choice::NONE).count();
        assert!(row[n..].iter().all(|e| *e == Choice::NONE), "{row:?}");
        assert!(row[..n].is_sorted_by(|a, b| a < b), "{row:?}");
        row[..n].to_vec()
    });
    lists.collect()
}

/// All three levels of a scene on both devices.
fn compare_levels(scene: &Scene<'_>, device: &Device) {
    let Shape {
        topk, candidates, ..
    } = scene.shape;
    for want_scores in [false, true] {
        let run = |device: &Device, level: Level<'_>| scene.run(device, level, want_scores);
        let (got, expected) = (run(device, Level::Single), run(&Device::Cpu, Level::Single));
        assert_eq!(got.choice.width, topk);
        assert_eq!(lists(&got.choice), lists(&expected.choice), "single");

        let source = Level::Source(candidates);
        let (got, expected) = (run(device, source), run(&Device::Cpu, source));
        assert_eq!(lists(&got.choice), lists(&expected.choice), "source");
        let (kept, expected) = (got.candidates.unwrap(), expected.candidates.unwrap());
        assert_eq!(kept.width, candidates.top_blocks);
        assert_eq!(lists(&kept), lists(&expected), "kept");

        let size = candidates.block_size;
        let got = run(device, Level::Within(&kept, size));
        let expected = run(&Device::Cpu, Level::Within(&expected, size));
        assert_eq!(lists(&got.choice), lists(&expected.choice), "within");
        if let (Some(got), Some(expected)) = (&got.scores, &expected.scores) {
            assert_eq!(values(got), values(expected), "scores");
        }
    }
}

/// More and fewer entries than are chosen, more and fewer blocks than are kept; one head, of which
/// half the scores are 0, more heads than a warp takes at a time, and weights that are exact: heads
/// and channels are powers of 4.
#[test]
fn gpu_choice_with_ties() {
    let (device, mut draw) = (gpu(), Draw::new());
    for (act, _) in ACTS {
        for shape in [
            shape(1, 16, 1, 8, (6, 4)),
            shape(4, 16, 2, 16, (5, 4)),
            shape(16, 64, 1, 30, (9, 8)),
            shape(64, 4, 1, 64, (100, 3)),
            shape(4, 64, 3, 500, (30, 8)),
            shape(1, 4, 512, 4, (3, 8)),
            // In bf16 on tensor cores.
            shape(32, 128, 1, 40, (9, 8)),
        ] {
            let scene = Scene::new(shape, act, &REQUESTS, true, &mut draw);
            compare_levels(&scene, &device);
        }
    }
}

/// Contexts of many tiles, of scores and of choosing threads.
#[test]
fn gpu_choice_in_long_contexts() {
    let (device, mut draw) = (gpu(), Draw::new());
    let length = if small() { 2500 } else { 40_000 };
    let requests = [(0, length, 1), (1, length / 3, 5)];
    let narrow = shape(4, 16, 1, 512, (length / 20, 8));
    for (act, _) in ACTS {
        let scene = Scene::new(narrow, act, &requests, true, &mut draw);
        compare_levels(&scene, &device);
    }
    // Rows that fill no block of the tensor cores, in tiles of two requests.
    let requests = [(0, 3000, 14), (1, 1024, 5), (2, 130, 6), (3, 2047, 1)];
    let wide = shape(32, 128, 1, 512, (60, 8));
    let scene = Scene::new(wide, Act::Bf16, &requests, true, &mut draw);
    compare_levels(&scene, &device);
}

/// Any values: scores as close as another order of summation leaves them, and the choice exactly that
/// of the scores.
#[test]
fn gpu_scores_and_what_they_choose() {
    let (device, mut draw) = (gpu(), Draw::new());
    for (act, _) in ACTS {
        for shape in [shape(5, 40, 1, 20, (6, 5)), shape(32, 128, 2, 33, (9, 8))] {
            let scene = Scene::new(shape, act, &REQUESTS, false, &mut draw);
            let source = Level::Source(shape.candidates);
            let kept = scene.run(&device, source, false).candidates.unwrap();
            let kept_here = Choice {
                entries: plain(&Device::Cpu, &kept.entries),
                width: kept.width,
            };
            let size = shape.candidates.block_size;
            for (there, here) in [
                (Level::Single, Level::Single),
                (Level::Within(&kept, size), Level::Within(&kept_here, size)),
            ] {
                let got = scene.run(&device, there, true);
                let expected = scene.run(&Device::Cpu, here, true).scores.unwrap();
                let scores = got.scores.unwrap();
                for (got, expected) in values(&scores).iter().zip(values(&expected)) {
                    assert_eq!(got.is_finite(), expected.is_finite());
                }
                // No score lies below.
                let finite = |scores: &Tensor| scores.maximum(-10.0).unwrap();
                assert_close("scores", &finite(&scores), &finite(&expected), 1e-6);
                let best = values(&scores);
                let rows = best.chunks_exact(scores.dim(1).unwrap());
                for (row, list) in rows.zip(lists(&got.choice)) {
                    let mut pairs: Vec<_> = row.iter().copied().zip(0..).collect();
                    keep_best(&mut pairs, shape.topk);
                    let mut best: Vec<u32> = pairs.iter().map(|pair| pair.1).collect();
                    best.sort_unstable();
                    assert_eq!(list, best);
                }
            }
        }
    }
}

/// A NaN among the entries that decide is reported, and no choice leaves what the rows see; one among
/// entries that are not read is not reported.
#[test]
fn gpu_scores_that_are_no_numbers_are_reported() {
    let (device, mut draw) = (gpu(), Draw::new());
    for (shape, act) in [
        (shape(4, 16, 1, 8, (6, 4)), Act::F32),
        (shape(32, 128, 1, 8, (6, 4)), Act::Bf16),
    ] {
        check_reports(&device, Scene::new(shape, act, &REQUESTS, true, &mut draw));
    }
}

fn check_reports(device: &Device, mut scene: Scene<'_>) {
    let (shape, word) = (scene.shape, FaultWord::new(device).unwrap());
    let source = Level::Source(shape.candidates);
    let mut kept = scene.run(device, source, false).candidates.unwrap();
    scene.spoil(2, 100);
    let run = |level: Level<'_>| {
        let chosen = scene.on(device, Some(&word), |queries, keys| {
            choose_entries(queries, keys, level, false).unwrap()
        });
        let lists = lists(&chosen.choice);
        let decode = &lists[49];
        assert_eq!(decode.len(), 8);
        assert!(decode.iter().all(|e| *e < 422 && *e != 100), "{decode:?}");
        word.take().unwrap()
    };
    assert_eq!(run(Level::Single), Some((3, Site::Index)));
    assert_eq!(run(source), Some((3, Site::Index)));
    // All rows go without block 25, whether or not they kept it.
    let blocks = kept
        .entries
        .flatten_all()
        .unwrap()
        .to_vec1::<u32>()
        .unwrap();
    let blocks = blocks.chunks_exact(6).flat_map(|row| {
        let mut row: Vec<u32> = row.iter().copied().filter(|b| *b != 25).collect();
        row.resize(6, Choice::NONE);
        row
    });
    let blocks: Vec<u32> = blocks.collect();
    kept.entries = Tensor::from_vec(blocks, kept.entries.dims(), device).unwrap();
    assert_eq!(run(Level::Within(&kept, 4)), None);
}
