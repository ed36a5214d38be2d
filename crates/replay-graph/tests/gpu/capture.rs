//! Programs without a break, and what capture must leave as it was.

use std::panic::{AssertUnwindSafe, catch_unwind};

use candle_core::{DType, Tensor};
use replay_graph::{BreakableGraph, Result};

use crate::gpu::{Layers, bits, gpu, large, rounds, within_ten_seconds};
use crate::launches::{counted, is_plain_memory};
use crate::streams::{set_event_tracking, spin_on_default_stream};

/// A launch that reads old inputs, or kernels that differ from those of the eager pass.
#[test]
fn a_thousand_launches_equal_eager() {
    let gpu = gpu();
    let layers = Layers::new(&gpu, 8, 64);
    let input = gpu.tensor(&[16, 64], 0);
    let mut graph = BreakableGraph::capture(&gpu, |_| layers.run(0..8, &input)).unwrap();
    assert_eq!((graph.n_segments(), graph.n_breaks()), (1, 0));
    for round in rounds(1000) {
        let fresh = gpu.tensor(&[16, 64], round);
        input.slice_set(&fresh, 0, 0).unwrap();
        let launched = bits(graph.launch().unwrap());
        let eager = bits(&layers.run(0..8, &fresh).unwrap());
        assert_eq!(launched, eager, "round {round}");
    }
}

/// A capture that only records: its output would be memory that nothing has written yet.
#[test]
fn a_capture_is_a_run() {
    let gpu = gpu();
    let input = Tensor::new(&[1f32, 2.0], &gpu).unwrap();
    let graph = BreakableGraph::capture(&gpu, |_| Ok(input.affine(2.0, 0.0)?)).unwrap();
    assert_eq!(graph.output().to_vec1::<f32>().unwrap(), [2.0, 4.0]);
}

/// Shapes and strides uploaded for one pass are freed after it, and launches read what lies there
/// then.
#[test]
fn strided_operands_survive_their_temporaries() {
    let gpu = gpu();
    let input = gpu.tensor(&[24, 40], 1);
    let rows = Tensor::new(&[3u32, 1, 39, 7], &gpu).unwrap();
    let program = |input: &Tensor| -> Result<Tensor> {
        let sum = (input.t()? + input.t()?.contiguous()?)?;
        let picked = sum.index_select(&rows, 0)?;
        Ok(picked.narrow(1, 3, 17)?.t()?.contiguous()?)
    };
    let mut graph = BreakableGraph::capture(&gpu, |_| program(&input)).unwrap();
    for round in rounds(100) {
        let waste = Tensor::full(f32::NAN, large(1 << 28), &gpu.device).unwrap();
        gpu.synchronize().unwrap();
        drop(waste);
        let fresh = gpu.tensor(&[24, 40], round + 2);
        input.slice_set(&fresh, 0, 0).unwrap();
        let launched = bits(graph.launch().unwrap());
        assert_eq!(launched, bits(&program(&fresh).unwrap()), "round {round}");
    }
}

/// A kernel queued on another stream is missing from the graph, and one that is captured twice is in
/// it twice: nodes must be the launches of an eager pass, kind by kind, all on the device's stream.
#[test]
fn nodes_equal_the_launches_of_an_eager_pass() {
    let gpu = gpu();
    let device = gpu.as_cuda_device().unwrap();
    let input = gpu.tensor(&[16, 64], 1);
    let target = Tensor::zeros((16, 64), DType::F32, &gpu.device).unwrap();
    let program = || -> Result<Tensor> {
        let y = input.affine(2.0, 1.0)?.tanh()?;
        let z = (y.t()?.contiguous()?.t()? + &input)?;
        let zeros = Tensor::zeros((16, 64), DType::F32, input.device())?;
        target.slice_set(&z.contiguous()?, 0, 0)?;
        Ok((z.sum_keepdim(1)?.broadcast_mul(&zeros)? + z.copy()?)?)
    };
    let graph = BreakableGraph::capture(&gpu, |_| program()).unwrap();
    // As in a capture, shapes that have been uploaded are not uploaded again.
    let uploads = device.enable_cuda_graph_htod_cache();
    let (counts, _output) = counted(|| program().unwrap());
    drop(uploads);

    let nodes = graph.nodes().next().unwrap();
    println!("{nodes}; eager: {counts:?}");
    assert!(
        counts.kernels >= 6 && counts.fills >= 1 && counts.copies >= 1,
        "{counts:?}"
    );
    assert_eq!(
        (nodes.kernels, nodes.copies, nodes.fills),
        (counts.kernels, counts.copies, counts.fills)
    );
    assert_eq!((nodes.host_copies, nodes.others), (0, 0));
    // What a sanitizer is shown must be what it is said to be.
    assert_eq!(nodes.allocations == 0, is_plain_memory());
    assert_eq!(counts.streams, [gpu.stream().cu_stream().addr()]);
}

