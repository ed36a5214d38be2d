//! The rows of a replay layer as tensors.

use core::num::NonZeroU32;

use candle_core::{DType, Device, Tensor};
use replay_core::{
    GraphMode, LayerSchedule, Planner, PlannerConfig, ReplayLayers, ReplayPolicy, Window,
};
use replay_cuda::{
    Among, Error, LayerQuery, PAD_ROW, ReplayRows, StepBatch, gather_rows_into,
    pad_rebuilt_slots_into, replay_rows_into,
};

fn planner(policy: ReplayPolicy) -> Planner {
    let layers = ReplayLayers::from_schedule(&LayerSchedule {
        num_layers: 6,
        kv_sources: &[1, 3],
        compress_ratios: &[],
        engram_layers: &[],
    });
    Planner::new(PlannerConfig {
        window: Window::new(8).unwrap(),
        layers: layers.unwrap(),
        policy,
        sampled_rows: NonZeroU32::MIN,
    })
}

struct Step([Tensor; 5]);

impl Step {
    /// Offsets, then lengths of sequences and prompts, replay starts, and who keeps all rows.
    fn new(starts: &[u32], lists: [&[u32]; 3], keeps: &[u8]) -> Self {
        let list = |list: &[u32]| Tensor::new(list, &Device::Cpu).unwrap();
        let keeps = Tensor::new(keeps, &Device::Cpu).unwrap();
        Self([
            list(starts),
            list(lists[0]),
            list(lists[1]),
            list(lists[2]),
            keeps,
        ])
    }

    /// A decode row, a prompt of 20 tokens and the last 6 of a prompt of 18.
    fn mixed() -> Self {
        Self::new(
            &[0, 1, 21, 27],
            [&[30, 20, 18], &[29, 20, 18], &[0, 0, 0]],
            &[0, 0, 0],
        )
    }

    fn batch(&self) -> StepBatch<'_> {
        let [
            query_start_loc,
            seq_lens,
            prompt_lens,
            replay_starts,
            keeps_rows,
        ] = &self.0;
        StepBatch {
            query_start_loc,
            seq_lens,
            prompt_lens,
            replay_starts,
            keeps_rows,
        }
    }
}

fn query(planner: &Planner, layer: u32, among: Among) -> LayerQuery<'_> {
    LayerQuery {
        planner,
        mode: GraphMode::None,
        layer,
        among,
    }
}

fn u32s(tensor: &Tensor) -> Vec<u32> {
    tensor.to_vec1().unwrap()
}

/// The mixed batch: a decode row, a trimmed prompt and a short one, padded to a graph of 16 rows and
/// 4 requests.
#[test]
fn a_mixed_batch() {
    let planner = planner(ReplayPolicy::StepTail);
    let slots = Tensor::arange(100i64, 127, &Device::Cpu).unwrap();
    let out = ReplayRows::new(16, 4, (DType::U32, DType::I64), &Device::Cpu).unwrap();
    let step = Step::mixed();
    replay_rows_into(
        query(&planner, 1, Among::Batch),
        &step.batch(),
        &slots,
        &out,
    )
    .unwrap();

    let kept: Vec<u32> = [0].into_iter().chain(13..27).collect();
    assert_eq!(u32s(&out.rows), [kept.as_slice(), &[PAD_ROW]].concat());
    let positions: Vec<u32> = [29]
        .into_iter()
        .chain(12..20)
        .chain(12..18)
        .chain([0])
        .collect();
    assert_eq!(u32s(&out.positions), positions);
    let slots: Vec<i64> = kept
        .iter()
        .map(|row| 100 + i64::from(*row))
        .chain([-1])
        .collect();
    assert_eq!(out.slots.to_vec1::<i64>().unwrap(), slots);
    assert_eq!(u32s(&out.query_start_loc), [0, 1, 9, 15, 15]);
    assert_eq!(u32s(&out.kv_start), [0, 12, 0, 0]);
    assert_eq!(u32s(&out.last_rows), [0, 8, 14, PAD_ROW]);
}

/// Down to the rows that are sampled, without a scatter: the compact path.
#[test]
fn sampled_rows_of_compact_outputs() {
    let planner = planner(ReplayPolicy::PromptTail);
    let slots = Tensor::zeros(27, DType::I64, &Device::Cpu).unwrap();
    let out = ReplayRows::new(15, 3, (DType::I64, DType::I64), &Device::Cpu).unwrap();
    let step = Step::mixed();
    replay_rows_into(
        query(&planner, 2, Among::Batch),
        &step.batch(),
        &slots,
        &out,
    )
    .unwrap();
    // Outputs of the replay layers: here, each row's number in the batch.
    let kept = out.rows.clone();
    let sampled = Tensor::zeros(3, DType::U32, &Device::Cpu).unwrap();
    gather_rows_into(&[&kept], &out.last_rows, &[&sampled]).unwrap();
    assert_eq!(u32s(&sampled), [0, 20, 26]);
}

