//! The rows of a replay layer against `replay-core`, through the implementation on the CPU.

use core::num::NonZeroU32;

use candle_core::{DType, Device, Tensor};
use replay_core::{
    GraphMode, LayerSchedule, Planner, PlannerConfig, ReplayLayers, ReplayPolicy, RowCount, Window,
};
use replay_cuda::{
    Among, Error, LayerQuery, MAX_REQUESTS, ReplayRows, StepBatch, pad_rebuilt_slots_into,
    replay_rows_into,
};

use crate::gpu::{gpu, small};
use crate::tensors::{Random, assert_same, poisoned};

/// A planner for `depth + 1` replay layers.
pub(crate) fn planner(policy: ReplayPolicy, window: u32, depth: u32) -> Planner {
    let layers = ReplayLayers::from_schedule(&LayerSchedule {
        num_layers: 2 + depth,
        kv_sources: &[1],
        compress_ratios: &[],
        engram_layers: &[],
    });
    Planner::new(PlannerConfig {
        window: Window::new(window).unwrap(),
        layers: layers.unwrap(),
        policy,
        sampled_rows: NonZeroU32::MIN,
    })
}

/// The tensors of a step.
#[derive(Clone)]
pub(crate) struct Step {
    pub(crate) seed: u64,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    prompt_lens: Tensor,
    replay_starts: Tensor,
    keeps_rows: Tensor,
    pub(crate) slots: Tensor,
}

/// The lengths of one request: rows, sequence, prompt, replay start, and whether it keeps all rows.
pub(crate) type Lengths = (u32, u32, u32, u32, bool);

impl Step {
    /// A step on the CPU, of a batch padded to `n_batch` rows, with i64 slots.
    pub(crate) fn new(seed: u64, requests: &[Lengths], n_batch: usize) -> Self {
        let list = |of: fn(&Lengths) -> u32| {
            let list: Vec<u32> = requests.iter().map(of).collect();
            let len = list.len();
            Tensor::from_vec(list, len, &Device::Cpu).unwrap()
        };
        let mut starts = vec![0];
        for (query_len, ..) in requests {
            starts.push(starts[starts.len() - 1] + query_len);
        }
        assert!(*starts.last().unwrap() as usize <= n_batch);
        let slots: Vec<i64> = (0..n_batch as i64).map(|row| (1 << 33) + row * 7).collect();
        let keeps: Vec<u8> = requests.iter().map(|r| u8::from(r.4) * 2).collect();
        Self {
            seed,
            query_start_loc: Tensor::new(starts, &Device::Cpu).unwrap(),
            seq_lens: list(|r| r.1),
            prompt_lens: list(|r| r.2),
            replay_starts: list(|r| r.3),
            keeps_rows: Tensor::from_vec(keeps, requests.len(), &Device::Cpu).unwrap(),
            slots: Tensor::new(slots, &Device::Cpu).unwrap(),
        }
    }

    /// Requests of all kinds: decode, prefill, after a prefix hit, with all rows kept, and without
    /// a row. In every other step on average, the first of them begins past the first row.
    pub(crate) fn random(seed: u64, n_requests: usize, n_batch: usize) -> Self {
        let mut random = Random::new(seed);
        let mut left = n_batch;
        let mut requests = Vec::new();
        for _ in 0..n_requests {
            let prompt_len = 1 + random.below(40) as u32;
            let most = left.min(2 * n_batch / n_requests.max(1) + 2);
            let start = if random.one_in(3) {
                prompt_len + random.below(20) as u32
            } else {
                random.below(prompt_len as usize) as u32
            };
            let query_len = match random.below(6) {
                0 => 0,
                1 | 2 => 1.min(most),
                _ => random.below(most + 1),
            };
            left -= query_len;
            let replay_start = match random.below(3) {
                0 => random.below(start as usize + 1) as u32,
                _ => 0,
            };
            let query_len = query_len as u32;
            let keeps_rows = random.one_in(6);
            requests.push((
                query_len,
                start + query_len,
                prompt_len,
                replay_start,
                keeps_rows,
            ));
        }
        let mut step = Self::new(seed, &requests, n_batch);
        if random.one_in(2) {
            let first = random.below(left + 1) as u32;
            let starts = step.query_start_loc.to_vec1::<u32>().unwrap();
            let starts: Vec<u32> = starts.into_iter().map(|start| start + first).collect();
            step.query_start_loc = Tensor::new(starts, &Device::Cpu).unwrap();
        }
        step
    }

