//! Known hazards of replaying a part of the rows on a GPU, each with what shows it.

use std::ptr;
use std::time::{Duration, Instant};

use candle_core::cuda_backend::cudarc::driver::{CudaGraph, LaunchConfig, PushKernelArg, sys};
use candle_core::{DType, Device, Tensor};
use replay_core::{GraphMode, ReplayPolicy};
use replay_cuda::{
    Among, Error, LayerQuery, gather_rows, gather_rows_into, load_kernels, replay_rows_into,
    scatter_rows_into, write_rows_into,
};

use crate::gpu::{Watchdog, capture, cuda, gpu, new_device, small};
use crate::replay_rows::{Lengths, Step, assert_same_rows, planner, poisoned_rows};
use crate::tensors::{DTYPES, Random, assert_same, bytes_of, poisoned, view};

/// How many nodes a captured graph has.
pub(crate) fn n_nodes(graph: &CudaGraph) -> usize {
    let mut n = 0;
    // SAFETY: the graph lives, and a null list of nodes asks for their number alone.
    let result = unsafe { sys::cuGraphGetNodes(graph.cu_graph(), ptr::null_mut(), &raw mut n) };
    assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
    n
}

/// BR-04: hidden rows follow the row list and a side buffer (top-k choices, positions, mixes) does
/// not, so that a row reads another token's. Each buffer's rows hold their own number; all follow one
/// list in one launch, of the rows of a mixed batch and of rows in no order.
#[test]
fn side_buffers_follow_the_rows() {
    let gpu = gpu();
    let mixed: Vec<u32> = [0].into_iter().chain(13..=20).chain(21..=26).collect();
    for rows in [mixed, vec![19, 2, 7]] {
        let numbered = |dtype: DType, n: u32| {
            let size = dtype.size_in_bytes();
            let row = |row: u32| vec![row as u8 + 1; 5 * size];
            let bytes: Vec<u8> = (0..n).flat_map(row).collect();
            view(&bytes, dtype, (n as usize, 5), 0, &gpu.device)
        };
        let batch = DTYPES.map(|dtype| numbered(dtype, 27));
        let kept = DTYPES.map(|dtype| poisoned(dtype, (rows.len(), 5), 0, &gpu.device));
        let list = Tensor::new(rows.as_slice(), &gpu.device).unwrap();
        let (sources, outputs): (Vec<_>, Vec<_>) = batch.iter().zip(&kept).unzip();
        gather_rows_into(&sources, &list, &outputs).unwrap();
        gpu.synchronize();
        for (dtype, kept) in DTYPES.iter().zip(&kept) {
            let expected: Vec<u8> = rows
                .iter()
                .flat_map(|row| vec![*row as u8 + 1; 5 * dtype.size_in_bytes()])
                .collect();
            assert_eq!(bytes_of(kept), expected, "{dtype:?}");
        }
        // In place, a row could be overwritten before it has moved: refused.
        let in_place = batch[0].narrow(0, 0, rows.len()).unwrap();
        let error = gather_rows_into(&[&batch[0]], &list, &[&in_place]).unwrap_err();
        assert!(matches!(error, Error::Overlap { .. }), "{error}");
    }
}

/// A kernel that keeps a stream busy for the given number of nanoseconds.
const SLEEP: &str = r"
.version 7.0
.target sm_80
.address_size 64
.visible .entry sleep(.param .u64 nanoseconds)
{
    .reg .u64 %start, %now, %limit;
    .reg .pred %early;
    ld.param.u64 %limit, [nanoseconds];
    mov.u64 %start, %globaltimer;
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %start;
    setp.lt.u64 %early, %now, %limit;
    @%early bra again;
    ret;
}
";

