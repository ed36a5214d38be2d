//! Capture a program and launch it with other inputs.
//!
//! `cargo run --release -p replay-graph --features cuda --example 01-capture-and-launch`

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use replay_graph::BreakableGraph;

pub(crate) fn main() -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    let weight = Tensor::randn(0f32, 1.0, (64, 64), &device)?;
    let input = Tensor::zeros((8, 64), DType::F32, &device)?;
    let program = |x: &Tensor| x.matmul(&weight)?.tanh()?.sum_keepdim(1);

    // The program runs twice here: once eagerly, as warm-up, and once captured.
    let mut graph = BreakableGraph::capture(&device, |_| Ok(program(&input)?))?;

    for _ in 0..100 {
        // A launch reads the addresses that were captured, so new inputs are written over the old.
        let fresh = Tensor::randn(0f32, 1.0, (8, 64), &device)?;
        input.slice_set(&fresh, 0, 0)?;
        let output = graph.launch()?;
        assert_eq!(output.to_vec2::<f32>()?, program(&fresh)?.to_vec2::<f32>()?);
    }
    println!(
        "one segment of {}",
        graph.nodes().next().unwrap_or_default()
    );
    Ok(())
}