    /// The same step on another device.
    pub(crate) fn on(&self, device: &Device) -> Self {
        let on = |tensor: &Tensor| {
            // A device gives no memory of zero bytes, and lends none that begins at an odd place.
            let padded = Tensor::cat(&[&tensor.zeros_like().unwrap(), tensor, tensor], 0);
            let len = tensor.elem_count();
            match len {
                0 => {
                    let one = Tensor::zeros(1, tensor.dtype(), device).unwrap();
                    one.narrow(0, 0, 0).unwrap()
                }
                _ => padded
                    .unwrap()
                    .to_device(device)
                    .unwrap()
                    .narrow(0, len, len)
                    .unwrap(),
            }
        };
        Self {
            seed: self.seed,
            query_start_loc: on(&self.query_start_loc),
            seq_lens: on(&self.seq_lens),
            prompt_lens: on(&self.prompt_lens),
            replay_starts: on(&self.replay_starts),
            keeps_rows: on(&self.keeps_rows),
            slots: on(&self.slots),
        }
    }

    pub(crate) fn batch(&self) -> StepBatch<'_> {
        StepBatch {
            query_start_loc: &self.query_start_loc,
            seq_lens: &self.seq_lens,
            prompt_lens: &self.prompt_lens,
            replay_starts: &self.replay_starts,
            keeps_rows: &self.keeps_rows,
        }
    }

    /// Overwrites this step's tensors with those of another of the same counts.
    pub(crate) fn assign(&self, other: &Self) {
        for (to, from) in [
            (&self.query_start_loc, &other.query_start_loc),
            (&self.seq_lens, &other.seq_lens),
            (&self.prompt_lens, &other.prompt_lens),
            (&self.replay_starts, &other.replay_starts),
            (&self.keeps_rows, &other.keeps_rows),
            (&self.slots, &other.slots),
        ] {
            to.slice_set(from, 0, 0).unwrap();
        }
    }
}

/// Buffers full of poison.
pub(crate) fn poisoned_rows(
    max_rows: usize,
    max_requests: usize,
    (positions, slots): (DType, DType),
    device: &Device,
) -> ReplayRows {
    let list = |dtype, len| poisoned(dtype, (len, 1), 1, device).flatten_all().unwrap();
    ReplayRows {
        rows: list(DType::U32, max_rows),
        positions: list(positions, max_rows),
        slots: list(slots, max_rows),
        query_start_loc: list(DType::U32, max_requests + 1),
        kv_start: list(DType::U32, max_requests),
        last_rows: list(DType::U32, max_requests),
    }
}

#[track_caller]
pub(crate) fn assert_same_rows(got: &ReplayRows, expected: &ReplayRows, what: &str) {
    for (name, got, expected) in [
        ("rows", &got.rows, &expected.rows),
        ("positions", &got.positions, &expected.positions),
        ("slots", &got.slots, &expected.slots),
        (
            "query_start_loc",
            &got.query_start_loc,
            &expected.query_start_loc,
        ),
        ("kv_start", &got.kv_start, &expected.kv_start),
        ("last_rows", &got.last_rows, &expected.last_rows),
    ] {
        assert_same(got, expected, &format!("{what}: {name}"));
    }
}

/// Every policy, layer and mode, for steps from no request to thousands.
#[test]
fn rows_equal_those_of_the_cpu() {
    let gpu = gpu();
    let mut random = Random::new(8);
    let counts: &[usize] = if small() {
        &[0, 1, 5, 300]
    } else {
        &[0, 1, 3, 40, 255, 256, 257, 1500, MAX_REQUESTS]
    };
    for &n_requests in counts {
        for policy in ReplayPolicy::ALL {
            let planner = planner(policy, 8, 3).with_trim_threshold(9).unwrap();
            let n_batch = n_requests * 6 + random.below(9);
            let step = Step::random(random.next(), n_requests, n_batch);
            let (slots, positions) =
                [(DType::I64, DType::I64), (DType::I64, DType::U32)][random.below(2)];
            let max_rows = n_batch + 1 + random.below(300);
            let max_requests = n_requests.max(1) + random.below(3);
            let piecewise = |rows| GraphMode::Piecewise {
                padded_rows: RowCount::new(rows),
            };
            let whole = piecewise(n_batch as u32);
            for mode in [GraphMode::None, whole] {
                for layer in 0..4 {
                    for among in [Among::Batch, Among::Entering] {
                        let query = LayerQuery {
                            planner: &planner,
                            mode,
                            layer,
                            among,
                        };
                        let on = |device: &Device| {
                            let step = step.on(device);
                            let out =
                                poisoned_rows(max_rows, max_requests, (positions, slots), device);
                            replay_rows_into(query, &step.batch(), &step.slots, &out).unwrap();
                            out
                        };
                        let what = format!("{n_requests} requests, {query:?}");
                        assert_same_rows(&on(&gpu.device), &on(&Device::Cpu), &what);
                    }
                }
            }
        }
    }
    gpu.synchronize();
}

