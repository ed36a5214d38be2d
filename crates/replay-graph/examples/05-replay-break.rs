//! The break at the cut: layers that run on the rows a plan keeps, in graphs of their own.
//!
//! `cargo run --release -p replay-graph --features cuda --example 05-replay-break`

use std::cell::RefCell;
use std::num::NonZeroU32;
use std::rc::Rc;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use replay_core::{
    CaptureSizes, LayerSchedule, Planner, PlannerConfig, ReplayPolicy, Request, RowCount, StepPlan,
    Window,
};
use replay_graph::{
    BreakableGraph, BufferSpec, CacheConfig, CaptureMode, CaptureOptions, Descriptor, FixedBuffers,
    ReplayBreak, ReplayLayers,
};

/// Rows of the model's graph.
const ROWS: RowCount = RowCount::new(64);

/// Stands for the layers after the last KV source. A model writes KV here, too.
struct Layers;

impl Layers {
    fn run(x: &Tensor) -> replay_graph::Result<Vec<Tensor>> {
        Ok(vec![x.affine(2.0, 1.0)?])
    }
}

impl ReplayLayers<StepPlan> for Layers {
    fn plan<'c>(&self, plan: &'c StepPlan) -> &'c StepPlan {
        plan
    }

    fn write_batch_kv(&mut self, _: &[Tensor]) -> replay_graph::Result<()> {
        Ok(())
    }

    fn run_batch(&mut self, _: &mut StepPlan, x: &[Tensor]) -> replay_graph::Result<Vec<Tensor>> {
        Self::run(&x[0])
    }

    fn run_rows(
        &mut self,
        _: &mut StepPlan,
        x: &[Tensor],
    ) -> replay_graph::Result<Option<Vec<Tensor>>> {
        Self::run(&x[0]).map(Some)
    }

    fn prepare(&mut self, _: &mut StepPlan, _: RowCount) -> replay_graph::Result<()> {
        Ok(())
    }

    fn run_padded(&mut self, x: &[Tensor]) -> replay_graph::Result<Vec<Tensor>> {
        Self::run(&x[0])
    }
}

pub(crate) fn main() -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    replay_cuda::load_kernels(&device)?;
    let layers = replay_core::ReplayLayers::from_schedule(&LayerSchedule {
        num_layers: 6,
        kv_sources: &[3],
        compress_ratios: &[],
        engram_layers: &[],
    })?;
    // Graphs of 32 rows and more break; the kept rows then run in a graph of 8 or of 16 rows.
    let planner = Planner::new(PlannerConfig {
        window: Window::new(8)?,
        layers,
        policy: ReplayPolicy::PromptTail,
        sampled_rows: NonZeroU32::MIN,
    })
    .with_trim_threshold(32)?
    .with_capture_sizes(CaptureSizes::new(&[8, 16], 64)?);

    let specs = [BufferSpec::new("hidden", [4], DType::F32)];
    let replay: ReplayBreak = ReplayBreak::with_graphs(
        planner.clone(),
        FixedBuffers::new(&specs, ROWS.as_usize(), &device)?,
        FixedBuffers::new(&specs, 16, &device)?,
        device.clone(),
        CacheConfig::default(),
    )?;
    let layers = Rc::new(RefCell::new(Layers));
    replay.capture_graphs(&layers, |progress| println!("{progress}"))?;

    // What planning and capture both know of the graph.
    let descriptor = Descriptor {
        rows: ROWS,
        mode: CaptureMode::Piecewise,
        variant: (),
    };
    let mut plan = StepPlan::new();
    let mode = descriptor.graph_mode();
    planner.plan_step(mode, &[Request::prefill(64, 0..64)], &mut plan)?;

    let input = Tensor::zeros((64, 4), DType::F32, &device)?;
    let options = CaptureOptions::new(descriptor.to_string());
    let mut graph = BreakableGraph::<_, _>::capture_with(&device, options, &mut plan, |scope| {
        let hidden = input.affine(1.0, 1.0)?;
        replay.run(scope, ROWS, &layers, vec![hidden])
    })?;
    assert_eq!(graph.n_breaks(), 1);

    // A decode row, and a prompt of 40 tokens, of which the last 8 are kept.
    planner.plan_step(
        mode,
        &[Request::decode(9, 10), Request::prefill(40, 0..40)],
        &mut plan,
    )?;
    let output = graph.launch_with(&mut plan)?[0].to_vec2::<f32>()?;
    for (row, values) in output.iter().enumerate() {
        let kept = row == 0 || (33..41).contains(&row);
        assert_eq!(values, &[if kept { 3.0 } else { 0.0 }; 4], "row {row}");
    }
    Ok(())
}
