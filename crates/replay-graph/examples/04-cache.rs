//! A graph for each of several batch sizes, captured ahead.
//!
//! `cargo run --release -p replay-graph --features cuda --example 04-cache`

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use replay_core::{CaptureSizes, RowCount, Window};
use replay_graph::{BufferSpec, CacheConfig, CaptureMode, FixedBuffers, GraphCache};

pub(crate) fn main() -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    let weight = Tensor::randn(0f32, 1.0, (64, 64), &device)?;
    let program = |x: &Tensor| x.matmul(&weight)?.tanh();

    // One input for all sizes, allocated for the largest.
    let sizes = CaptureSizes::ladder(Window::new(128)?, 1000)?;
    let max_rows = sizes.largest().as_usize();
    let inputs = FixedBuffers::new(&[BufferSpec::new("x", [64], DType::F32)], max_rows, &device)?;

    let mode = CaptureMode::Piecewise;
    let mut cache = GraphCache::<_>::new(sizes, CacheConfig::default());
    let report = cache.capture_all(
        &device,
        &[(mode, ())],
        &mut (),
        |descriptor, _| Ok(program(&inputs.rows("x", descriptor.rows.as_usize())?)?),
        |progress| println!("{progress}"),
    )?;
    assert_eq!(report.captured, cache.sizes().as_slice().len());

    for n in [1usize, 128, 129, 700, 1000] {
        let batch = Tensor::randn(0f32, 1.0, (n, 64), &device)?;
        inputs.rows("x", n)?.slice_set(&batch, 0, 0)?;
        let graph = cache.get(RowCount::new(n as u32), mode, ());
        let output = graph.context("a size that holds the batch")?.launch()?;
        // Padding comes last, so the batch's rows are the first ones.
        let difference = (output.narrow(0, 0, n)? - program(&batch)?)?;
        assert!(difference.abs()?.max_all()?.to_scalar::<f32>()? < 1e-4);
    }
    // Above the largest size there is no graph: such a batch runs eagerly.
    assert!(cache.get(RowCount::new(1001), mode, ()).is_none());
    Ok(())
}