/// More rows than the buffers hold: an error on the CPU; on a GPU, which nobody waits for, the rows
/// are cut short, the offsets stay within the buffers, and nothing beyond is touched.
#[test]
fn too_many_rows_are_cut_short() {
    let gpu = gpu();
    let planner = planner(ReplayPolicy::Off, 8, 1);
    let query = LayerQuery {
        planner: &planner,
        mode: GraphMode::None,
        layer: 1,
        among: Among::Batch,
    };
    let requests: [Lengths; 3] = [
        (5, 5, 9, 0, false),
        (6, 6, 9, 0, false),
        (4, 4, 9, 0, false),
    ];
    let step = Step::new(0, &requests, 15);
    let dtypes = (DType::U32, DType::I64);
    let out = ReplayRows::new(8, 3, dtypes, &Device::Cpu).unwrap();
    let error = replay_rows_into(query, &step.batch(), &step.slots, &out).unwrap_err();
    assert!(
        matches!(
            error,
            Error::TooManyRows {
                n_rows: 15,
                max_rows: 8,
                ..
            }
        ),
        "{error}"
    );

    let step = step.on(&gpu.device);
    let around = poisoned(DType::U32, (20, 1), 0, &gpu.device)
        .flatten_all()
        .unwrap();
    let mut out = ReplayRows::new(8, 3, dtypes, &gpu.device).unwrap();
    out.rows = around.narrow(0, 6, 8).unwrap();
    replay_rows_into(query, &step.batch(), &step.slots, &out).unwrap();
    gpu.synchronize();
    let around = around.to_vec1::<u32>().unwrap();
    assert_eq!(around[6..14], [0, 1, 2, 3, 4, 5, 6, 7]);
    assert!(
        around[..6]
            .iter()
            .chain(&around[14..])
            .all(|row| *row == u32::MAX)
    );
    assert_eq!(out.query_start_loc.to_vec1::<u32>().unwrap(), [0, 5, 8, 8]);
    assert_eq!(
        out.last_rows.to_vec1::<u32>().unwrap(),
        [4, u32::MAX, u32::MAX]
    );
}

/// Lengths that contradict each other give wrong rows and touch no other memory; the sanitizer
/// watches.
#[test]
fn lengths_without_sense_are_memory_safe() {
    let gpu = gpu();
    let mut random = Random::new(9);
    for policy in ReplayPolicy::ALL {
        let planner = planner(policy, 8, 3);
        for n_requests in [1, 30, 400] {
            let mut any = |len: usize| {
                let edges = [0, 1, 5, 1 << 31, u32::MAX - 1, u32::MAX];
                let list: Vec<u32> = (0..len).map(|_| edges[random.below(6)]).collect();
                Tensor::from_vec(list, len, &gpu.device).unwrap()
            };
            let lists = [
                any(n_requests + 1),
                any(n_requests),
                any(n_requests),
                any(n_requests),
            ];
            let keeps = Tensor::zeros(n_requests, DType::U8, &gpu.device).unwrap();
            let batch = StepBatch {
                query_start_loc: &lists[0],
                seq_lens: &lists[1],
                prompt_lens: &lists[2],
                replay_starts: &lists[3],
                keeps_rows: &keeps,
            };
            let slots = Tensor::zeros(50, DType::I64, &gpu.device).unwrap();
            let dtypes = (DType::I64, DType::I64);
            let out = poisoned_rows(70, n_requests, dtypes, &gpu.device);
            for layer in 0..4 {
                let (mode, among) = (GraphMode::None, Among::Entering);
                let query = LayerQuery {
                    planner: &planner,
                    mode,
                    layer,
                    among,
                };
                replay_rows_into(query, &batch, &slots, &out).unwrap();
            }
            pad_rebuilt_slots_into(&batch, Window::new(8).unwrap(), &[&slots]).unwrap();
            gpu.synchronize();
            let offsets = out.query_start_loc.to_vec1::<u32>().unwrap();
            assert!(offsets.iter().all(|offset| *offset <= 70));
        }
    }
}

/// Slots of u32, i32 and i64 after prefix hits, one launch for all lists.
#[test]
fn padded_slots_equal_those_of_the_cpu() {
    let gpu = gpu();
    let mut random = Random::new(10);
    for n_requests in [1, 2, 7, 200] {
        let n_batch = n_requests * 9 + 4;
        let step = Step::random(random.next(), n_requests, n_batch);
        let dtypes = [DType::U32, DType::I32, DType::I64];
        let lists: Vec<(DType, Vec<u8>)> = (0..19)
            .map(|i| dtypes[i % 3])
            .map(|dtype| (dtype, random.bytes(n_batch * dtype.size_in_bytes())))
            .collect();
        let on = |device: &Device| {
            let list = |(dtype, bytes): &(DType, Vec<u8>)| {
                Tensor::from_raw_buffer(bytes, *dtype, &[n_batch], device).unwrap()
            };
            let lists: Vec<Tensor> = lists.iter().map(list).collect();
            let step = step.on(device);
            let window = Window::new(8).unwrap();
            let refs: Vec<&Tensor> = lists.iter().collect();
            pad_rebuilt_slots_into(&step.batch(), window, &refs).unwrap();
            lists
        };
        for (got, expected) in on(&gpu.device).iter().zip(&on(&Device::Cpu)) {
            assert_same(got, expected, &format!("{n_requests} requests"));
        }
    }
    gpu.synchronize();
}
