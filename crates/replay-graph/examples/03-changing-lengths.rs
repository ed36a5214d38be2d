//! Lengths that change between launches: what is lent to a launch reaches its breaks.
//!
//! `cargo run --release -p replay-graph --features cuda --example 03-changing-lengths`

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use replay_graph::{BreakableGraph, BufferSpec, CaptureOptions, FixedBuffers};

/// Rows of the graph. Batches of fewer are padded.
const ROWS: usize = 16;

/// A step: how many rows each request has.
struct Step {
    lengths: Vec<usize>,
}

pub(crate) fn main() -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    let fixed = FixedBuffers::new(&[BufferSpec::new("x", [8], DType::F32)], ROWS, &device)?;
    let input = fixed.rows("x", ROWS)?;
    let means = FixedBuffers::new(&[BufferSpec::new("means", [8], DType::F32)], ROWS, &device)?;

    let mut first = Step {
        lengths: vec![ROWS],
    };
    let options = CaptureOptions::new("means").buffers(&means);
    let mut graph = BreakableGraph::<_, _>::capture_with(&device, options, &mut first, |scope| {
        let x = input.affine(2.0, 0.0)?;
        let means = means.rows("means", ROWS)?;
        // Captured, this would take the lengths of the capture for those of every launch.
        let means = scope.eager_break(move |step: &mut Step| {
            let mut start = 0;
            for (request, &length) in step.lengths.iter().enumerate() {
                let mean = x.narrow(0, start, length)?.mean_keepdim(0)?;
                means.slice_set(&mean, 0, request)?;
                start += length;
            }
            Ok(means.clone())
        })?;
        Ok(means.affine(1.0, 1.0)?)
    })?;

    for lengths in [vec![16], vec![5, 11], vec![1, 15], vec![4, 4, 4]] {
        let n = lengths.iter().sum();
        let fresh = Tensor::randn(0f32, 1.0, (n, 8), &device)?;
        input.slice_set(&fresh, 0, 0)?;
        let mut step = Step { lengths };
        let output = graph.launch_with(&mut step)?;

        let mut start = 0;
        for (request, &length) in step.lengths.iter().enumerate() {
            let rows = fresh.affine(2.0, 0.0)?.narrow(0, start, length)?;
            let eager = rows.mean_keepdim(0)?.affine(1.0, 1.0)?;
            let launched = output.narrow(0, request, 1)?;
            assert_eq!(launched.to_vec2::<f32>()?, eager.to_vec2::<f32>()?);
            start += length;
        }
    }
    Ok(())
}
