//! A program that decides something on the host in the middle: a break between two segments.
//!
//! `cargo run --release -p replay-graph --features cuda --example 02-one-break`

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use replay_graph::{BreakableGraph, BufferSpec, FixedBuffers};

pub(crate) fn main() -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    let input = Tensor::zeros(4, DType::F32, &device)?;
    // What the second segment reads lies at one address, whatever the break computes.
    let fixed = FixedBuffers::new(&[BufferSpec::new("chosen", [], DType::F32)], 4, &device)?;

    let mut graph = BreakableGraph::capture(&device, |scope| {
        scope.fixed(&fixed);
        let squares = input.sqr()?;
        let (from, to) = (squares.clone(), fixed.rows("chosen", 4)?);
        let chosen = scope.eager_break(move |()| {
            // Eager at every launch: here a value is read back, and the code branches on it.
            let total = from.sum_all()?.to_scalar::<f32>()?;
            let scale = if total > 10.0 { 0.0 } else { 2.0 };
            to.slice_set(&from.affine(scale, 1.0)?, 0, 0)?;
            Ok(to.clone())
        })?;
        Ok((chosen + squares)?)
    })?;
    assert_eq!((graph.n_segments(), graph.n_breaks()), (2, 1));

    for (values, expected) in [
        ([1f32, 0.0, 1.0, 2.0], [4f32, 1.0, 4.0, 13.0]),
        ([3.0, 0.0, 1.0, 2.0], [10.0, 1.0, 2.0, 5.0]),
    ] {
        input.slice_set(&Tensor::new(&values, &device)?, 0, 0)?;
        assert_eq!(graph.launch()?.to_vec1::<f32>()?, expected);
    }
    Ok(())
}
