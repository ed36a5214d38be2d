//! Memory: that launches leave it as it is, that captures report what they take, and what happens
//! when there is none.

use candle_core::{DType, Tensor};
use replay_core::CaptureSizes;
use replay_graph::{
    BreakableGraph, BufferSpec, CacheConfig, CaptureMode, CaptureOptions, Error, FixedBuffers,
    GraphCache,
};

use crate::gpu::{Gpu, Layers, bits, gpu, rounds};

const MIB: usize = 1 << 20;

/// An allocation of every launch that nobody frees, or an address that was baked in and then given
/// to another.
#[test]
fn two_hundred_steps_leave_memory_flat() {
    let gpu = gpu();
    let layers = Layers::new(&gpu, 8, 256);
    let input = gpu.tensor(&[32, 256], 0);
    let spec = [BufferSpec::new("x", [256], DType::F32)];
    let handoff = FixedBuffers::new(&spec, 32, &gpu).unwrap();
    let mut graph = BreakableGraph::capture(&gpu, |scope| {
        scope.fixed(&handoff);
        let (x, fixed) = (layers.run(0..4, &input)?, handoff.rows("x", 32)?);
        let x = scope.eager_break(move |()| {
            fixed.slice_set(&x.affine(2.0, 0.0)?, 0, 0)?;
            Ok(fixed.clone())
        })?;
        layers.run(4..8, &x)
    })
    .unwrap();
    let mut step = |seed| {
        let fresh = gpu.tensor(&[32, 256], seed);
        input.slice_set(&fresh, 0, 0).unwrap();
        graph.launch().unwrap();
    };
    for seed in 0..20 {
        step(seed);
    }
    let before = gpu.free_bytes();
    for seed in rounds(200) {
        step(seed);
    }
    let after = gpu.free_bytes();
    // The driver hands memory out in pieces of 2 MiB; one lost tensor a step would be more.
    assert!(
        before.abs_diff(after) <= 2 * MIB,
        "{before} bytes free before, {after} after"
    );
}

/// The device, without what other tests' graphs have left: it would be taken first and not counted, and
/// between its pieces there is less room.
fn tidy_gpu() -> Gpu {
    let gpu = gpu();
    ladder(&gpu).0.clear(&gpu).unwrap();
    gpu
}

/// Memory that is counted at warm-up, or not at all, has no place in a budget.
#[test]
fn captures_report_what_they_take() {
    let gpu = tidy_gpu();
    let input = gpu.tensor(&[64 * MIB / 4], 1);
    // The product and the sum are there at once, and the output for as long as the graph.
    let graph = BreakableGraph::capture(&gpu, |_| {
        let squares = input.sqr()?;
        Ok((squares + &input)?)
    })
    .unwrap();
    let taken = graph.memory();
    println!("{taken:?}");
    let expected = 128 * MIB as u64;
    assert!(
        (expected..=expected + 16 * MIB as u64).contains(&taken.bytes()),
        "{taken:?}"
    );
}

/// Values of a row of the ladder's input.
const WIDTH: usize = 16_384;

fn ladder(gpu: &Gpu) -> (GraphCache<Tensor>, FixedBuffers) {
    let sizes = CaptureSizes::new(&[1024, 2048, 3072, 4096], 4096).unwrap();
    let spec = [BufferSpec::new("x", [WIDTH], DType::F32)];
    (
        GraphCache::new(sizes, CacheConfig::default()),
        FixedBuffers::new(&spec, 4096, gpu).unwrap(),
    )
}

fn capture(gpu: &Gpu, cache: &mut GraphCache<Tensor>, inputs: &FixedBuffers) -> usize {
    let kinds = [(CaptureMode::Piecewise, ())];
    let report = cache.capture_all(
        gpu,
        &kinds,
        &mut (),
        |descriptor, _| {
            let x = inputs.rows("x", descriptor.rows.as_usize())?;
            // Three large intermediates, as temporaries live to the end of their expression, and an output of a
            // row's width.
            Ok((x.affine(2.0, 1.0)?.tanh()? * &x)?.sum_keepdim(0)?)
        },
        |progress| println!("{progress}"),
    );
    report.unwrap().captured
}