/// Work on the default stream must neither enter a capture nor order it.
#[test]
fn a_busy_default_stream_changes_nothing() {
    let gpu = gpu();
    let layers = Layers::new(&gpu, 2, 64);
    let input = gpu.tensor(&[16, 64], 1);
    let eager = bits(&layers.run(0..2, &input).unwrap());
    spin_on_default_stream(&gpu, 300);
    let mut graph = BreakableGraph::capture(&gpu, |_| layers.run(0..2, &input)).unwrap();
    spin_on_default_stream(&gpu, 100);
    for _ in 0..10 {
        assert_eq!(bits(graph.launch().unwrap()), eager);
    }
}

/// A capture that leaves tracking switched off makes every later use on two streams a race.
#[test]
fn event_tracking_is_as_it_was() {
    let gpu = gpu();
    let device = gpu.as_cuda_device().unwrap();
    let input = gpu.tensor(&[4], 1);
    let capture = |fails: bool| {
        BreakableGraph::capture(&gpu, |scope| {
            assert!(!device.is_event_tracking());
            if fails && !scope.is_warm_up() {
                return Err(replay_graph::Error::program("on purpose"));
            }
            Ok(input.sqr()?)
        })
    };
    assert!(device.is_event_tracking());
    capture(false).unwrap();
    assert!(device.is_event_tracking());
    capture(true).unwrap_err();
    assert!(device.is_event_tracking());
    set_event_tracking(&gpu, false);
    capture(false).unwrap();
    assert!(!device.is_event_tracking());
}

/// Tensors made while uses are tracked wait on events when they are used and dropped; in a capture,
/// that would tie it to work outside.
#[test]
fn tensors_made_before_tracking_was_off() {
    within_ten_seconds(|gpu| {
        let layers = Layers::new(gpu, 2, 64);
        let input = gpu.tensor(&[16, 64], 1);
        let eager = bits(&layers.run(0..2, &input).unwrap());
        set_event_tracking(gpu, false);
        let mut graph = BreakableGraph::capture(gpu, |_| layers.run(0..2, &input)).unwrap();
        assert_eq!(bits(graph.launch().unwrap()), eager);
        drop((layers, input));
        gpu.synchronize().unwrap();
        drop(graph);
    });
}

/// A panic leaves the stream captured, and whatever is queued on it next is swallowed.
#[test]
fn a_panic_leaves_the_device_usable() {
    let gpu = gpu();
    let input = gpu.tensor(&[4], 1);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        BreakableGraph::capture(&gpu, |scope| {
            let y = input.sqr()?;
            assert!(scope.is_warm_up(), "on purpose");
            Ok(y)
        })
    }));
    assert!(panicked.is_err());
    assert!(gpu.as_cuda_device().unwrap().is_event_tracking());
    gpu.works();
    BreakableGraph::capture(&gpu, |_| Ok(input.sqr()?)).unwrap();
}

/// An output that a program keeps is memory that its graph allocated: destroying the graph must not
/// take it away.
#[test]
fn outputs_outlive_their_graph() {
    let gpu = gpu();
    let input = gpu.tensor(&[1024], 1);
    let mut graph = BreakableGraph::capture(&gpu, |_| Ok(input.sqr()?)).unwrap();
    let output = graph.launch().unwrap().clone();
    drop(graph);
    let waste: Vec<_> = (0..64).map(|seed| gpu.tensor(&[1024], seed)).collect();
    assert_eq!(bits(&output), bits(&input.sqr().unwrap()));
    drop(waste);
    drop(output);
    gpu.works();
}
