//! The break at the cut, on the GPU, with the layers eager and in graphs of their own.

use std::cell::RefCell;
use std::rc::Rc;

use candle_core::{DType, Tensor};
use replay_core::{GraphMode, Planner, ReplayPolicy, Request, RowCount, StepPlan};
use replay_graph::{
    BreakableGraph, BufferSpec, CacheConfig, CaptureOptions, FixedBuffers, ReplayBreak, Result,
};

use crate::gpu::{Churn, Gpu, gpu, rounds};
use crate::toy::{self, Toy, WIDTH, check_outputs, planner};

const ROWS: u32 = 32;
const MODE: GraphMode = GraphMode::Piecewise {
    padded_rows: RowCount::new(ROWS),
};

/// A graph of 32 rows around the toy's replay layers, with segments before and after.
struct Model {
    graph: BreakableGraph<(Tensor, Tensor), StepPlan>,
    replay: ReplayBreak,
    planner: Planner,
    toy: Rc<RefCell<Toy>>,
    input: Tensor,
    steps: usize,
}

impl Model {
    fn new(gpu: &Gpu, policy: ReplayPolicy, sizes: Option<&[u32]>, ahead: bool) -> Result<Self> {
        replay_cuda::load_kernels(gpu)?;
        let planner = planner(policy, sizes);
        let toy = Toy::new(ROWS as usize, gpu)?;
        let buffer = |name: &str| {
            FixedBuffers::new(
                &[BufferSpec::new(name, [WIDTH], DType::F32)],
                ROWS as usize,
                gpu,
            )
        };
        let replay: ReplayBreak = ReplayBreak::with_graphs(
            planner.clone(),
            buffer("output")?,
            buffer("input")?,
            gpu.device.clone(),
            CacheConfig::default(),
        )?;
        if ahead {
            replay.capture_graphs(&toy, |progress| println!("{progress}"))?;
        }
        let input = toy::rows(ROWS as usize, 0.0, gpu);
        let mut step = toy::plan(&planner, MODE, &[Request::prefill(30, 0..30)]);
        let options = CaptureOptions::new("model");
        let graph = BreakableGraph::<_, _>::capture_with(gpu, options, &mut step, |scope| {
            let x = input.affine(1.0, 1.0)?;
            let outputs = replay.run(scope, RowCount::new(ROWS), &toy, vec![x.clone()])?;
            Ok((x, outputs[0].affine(1.0, 0.0)?))
        })?;
        assert_eq!(graph.n_breaks(), 1);
        Ok(Self {
            graph,
            replay,
            planner,
            toy,
            input,
            steps: 0,
        })
    }

    /// Runs a step on fresh rows and checks every row of its outputs and of the window KV. What the break of
    /// every second one reads is uploaded ahead.
    #[track_caller]
    fn step(&mut self, first: f32, requests: &[Request]) -> String {
        self.toy.borrow_mut().calls.clear();
        let mut step = toy::plan(&self.planner, MODE, requests);
        let fresh = toy::rows(ROWS as usize, first, self.input.device());
        self.input.slice_set(&fresh, 0, 0).unwrap();
        self.steps += 1;
        if self.steps.is_multiple_of(2) {
            let ahead = self.replay.upload_ahead(&self.toy, &mut step).unwrap();
            self.toy.borrow_mut().ahead = ahead;
        }
        let (x, outputs) = self.graph.launch_with(&mut step).unwrap();
        check_outputs(&step, x, outputs);
        let kv = self.toy.borrow().kv.rows("kv", ROWS as usize).unwrap();
        assert_eq!(kv.to_vec2::<f32>().unwrap(), x.to_vec2::<f32>().unwrap());
        self.toy.borrow().calls.join(", ")
    }
}

/// Batches of every kind: decode rows, trimmed and short prefills, nothing kept, all kept.
fn steps() -> Vec<Vec<Request>> {
    vec![
        vec![Request::prefill(32, 0..32)],
        vec![
            Request::decode(29, 30),
            Request::prefill(20, 0..20),
            Request::prefill(18, 12..18),
        ],
        vec![Request::prefill(100, 0..32)],
        vec![Request::decode(3, 5), Request::decode(3, 9)],
        vec![Request::prefill(9, 0..9), Request::prefill(40, 0..20)],
        vec![Request::prefill(11, 0..11)],
    ]
}

fn check_steps(policy: ReplayPolicy, sizes: Option<&[u32]>, ahead: bool) -> Vec<String> {
    let gpu = gpu();
    let mut model = Model::new(&gpu, policy, sizes, ahead).unwrap();
    let mut calls = Vec::new();
    for round in rounds(20) {
        for (i, requests) in steps().iter().enumerate() {
            calls.push(model.step((round * 100 + i as u64) as f32, requests));
        }
    }
    calls
}

/// Rows that come back to the wrong place, or a trimmed row that holds what a step before left.
#[test]
fn eager_layers() {
    for policy in [
        ReplayPolicy::StepTail,
        ReplayPolicy::PromptTail,
        ReplayPolicy::Exact,
    ] {
        check_steps(policy, None, false);
    }
}

/// The same with graphs that are captured ahead: the layers are never run again.
#[test]
fn layers_in_graphs_captured_ahead() {
    let calls = check_steps(ReplayPolicy::PromptTail, Some(&[8, 16]), true);
    assert!(calls.iter().any(|calls| calls == "prepare 16"), "{calls:?}");
    let padded = calls.iter().filter(|calls| calls.contains("padded"));
    assert_eq!(padded.count(), 0);
}

/// Graphs that were planned for and never captured: no step captures one, the layers run eagerly.
#[test]
fn layers_whose_graphs_were_not_captured() {
    let calls = check_steps(ReplayPolicy::PromptTail, Some(&[8, 16]), false);
    let graphs = calls
        .iter()
        .filter(|calls| calls.contains("pad") || calls.contains("prepare"));
    assert_eq!(graphs.count(), 0, "{calls:?}");
}

/// Six sequences over two hundred steps while another thread allocates: an address of one step that
/// was baked into a graph is another tensor's by then.
#[test]
fn many_sequences_while_memory_churns() {
    let gpu = gpu();
    let sizes: &[u32] = &[8, 16, 32];
    let mut model = Model::new(&gpu, ReplayPolicy::PromptTail, Some(sizes), true).unwrap();
    let churn = Churn::start();
    let mut waste = Vec::new();
    for step in rounds(200) {
        let step = step as u32;
        let requests: Vec<_> = (0..6)
            .map(|i| match (step + i) % 5 {
                0 => Request::prefill(5, 0..5),
                1 => Request::prefill(12, 8..12),
                _ => Request::decode(7, 8 + step),
            })
            .collect();
        model.step(step as f32, &requests);
        waste.push(gpu.tensor(&[1 + (step as usize * 37) % 4096], u64::from(step)));
        if waste.len() > 8 {
            waste.remove(step as usize % 8);
        }
    }
    churn.stop();
}