/// Under the exact policy a layer gathers from what ran in the layer before.
#[test]
fn rows_among_those_that_enter() {
    let planner = planner(ReplayPolicy::Exact);
    let slots = Tensor::zeros(20, DType::U32, &Device::Cpu).unwrap();
    let step = Step::new(&[0, 20], [&[20], &[20], &[0]], &[0]);
    let rows = |layer, among| {
        let out = ReplayRows::new(20, 1, (DType::U32, DType::U32), &Device::Cpu).unwrap();
        replay_rows_into(query(&planner, layer, among), &step.batch(), &slots, &out).unwrap();
        u32s(&out.rows)
            .into_iter()
            .filter(|row| *row != PAD_ROW)
            .collect::<Vec<_>>()
    };
    // 15, 8 and 1 rows run.
    assert_eq!(rows(1, Among::Batch), (12..20).collect::<Vec<_>>());
    assert_eq!(rows(1, Among::Entering), (7..15).collect::<Vec<_>>());
    assert_eq!(rows(2, Among::Entering), [7]);
}

/// BR-13, on tensors: after a hit that ended at 16, the first 8 rows only rebuild window KV. The
/// batch is padded by two rows, whose slots are left alone.
#[test]
fn rebuilt_rows_write_no_cached_entry() {
    let step = Step::new(&[0, 1, 13], [&[5, 20], &[4, 20], &[0, 8]], &[0, 0]);
    let wide = Tensor::arange(0i64, 15, &Device::Cpu).unwrap();
    let narrow = Tensor::arange(0u32, 15, &Device::Cpu).unwrap();
    pad_rebuilt_slots_into(&step.batch(), Window::new(8).unwrap(), &[&wide, &narrow]).unwrap();
    let expected: Vec<i64> = (0..15)
        .map(|row| if (1..9).contains(&row) { -1 } else { row })
        .collect();
    assert_eq!(wide.to_vec1::<i64>().unwrap(), expected);
    assert!(
        u32s(&narrow)
            .iter()
            .zip(&expected)
            .all(|(a, b)| *a == *b as u32)
    );
}