/// BR-18: one kernel of a captured sequence goes to the default stream; the capture succeeds without
/// it, and replays are wrong. With the default stream kept busy, every operation ends all the same,
/// and a graph of them has as many nodes as there were launches.
#[test]
fn launches_stay_on_the_stream_of_the_device() {
    let gpu = gpu();
    let device = cuda(&gpu.device);
    let batch = Tensor::from_raw_buffer(
        &Random::new(11).bytes(4000),
        DType::U8,
        &[40, 100],
        &gpu.device,
    );
    let batch = batch.unwrap();
    let rows = Tensor::new(&[3u32, 9, 30], &gpu.device).unwrap();
    let kept = poisoned(DType::U8, (3, 100), 0, &gpu.device);
    let back = poisoned(DType::U8, (40, 100), 0, &gpu.device);
    let run = || {
        gather_rows_into(&[&batch], &rows, &[&kept]).unwrap();
        scatter_rows_into(&[&kept], &rows, &[&back]).unwrap();
        write_rows_into(&[&kept], &rows, &[&back]).unwrap();
    };
    let sleep = device
        .get_or_load_custom_func("sleep", "test_sleep", SLEEP)
        .unwrap();
    let busy = device.cuda_stream().context().default_stream();
    gpu.synchronize();

    let long = Duration::from_millis(400);
    let nanoseconds = long.as_nanos() as u64;
    let config = LaunchConfig {
        grid_dim: (1, 1, 1),
        block_dim: (1, 1, 1),
        shared_mem_bytes: 0,
    };
    let mut builder = busy.launch_builder(&sleep);
    builder.arg(&nanoseconds);
    // SAFETY: the kernel takes one u64 and touches no memory.
    unsafe { builder.launch(config) }.unwrap();
    let asleep = busy.record_event(None).unwrap();
    let begun = Instant::now();
    run();
    gpu.synchronize();
    // A sanitizer lets one kernel run at a time.
    if !small() {
        assert!(begun.elapsed() < long / 2, "waited for the default stream");
        assert!(!asleep.is_complete(), "the default stream was not busy");
    }
    let eager = bytes_of(&back);
    busy.synchronize().unwrap();
    assert_eq!(bytes_of(&back), eager);

    let graph = gpu.capture(run);
    assert_eq!(n_nodes(&graph), 3);
    let zeros = back.zeros_like().unwrap();
    back.slice_set(&zeros, 0, 0).unwrap();
    graph.launch().unwrap();
    gpu.synchronize();
    assert_eq!(bytes_of(&back), eager);
}

/// BR-21: once a batch drains below its graph's requests, padding ones give a length of -1, which a
/// kernel takes for four billion, and the GPU hangs. Four requests become one in a graph of four.
#[test]
fn draining_batches_have_no_negative_length() {
    let gpu = gpu();
    let _watchdog = Watchdog::new("a draining batch");
    let planner = planner(ReplayPolicy::PromptTail, 8, 1);
    let query = LayerQuery {
        planner: &planner,
        mode: GraphMode::None,
        layer: 1,
        among: Among::Batch,
    };
    let running: [Lengths; 4] = [
        (1, 31, 30, 0, false),
        (9, 9, 9, 0, false),
        (1, 8, 7, 2, false),
        (12, 12, 40, 0, false),
    ];
    let n_batch = 32;
    let steps: Vec<Step> = (1..=4)
        .rev()
        .map(|n| {
            let mut requests = running;
            requests[n..].fill((0, 0, 0, 0, false));
            Step::new(n as u64, &requests, n_batch)
        })
        .collect();
    let dtypes = (DType::U32, DType::I64);
    let bytes = Random::new(12).bytes(n_batch * 64);
    let fixed = steps[0].on(&gpu.device);
    let out = poisoned_rows(n_batch, 4, dtypes, &gpu.device);
    let batch = view(&bytes, DType::U8, (n_batch, 64), 0, &gpu.device);
    let kept = poisoned(DType::U8, (n_batch, 64), 0, &gpu.device);
    let graph = gpu.capture(|| {
        replay_rows_into(query, &fixed.batch(), &fixed.slots, &out).unwrap();
        gather_rows_into(&[&batch], &out.rows, &[&kept]).unwrap();
    });
    for step in &steps {
        fixed.assign(&step.on(&gpu.device));
        graph.launch().unwrap();
        gpu.synchronize();

        let expected = poisoned_rows(n_batch, 4, dtypes, &Device::Cpu);
        replay_rows_into(query, &step.batch(), &step.slots, &expected).unwrap();
        assert_same_rows(&out, &expected, &format!("{} requests", step.seed));
        for lengths in [&out.query_start_loc, &out.positions, &out.kv_start] {
            let lengths = lengths.to_vec1::<u32>().unwrap();
            assert!(lengths.iter().all(|length| *length <= 40), "{lengths:?}");
        }
        let host = view(&bytes, DType::U8, (n_batch, 64), 0, &Device::Cpu);
        let expected_rows = poisoned(DType::U8, (n_batch, 64), 0, &Device::Cpu);
        gather_rows_into(&[&host], &expected.rows, &[&expected_rows]).unwrap();
        assert_same(&kept, &expected_rows, "gathered rows");
    }
}

