//! The routed experts.

use candle_core::{Device, Tensor};

use super::{ACTS, Draw, assert_close, gpu, on, plain, small, values};
use crate::ops::{Act, Experts, routed_experts, sort_choices};

/// Who the rows of a case choose.
#[derive(Clone, Copy, Debug)]
enum Chosen {
    Any,
    /// All rows the last expert, k times.
    One,
    /// Even experts only, so that half have no rows.
    Even,
}

/// Rows, experts, choices, h, m. Widths below a tile, between tiles, odd multiples of 8, no multiple
/// of 8 or of 2, and the demo's; all heights of tiles, and experts above the threads of a block. Of
/// multiples of 64 in bf16, Hopper's own kernels make all: with one step and with more than there are stages,
/// tiles of one row more or less, more tiles than multiprocessors, few rows of an expert on average but
/// many of one, and matrices of no whole number of tiles of any height.
const CASES: [(usize, usize, usize, usize, usize, Chosen); 35] = [
    (1, 1, 1, 8, 8, Chosen::Any),
    (1, 8, 2, 192, 96, Chosen::Any),
    (2, 3, 2, 40, 24, Chosen::Any),
    (7, 8, 2, 192, 96, Chosen::Any),
    (7, 5, 3, 33, 17, Chosen::Even),
    (64, 8, 2, 192, 96, Chosen::Any),
    (64, 1, 1, 72, 56, Chosen::Any),
    (65, 4, 3, 200, 136, Chosen::One),
    (65, 2, 1, 66, 34, Chosen::Even),
    (65, 3, 2, 63, 129, Chosen::Any),
    (65, 384, 6, 64, 32, Chosen::Any),
    (300, 8, 2, 192, 96, Chosen::Even),
    (300, 6, 2, 64, 32, Chosen::One),
    (300, 31, 6, 136, 40, Chosen::Any),
    (2000, 8, 2, 192, 96, Chosen::Any),
    (2000, 384, 6, 256, 64, Chosen::Any),
    (17, 1, 1, 64, 64, Chosen::Any),
    (127, 3, 1, 64, 128, Chosen::One),
    (129, 2, 1, 320, 64, Chosen::One),
    (128, 1, 1, 192, 448, Chosen::Any),
    (300, 7, 2, 256, 192, Chosen::Even),
    (300, 5, 6, 832, 384, Chosen::Any),
    (3000, 9, 4, 1088, 320, Chosen::Any),
    (1, 16, 6, 832, 384, Chosen::Any),
    (1, 2, 2, 64, 64, Chosen::One),
    (8, 16, 6, 1088, 2112, Chosen::Any),
    (21, 16, 6, 128, 192, Chosen::Even),
    (17, 33, 1, 192, 64, Chosen::One),
    (40, 33, 2, 320, 128, Chosen::One),
    (47, 1, 1, 5120, 96, Chosen::Any),
    (65, 3, 1, 2368, 320, Chosen::Any),
    (95, 1, 1, 320, 2304, Chosen::Any),
    (97, 2, 1, 128, 192, Chosen::One),
    (128, 16, 6, 1088, 576, Chosen::Any),
    (40, 5, 3, 448, 64, Chosen::Even),
];

/// All that an operation takes, on the CPU.
struct Case {
    experts: Experts,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    shared: Tensor,
}

impl Case {
    fn draw(
        draw: &mut Draw,
        (rows, experts, k, h, m, chosen): (usize, usize, usize, usize, usize, Chosen),
        limit: f64,
        act: Act,
    ) -> Self {
        let ids = (0..rows * k).map(|_| match chosen {
            Chosen::Any => draw.below(experts),
            Chosen::One => experts - 1,
            Chosen::Even => draw.below(experts.div_ceil(2)) * 2,
        });
        let ids: Vec<u32> = ids.map(|id| id as u32).collect();
        // Of a size that leaves hidden values about 1, as in a model.
        let scaled = |draw: &mut Draw, dims: &[usize]| {
            let size = (3.0 / dims[2] as f64).sqrt();
            let values = values(&draw.values(dims, Act::F32));
            let values = values.iter().map(|x| act.store(x * size as f32)).collect();
            Tensor::from_vec::<_, f32>(values, dims, &Device::Cpu).unwrap()
        };
        Self {
            experts: Experts {
                w13: scaled(draw, &[experts, 2 * m, h]),
                w2: scaled(draw, &[experts, h, m]),
                limit,
            },
            x: draw.values(&[rows, h], act),
            ids: Tensor::from_vec(ids, (rows, k), &Device::Cpu).unwrap(),
            weights: draw.values(&[rows, k], Act::F32),
            shared: draw.values(&[rows, h], act),
        }
    }

    fn on(&self, device: &Device, act: Act) -> Self {
        Self {
            experts: Experts {
                w13: on(device, act, &self.experts.w13),
                w2: on(device, act, &self.experts.w2),
                limit: self.experts.limit,
            },
            x: on(device, act, &self.x),
            ids: plain(device, &self.ids),
            weights: plain(device, &self.weights),
            shared: on(device, act, &self.shared),
        }
    }