/// Offsets that do not begin at 0 are rows of the batch all the same, as in the kernel: taken as if
/// they began at 0, other rows would be gathered and other rows' slots written.
#[test]
fn offsets_that_begin_past_the_first_row() {
    let planner = planner(ReplayPolicy::PromptTail);
    let slots = Tensor::arange(100i64, 115, &Device::Cpu).unwrap();
    let step = Step::new(&[3, 4, 13], [&[5, 9], &[4, 9], &[0, 0]], &[0, 0]);
    let run = |among| {
        let out = ReplayRows::new(9, 2, (DType::U32, DType::I64), &Device::Cpu).unwrap();
        replay_rows_into(query(&planner, 1, among), &step.batch(), &slots, &out).unwrap();
        out
    };
    let out = run(Among::Batch);
    assert_eq!(u32s(&out.rows), [3, 5, 6, 7, 8, 9, 10, 11, 12]);
    assert_eq!(u32s(&out.positions), [4, 1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(
        out.slots.to_vec1::<i64>().unwrap(),
        [103, 105, 106, 107, 108, 109, 110, 111, 112]
    );
    assert_eq!(u32s(&out.query_start_loc), [0, 1, 9]);
    assert_eq!(u32s(&out.last_rows), [0, 8]);
    // What entered the layer is packed from 0, wherever the requests lie in the batch.
    assert_eq!(
        u32s(&run(Among::Entering).rows),
        [0, 1, 2, 3, 4, 5, 6, 7, 8]
    );

    let hit = Step::new(&[3, 13], [&[18], &[20], &[8]], &[0]);
    let list = Tensor::arange(0i64, 15, &Device::Cpu).unwrap();
    pad_rebuilt_slots_into(&hit.batch(), Window::new(8).unwrap(), &[&list]).unwrap();
    let expected: Vec<i64> = (0..15)
        .map(|row| if (3..11).contains(&row) { -1 } else { row })
        .collect();
    assert_eq!(list.to_vec1::<i64>().unwrap(), expected);
}

/// Slots that end before the batch does: rows would silently write no KV.
#[test]
fn slots_that_do_not_reach_the_last_row_are_refused() {
    let planner = planner(ReplayPolicy::Off);
    let slots = Tensor::arange(0i64, 26, &Device::Cpu).unwrap();
    let out = ReplayRows::new(27, 3, (DType::U32, DType::I64), &Device::Cpu).unwrap();
    let step = Step::mixed();
    let query = query(&planner, 1, Among::Batch);
    let error = replay_rows_into(query, &step.batch(), &slots, &out).unwrap_err();
    assert_eq!(
        error.to_string(),
        "replay-rows: slots of the batch: expected one for each of 27 rows of the batch, got 26"
    );
    assert_eq!(u32s(&out.rows), [0; 27]);
    let window = Window::new(8).unwrap();
    let error = pad_rebuilt_slots_into(&step.batch(), window, &[&slots]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "pad-rebuilt-slots: output 0: expected one for each of 27 rows of the batch, got 26"
    );
    // Requests without a row need no slot, wherever their offsets are.
    let padding = Step::new(&[40, 40], [&[0], &[0], &[0]], &[0]);
    replay_rows_into(query, &padding.batch(), &slots, &out).unwrap();
    for at in [26, 27, 40, u32::MAX] {
        let padding = Step::new(&[at, at], [&[0], &[0], &[0]], &[0]);
        pad_rebuilt_slots_into(&padding.batch(), window, &[&slots]).unwrap();
        // A request of no new row after a hit.
        let hit = Step::new(&[at, at], [&[20], &[20], &[8]], &[0]);
        pad_rebuilt_slots_into(&hit.batch(), window, &[&slots]).unwrap();
        replay_rows_into(query, &hit.batch(), &slots, &out).unwrap();
    }
    let untouched: Vec<i64> = (0..26).collect();
    assert_eq!(slots.to_vec1::<i64>().unwrap(), untouched);
}

/// A position past 2^31 as an i32 would be negative, and rotate by another angle.
#[test]
fn positions_that_an_i32_does_not_hold_are_refused() {
    let planner = planner(ReplayPolicy::Off);
    let slots = Tensor::zeros(2, DType::I64, &Device::Cpu).unwrap();
    let run = |seq_len: u32, positions| {
        let out = ReplayRows::new(2, 1, (positions, DType::I64), &Device::Cpu).unwrap();
        let step = Step::new(&[0, 2], [&[seq_len], &[5], &[0]], &[0]);
        let query = query(&planner, 1, Among::Batch);
        replay_rows_into(query, &step.batch(), &slots, &out).map(|()| out.positions)
    };
    let last = run(1 << 31, DType::I32).unwrap();
    assert_eq!(last.to_vec1::<i32>().unwrap(), [i32::MAX - 1, i32::MAX]);
    let error = run((1 << 31) + 1, DType::I32).unwrap_err();
    assert_eq!(
        error.to_string(),
        "replay-rows: position 2147483648 of row 1 does not fit I32"
    );
    let wide = run((1 << 31) + 1, DType::U32).unwrap();
    assert_eq!(u32s(&wide), [(1 << 31) - 1, 1 << 31]);
}

/// Steps and buffers that do not fit, each with its own error.
#[test]
fn what_does_not_fit_is_refused() {
    let planner = planner(ReplayPolicy::Off);
    let slots = Tensor::zeros(27, DType::I64, &Device::Cpu).unwrap();
    let run = |layer, step: &Step, max_rows, max_requests| {
        let dtypes = (DType::U32, DType::I64);
        let out = ReplayRows::new(max_rows, max_requests, dtypes, &Device::Cpu).unwrap();
        let query = query(&planner, layer, Among::Batch);
        replay_rows_into(query, &step.batch(), &slots, &out).unwrap_err()
    };
    let step = Step::mixed();
    let error = run(3, &step, 27, 3);
    assert!(
        matches!(
            error,
            Error::NoSuchLayer {
                layer: 3,
                n_layers: 3,
                ..
            }
        ),
        "{error}"
    );
    let error = run(1, &step, 26, 3);
    assert!(
        matches!(
            error,
            Error::TooManyRows {
                n_rows: 27,
                max_rows: 26,
                ..
            }
        ),
        "{error}"
    );
    let error = run(1, &step, 27, 2);
    assert!(
        matches!(
            error,
            Error::TooManyRequests {
                n_requests: 3,
                max: 2,
                ..
            }
        ),
        "{error}"
    );
    let descending = Step::new(&[0, 9, 3], [&[9, 9], &[9, 9], &[0, 0]], &[0, 0]);
    let error = run(1, &descending, 27, 3);
    assert!(
        matches!(error, Error::OffsetsDescend { request: 1, .. }),
        "{error}"
    );
    let short = Step::new(&[0, 9], [&[5], &[9], &[0]], &[0]);
    let error = run(1, &short, 27, 3);
    assert_eq!(
        error.to_string(),
        "replay-rows: request 0: 9 rows in the step, but only 5 tokens after it"
    );
}