/// BR-23: temporary host lists and device parameters are recorded by address and freed after the
/// capture; replays read garbage. All that a launch takes goes by value: with everything dropped but
/// the buffers, memory churned and a hundred launches, a graph still equals the eager run.
#[test]
fn graphs_keep_no_temporary() {
    let gpu = gpu();
    let (n_batch, n, width) = (300, 64, 37);
    let mut random = Random::new(13);
    let list = Tensor::new(random.ascending(n, n_batch), &gpu.device).unwrap();
    let batch = poisoned(DType::F32, (n_batch, width), 1, &gpu.device);
    let kept = poisoned(DType::F32, (n, width), 2, &gpu.device);
    let back = poisoned(DType::F32, (n_batch, width), 3, &gpu.device);
    let graph = {
        // Views and lists of views that end with the capture.
        let (batch, kept, back) = (batch.clone(), kept.clone(), back.clone());
        let flat = |t: &Tensor, n: usize| t.reshape((n, 1, width)).unwrap();
        let views = [flat(&batch, n_batch), flat(&kept, n), flat(&back, n_batch)];
        gpu.capture(|| {
            let sources = vec![&views[0]];
            let outputs = vec![&views[1]];
            gather_rows_into(&sources, &list, &outputs).unwrap();
            scatter_rows_into(&outputs, &list, &[&views[2]]).unwrap();
        })
    };
    let launches = if small() { 5 } else { 100 };
    for launch in 0..launches {
        let churn = if small() { 1 << 20 } else { 1 << 30 };
        drop(Tensor::zeros(churn, DType::U8, &gpu.device).unwrap());
        let bytes = random.bytes(n_batch * width * 4);
        let new = view(&bytes, DType::F32, (n_batch, width), 0, &gpu.device);
        batch.slice_set(&new, 0, 0).unwrap();
        graph.launch().unwrap();
        gpu.synchronize();

        let rows = list.to_vec1::<u32>().unwrap();
        let host = view(&bytes, DType::F32, (n_batch, width), 0, &Device::Cpu);
        let expected = gather_rows(&[&host], &rows).unwrap().remove(0);
        assert_same(&kept, &expected, &format!("launch {launch}"));
        let scattered = replay_cuda::scatter_rows(&expected, &rows, n_batch).unwrap();
        assert_same(&back, &scattered, &format!("launch {launch}"));
    }
}

/// BR-24: event tracking switched off after the first tensors were made, or not at all; then waits
/// for events end up in the capture, or dropping a tensor hangs. Off after loading works; left on, the
/// capture is refused with a message that says so, and the device works on.
#[test]
fn event_tracking_is_refused_or_off() {
    let _alone = gpu();
    let _watchdog = Watchdog::new("dropping what was made under event tracking");
    let device = new_device();
    let stream = cuda(&device).cuda_stream();
    load_kernels(&device).unwrap();
    let batch = Tensor::arange(0f32, 40.0, &device)
        .unwrap()
        .reshape((20, 2))
        .unwrap();
    let rows = Tensor::new(&[7u32, 3], &device).unwrap();
    let output = Tensor::zeros((2, 2), DType::F32, &device).unwrap();
    let run = || gather_rows_into(&[&batch], &rows, &[&output]);

    // Left on.
    run().unwrap();
    let refused = capture(&stream, || {
        let error = run().unwrap_err();
        assert!(matches!(error, Error::EventTracking { .. }), "{error}");
        assert!(
            error.to_string().contains("disable_event_tracking"),
            "{error}"
        );
    });
    drop(refused);
    run().unwrap();
    assert_eq!(output.to_vec2::<f32>().unwrap(), [[14.0, 15.0], [6.0, 7.0]]);

    // Off after the tensors were made.
    // SAFETY: this device has one stream, and no other device touches these tensors.
    unsafe { cuda(&device).disable_event_tracking() };
    let graph = capture(&stream, || run().unwrap());
    assert_eq!(n_nodes(&graph), 1);
    let new = Tensor::arange(100f32, 140.0, &device)
        .unwrap()
        .reshape((20, 2))
        .unwrap();
    batch.slice_set(&new, 0, 0).unwrap();
    graph.launch().unwrap();
    assert_eq!(
        output.to_vec2::<f32>().unwrap(),
        [[114.0, 115.0], [106.0, 107.0]]
    );
    drop(graph);
    drop((batch, rows, output, new));
    device.synchronize().unwrap();
    stream.context().check_err().unwrap();
}