    fn run(&self, act: Act) -> Tensor {
        self.run_rows(0, self.x.dims()[0], act)
    }

    /// Of `n` rows only, which the tensors' views begin at `start`.
    fn run_rows(&self, start: usize, n: usize, act: Act) -> Tensor {
        let part = |tensor: &Tensor| tensor.narrow(0, start, n).unwrap();
        let (x, ids) = (part(&self.x), part(&self.ids));
        let (weights, shared) = (part(&self.weights), part(&self.shared));
        let sorted = sort_choices(&self.experts, &x, &ids).unwrap();
        let chosen = (&ids, &weights);
        routed_experts(&self.experts, &x, chosen, &sorted, &shared, act).unwrap()
    }
}

#[test]
fn gpu_experts_as_the_cpu() {
    let (device, mut draw) = (gpu(), Draw::new());
    for (act, tolerance) in ACTS {
        for (i, case) in CASES.into_iter().enumerate() {
            if small() && case.0 > 100 {
                continue;
            }
            let limit = [0.0, 1.5][i % 2];
            let here = Case::draw(&mut draw, case, limit, act);
            let got = here.on(&device, act).run(act);
            // A value of each of the products, of the pointwise part and of the sum may round to a
            // neighbour.
            let tolerance = 3.0 * tolerance;
            assert_close(
                &format!("{act:?} {case:?}"),
                &got,
                &here.run(act),
                tolerance,
            );
        }
    }
}

/// A row alone is in tiles of 16 rows, in the batch in ones of 64, at another place; on Hopper in ones of 32, 96
/// or 128, of other instructions, too, whose factors have changed their parts.
#[test]
fn gpu_experts_give_a_row_the_same_result_alone_and_in_a_batch() {
    let (device, mut draw) = (gpu(), Draw::new());
    for (act, _) in ACTS {
        for (h, m) in [(192, 96), (56, 40), (33, 17), (192, 128), (1088, 576)] {
            let rows = 300;
            let case = (rows, 5, 2, h, m, Chosen::Any);
            let there = Case::draw(&mut draw, case, 1.5, act).on(&device, act);
            let whole = there.run(act);
            for (start, n) in [(0, 1), (150, 1), (299, 1), (3, 7), (100, 64), (17, 240)] {
                let part = values(&there.run_rows(start, n, act));
                let expected = values(&whole.narrow(0, start, n).unwrap());
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(
                    bits(&part),
                    bits(&expected),
                    "{act:?}, {h} x {m}, {n} rows from {start}"
                );
            }
        }
    }
}

/// A missing number stays one on its way through the products and the clamps, and in its row.
#[test]
fn gpu_experts_leave_a_missing_number_missing() {
    let (device, mut draw) = (gpu(), Draw::new());
    for (act, _) in ACTS {
        for (h, m) in [(72, 40), (128, 64)] {
            let case = (65, 4, 2, h, m, Chosen::Any);
            let mut case = Case::draw(&mut draw, case, 1.5, act);
            let good = values(&case.on(&device, act).run(act));
            let mut x = values(&case.x);
            x[3 * h + 5] = f32::NAN;
            case.x = Tensor::from_vec(x, (65, h), &Device::Cpu).unwrap();
            let got = values(&case.on(&device, act).run(act));
            for (row, (got, good)) in got.chunks(h).zip(good.chunks(h)).enumerate() {
                let as_it_should = match row {
                    3 => got.iter().all(|x| x.is_nan()),
                    _ => got == good,
                };
                assert!(as_it_should, "{act:?}, {h} x {m}, row {row}");
            }
        }
    }
}

/// Ids that are no expert's, which a fault may leave, add nothing and touch nothing.
#[test]
fn gpu_experts_pass_over_ids_out_of_range() {
    let (device, mut draw) = (gpu(), Draw::new());
    for (act, _) in ACTS {
        for (h, m) in [(72, 40), (128, 64)] {
            let case = (65, 4, 2, h, m, Chosen::Any);
            let mut case = Case::draw(&mut draw, case, 0.0, act);
            let good = case.on(&device, act).run(act);
            let mut ids: Vec<u32> = case.ids.flatten_all().unwrap().to_vec1().unwrap();
            ids[6..8].fill(4);
            ids[128..].fill(u32::MAX);
            case.ids = Tensor::from_vec(ids, (65, 2), &Device::Cpu).unwrap();
            let got = case.on(&device, act).run(act);
            for row in 0..65 {
                let from = if [3, 64].contains(&row) {
                    &case.shared
                } else {
                    &good
                };
                assert_eq!(
                    values(&got.get(row).unwrap()),
                    values(&from.get(row).unwrap()),
                    "{act:?}, row {row}"
                );
            }
        }
    }
}