/// Captures that go from large to small share their intermediates, and a second pass takes nothing:
/// neither one that finds all graphs there, nor one that makes them anew.
///
/// The driver maps graph memory in pieces of 32 MiB, and an output that outlives the launch keeps
/// its piece; so each graph may add one piece and no more.
#[test]
fn a_second_pass_takes_nothing() {
    let gpu = tidy_gpu();
    let (mut cache, inputs) = ladder(&gpu);
    assert_eq!(capture(&gpu, &mut cache, &inputs), 4);
    let largest = 3 * 4096 * WIDTH * 4;
    let most = (largest + 4 * 32 * MIB) as u64;
    assert!(cache.memory().bytes() <= most, "{:?}", cache.memory());
    let first = gpu.free_bytes();
    assert_eq!(capture(&gpu, &mut cache, &inputs), 0);
    assert_eq!(gpu.free_bytes(), first);

    cache.clear(&gpu).unwrap();
    assert!(gpu.free_bytes() > first, "clearing returns memory");
    assert_eq!(capture(&gpu, &mut cache, &inputs), 4);
    let again = gpu.free_bytes();
    let slack = 4 * MIB;
    assert!(
        again + slack >= first,
        "{again} bytes free, {first} after the first pass"
    );
}

/// Takes all memory but about so much.
fn ballast(gpu: &Gpu, left: usize) -> Tensor {
    let free = gpu.free_bytes();
    let ballast = Tensor::zeros(free - left, DType::U8, &gpu.device).unwrap();
    println!("{} MiB left", gpu.free_bytes() / MIB);
    ballast
}

/// Memory that runs out inside a capture surfaces as some error of the capture, and takes the rest of
/// the process with it.
#[test]
fn out_of_memory_in_a_capture() {
    let gpu = gpu();
    let input = gpu.tensor(&[4], 1);
    // Kernels take memory too when they are loaded.
    input.sqr().unwrap();
    gpu.works();
    let ballast = ballast(&gpu, 192 * MIB);
    let mut options = CaptureOptions::new("graph of 4096 rows");
    options.knob = "`max_captured_rows`";
    // The warm-up would run out before the capture does.
    options.warm_up = false;
    let refused = BreakableGraph::<Tensor>::capture_with(&gpu, options, &mut (), |_| {
        let big = Tensor::zeros(512 * MIB, DType::U8, &gpu.device)?;
        drop(big);
        Ok(input.sqr()?)
    });
    let error = refused.unwrap_err();
    println!("{error}");
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error:?}");
    let text = error.to_string();
    for part in [
        "graph of 4096 rows",
        "out of device memory",
        "`max_captured_rows`",
    ] {
        assert!(text.contains(part), "{text}");
    }
    gpu.works();
    // What fits is still captured, and with memory so is the rest. Under memcheck the refused capture
    // keeps nearly all of the memory that was left, until the ballast goes.
    if std::env::var_os("REPLAY_GPU_SMALL").is_none() {
        BreakableGraph::capture(&gpu, |_| Ok(input.sqr()?)).unwrap();
    }
    drop(ballast);
    let graph = BreakableGraph::capture(&gpu, |_| {
        let big = Tensor::zeros(512 * MIB, DType::U8, &gpu.device)?;
        drop(big);
        Ok(input.sqr()?)
    })
    .unwrap();
    assert_eq!(bits(graph.output()), bits(&input.sqr().unwrap()));
}

/// The same in the warm-up.
#[test]
fn out_of_memory_in_the_warm_up() {
    let gpu = gpu();
    gpu.works();
    let ballast = ballast(&gpu, 192 * MIB);
    let refused = BreakableGraph::capture(&gpu, |_| {
        Ok(Tensor::zeros(512 * MIB, DType::U8, &gpu.device)?)
    });
    let error = refused.unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error:?}");
    gpu.works();
    drop(ballast);
    gpu.works();
}

/// Graphs that come and go, with outputs that their breaks and programs own, leave nothing behind.
#[test]
fn dropped_graphs_leave_nothing() {
    let gpu = gpu();
    let input = gpu.tensor(&[4 * MIB / 4], 1);
    let mut free = Vec::new();
    for _ in 0..12 {
        let mut graph = BreakableGraph::capture(&gpu, |scope| {
            let x = input.sqr()?;
            let held = x.clone();
            scope.eager_break(move |()| {
                held.sum_all()?;
                Ok(())
            })?;
            Ok(x.affine(2.0, 1.0)?)
        })
        .unwrap();
        graph.launch().unwrap();
        drop(graph);
        free.push(gpu.free_bytes());
    }
    let (settled, last) = (free[3], free[11]);
    assert!(
        last + MIB >= settled,
        "free bytes after each graph: {free:?}"
    );
}
