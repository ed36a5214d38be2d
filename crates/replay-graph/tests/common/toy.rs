//! A toy of the replay layers: every row by itself, so that any set of rows can be checked.

use std::cell::RefCell;
use std::num::NonZeroU32;
use std::rc::Rc;

use candle_core::{DType, Device, Tensor};
use replay_core::{
    CaptureSizes, LayerSchedule, Planner, PlannerConfig, ReplayLayers as LayerSpan, ReplayPolicy,
    Request, RowCount, StepPlan, Window,
};
use replay_graph::{Ahead, BufferSpec, FixedBuffers, ReplayLayers, Result};

/// Elements of a row.
pub(crate) const WIDTH: usize = 4;
pub(crate) const WINDOW: u32 = 8;
/// Piecewise graphs of at least so many rows break.
pub(crate) const THRESHOLD: u32 = 16;

/// Layers that scale and shift the rows, and keep what the cut wrote.
pub(crate) struct Toy {
    /// Window KV: one row per row of the batch.
    pub(crate) kv: FixedBuffers,
    /// How the layers were run, in order.
    pub(crate) calls: Vec<String>,
    /// Output rows that an eager run forgets, as a layer with a fault would.
    pub(crate) forgets: usize,
    /// What was uploaded for the next launch.
    pub(crate) ahead: Option<Ahead>,
}

impl Toy {
    pub(crate) fn new(max_rows: usize, device: &Device) -> Result<Rc<RefCell<Self>>> {
        let spec = BufferSpec::new("kv", [WIDTH], DType::F32);
        Ok(Rc::new(RefCell::new(Self {
            kv: FixedBuffers::new(&[spec], max_rows, device)?,
            calls: Vec::new(),
            forgets: 0,
            ahead: None,
        })))
    }

    fn layers(x: &Tensor) -> Result<Tensor> {
        Ok(x.affine(3.0, 1.0)?.affine(0.5, -2.0)?)
    }
}

/// What the layers make of an element.
pub(crate) fn expected(x: f32) -> f32 {
    (x * 3.0 + 1.0) * 0.5 - 2.0
}

impl ReplayLayers<StepPlan> for Toy {
    fn plan<'c>(&self, plan: &'c StepPlan) -> &'c StepPlan {
        plan
    }

    fn write_batch_kv(&mut self, inputs: &[Tensor]) -> Result<()> {
        self.calls.push("write batch kv".to_owned());
        let n = inputs[0].dims()[0];
        Ok(self.kv.rows("kv", n)?.slice_set(&inputs[0], 0, 0)?)
    }

    fn run_batch(&mut self, _: &mut StepPlan, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        self.write_batch_kv(inputs)?;
        self.calls.push("run batch".to_owned());
        Ok(vec![Self::layers(&inputs[0])?])
    }

    fn run_rows(&mut self, plan: &mut StepPlan, inputs: &[Tensor]) -> Result<Option<Vec<Tensor>>> {
        let rows = inputs[0].dims()[0];
        self.calls.push(format!("run {rows} rows"));
        // Where the layers run on different rows, those of the last are a part of these.
        let output = plan.output_rows();
        if output.is_empty() {
            return Ok(None);
        }
        let cut = plan.layer(0).running;
        let mut within: Vec<u32> = cut
            .indices()
            .zip(0..)
            .filter(|(row, _)| output.indices().any(|kept| kept == *row))
            .map(|(_, at)| at)
            .collect();
        within.truncate(within.len() - self.forgets);
        let within = Tensor::new(within, inputs[0].device())?;
        let rows = inputs[0].contiguous()?.index_select(&within, 0)?;
        Ok(Some(vec![Self::layers(&rows)?]))
    }

    fn prepare(&mut self, _: &mut StepPlan, padded_rows: RowCount) -> Result<()> {
        self.calls.push(format!("prepare {}", padded_rows.get()));
        Ok(())
    }

    fn take_ahead(&mut self, _: &mut StepPlan) -> Option<Ahead> {
        self.ahead.take()
    }

    fn run_padded(&mut self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        let rows = inputs[0].dims()[0];
        self.calls.push(format!("run padded {rows}"));
        Ok(vec![Self::layers(&inputs[0])?])
    }
}

/// Plans the steps of the toy: 3 replay layers.
pub(crate) fn planner(policy: ReplayPolicy, sizes: Option<&[u32]>) -> Planner {
    let layers = LayerSpan::from_schedule(&LayerSchedule {
        num_layers: 6,
        kv_sources: &[3],
        compress_ratios: &[],
        engram_layers: &[],
    })
    .unwrap();
    let planner = Planner::new(PlannerConfig {
        window: Window::new(WINDOW).unwrap(),
        layers,
        policy,
        sampled_rows: NonZeroU32::MIN,
    })
    .with_trim_threshold(THRESHOLD)
    .unwrap();
    match sizes {
        None => planner,
        Some(sizes) => planner.with_capture_sizes(CaptureSizes::new(sizes, 32).unwrap()),
    }
}

/// Plans a step for a graph.
pub(crate) fn plan(
    planner: &Planner,
    mode: replay_core::GraphMode,
    requests: &[Request],
) -> StepPlan {
    let mut plan = StepPlan::new();
    planner.plan_step(mode, requests, &mut plan).unwrap();
    plan
}

/// `[rows, WIDTH]`, each element its index plus `first`.
pub(crate) fn rows(n: usize, first: f32, device: &Device) -> Tensor {
    let values: Vec<f32> = (0..n * WIDTH).map(|i| first + i as f32).collect();
    Tensor::from_vec(values, (n, WIDTH), device).unwrap()
}

/// Checks the outputs of a step whose batch rows are `x`: the layers' of the rows in the plan's
/// output, and zero elsewhere.
#[track_caller]
pub(crate) fn check_outputs(plan: &StepPlan, x: &Tensor, outputs: &Tensor) {
    let kept: Vec<u32> = plan
        .output_rows()
        .indices()
        .map(replay_core::RowIdx::get)
        .collect();
    let x = x.to_vec2::<f32>().unwrap();
    let outputs = outputs.to_vec2::<f32>().unwrap();
    assert_eq!(x.len(), outputs.len());
    for (row, (x, output)) in (0u32..).zip(x.iter().zip(&outputs)) {
        let want: Vec<f32> = if kept.contains(&row) {
            x.iter().copied().map(expected).collect()
        } else {
            vec![0.0; WIDTH]
        };
        assert_eq!(*output, want, "row {row} of {kept:?}");
    }
}
