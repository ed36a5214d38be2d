//! The break at the cut, on the CPU: which rows the layers run on, how, and where results go.

mod common;
#[path = "common/toy.rs"]
mod toy;

use candle_core::{DType, Device, Tensor};
use common::{Tape, TapeCapture};
use replay_core::{GraphMode, ReplayPlan, ReplayPolicy, Request, RowCount, StepPlan};
use replay_graph::{
    BreakableGraph, BufferSpec, CacheConfig, CaptureMode, CaptureOptions, CaptureReport, Error,
    FixedBuffers, ReplayBreak, Result,
};
use toy::{THRESHOLD, Toy, WIDTH, check_outputs, plan, planner, rows};

const ROWS: u32 = 32;

type Graph = BreakableGraph<Vec<Tensor>, StepPlan, TapeCapture>;

/// A model graph of `padded_rows` rows around the toy's replay layers, captured with a step.
struct Model {
    graph: Graph,
    replay: ReplayBreak<TapeCapture>,
    tape: Tape,
    toy: std::rc::Rc<std::cell::RefCell<Toy>>,
    x: Tensor,
}

impl Model {
    fn capture(
        policy: ReplayPolicy,
        sizes: Option<&[u32]>,
        mode: CaptureMode,
        padded_rows: u32,
        requests: &[Request],
    ) -> Result<Self> {
        let (tape, device) = (Tape::default(), Device::Cpu);
        let toy = Toy::new(ROWS as usize, &device)?;
        let planner = planner(policy, sizes);
        let buffer =
            |rows| FixedBuffers::new(&[BufferSpec::new("x", [WIDTH], DType::F32)], rows, &device);
        let replay = ReplayBreak::<TapeCapture>::with_graphs(
            planner.clone(),
            buffer(ROWS as usize)?,
            buffer(ROWS as usize)?,
            tape.clone(),
            CacheConfig::default(),
        )?;
        let x = rows(padded_rows as usize, 1.0, &device);
        let mut step = plan(&planner, graph_mode(mode, padded_rows), requests);
        let options = CaptureOptions::new("model").mode(mode);
        let graph = Graph::capture_with(&tape, options, &mut step, |scope| {
            replay.run(scope, RowCount::new(padded_rows), &toy, vec![x.clone()])
        })?;
        let this = Self {
            graph,
            replay,
            tape,
            toy,
            x,
        };
        this.check(&step);
        Ok(this)
    }

    /// Launches another step in the graph.
    fn launch(&mut self, mut step: StepPlan) {
        self.toy.borrow_mut().calls.clear();
        self.graph.launch_with(&mut step).unwrap();
        self.check(&step);
    }

    fn check(&self, step: &StepPlan) {
        check_outputs(step, &self.x, &self.graph.output()[0]);
    }

    fn calls(&self) -> String {
        self.toy.borrow().calls.join(", ")
    }
}

fn graph_mode(mode: CaptureMode, padded_rows: u32) -> GraphMode {
    let padded_rows = RowCount::new(padded_rows);
    match mode {
        CaptureMode::Piecewise => GraphMode::Piecewise { padded_rows },
        CaptureMode::Full => GraphMode::Full { padded_rows },
    }
}

/// A decode row, a long prefill and a short one: 27 rows, 15 of them kept.
fn mixed() -> [Request; 3] {
    [
        Request::decode(29, 30),
        Request::prefill(20, 0..20),
        Request::prefill(18, 12..18),
    ]
}

/// The rows that are kept come out as the layers make them, every other row as zero, whatever the
/// step before left in the fixed buffers.
#[test]
fn kept_rows_come_back_to_their_places() {
    let policy = ReplayPolicy::PromptTail;
    let mut model = Model::capture(policy, None, CaptureMode::Piecewise, ROWS, &mixed()).unwrap();
    assert_eq!(model.graph.n_breaks(), 1);
    let planner = planner(policy, None);
    let steps: [&[Request]; 5] = [
        &[Request::prefill(32, 0..32)],
        &[Request::prefill(9, 0..9), Request::prefill(40, 0..20)],
        &[Request::decode(3, 5), Request::decode(3, 9)],
        &[Request::prefill(100, 0..32)],
        &mixed(),
    ];
    for requests in steps {
        let mode = graph_mode(CaptureMode::Piecewise, ROWS);
        model.launch(plan(&planner, mode, requests));
    }
}

/// A chunk that keeps no row runs no layer, and gives zeros.
#[test]
fn a_step_without_kept_rows_runs_nothing() {
    let policy = ReplayPolicy::PromptTail;
    let mut model = Model::capture(policy, None, CaptureMode::Piecewise, ROWS, &mixed()).unwrap();
    let mode = graph_mode(CaptureMode::Piecewise, ROWS);
    let step = plan(
        &planner(policy, None),
        mode,
        &[Request::prefill(100, 0..32)],
    );
    assert!(step.output_rows().is_empty());
    model.launch(step);
    assert_eq!(model.calls(), "");
}

/// The replay batch runs in the smallest graph that holds it, and eagerly above the largest, and where
/// there is no graph: before the capture, and after they are dropped.
#[test]
fn replay_batches_run_in_graphs_of_their_own() {
    let policy = ReplayPolicy::PromptTail;
    let sizes: &[u32] = &[8, 16];
    let mut model =
        Model::capture(policy, Some(sizes), CaptureMode::Piecewise, ROWS, &mixed()).unwrap();
    let planner = planner(policy, Some(sizes));
    let mode = graph_mode(CaptureMode::Piecewise, ROWS);
    let steps = |model: &mut Model| {
        let mut seen = Vec::new();
        for requests in [
            &[Request::prefill(20, 0..20)][..],
            &mixed(),
            &[Request::prefill(20, 12..20)],
            &[
                Request::prefill(20, 12..20),
                Request::prefill(20, 12..20),
                Request::decode(3, 5),
            ],
        ] {
            // A tape repeats no work, so outputs are right only where the layers run anew.
            model.toy.borrow_mut().calls.clear();
            let mut step = plan(&planner, mode, requests);
            model.graph.launch_with(&mut step).unwrap();
            seen.push(model.calls());
        }
        seen.join(", ")
    };
    let eagerly = "run 8 rows, run 15 rows, run 8 rows, run 17 rows";
    assert_eq!(steps(&mut model), eagerly);
    model.tape.segments_take(1000);
    let report = model.replay.capture_graphs(&model.toy, |_| ()).unwrap();
    assert_eq!((report.captured, report.memory.bytes()), (2, 2000));
    let there = model.replay.captured();
    assert_eq!((there.already, there.memory), (2, report.memory));
    assert_eq!(
        steps(&mut model),
        "prepare 8, prepare 16, prepare 8, run 17 rows"
    );
    model.replay.clear_graphs().unwrap();
    assert_eq!(model.replay.captured().already, 0);
    assert_eq!(steps(&mut model), eagerly);
}

/// Copies from the host before the launch, not while the device waits in the break; for another graph than
/// the break launches they would be wrong, and are left.
#[test]
fn what_a_break_reads_is_uploaded_before_the_launch() {
    let policy = ReplayPolicy::PromptTail;
    let sizes: &[u32] = &[8, 16];
    let mut model =
        Model::capture(policy, Some(sizes), CaptureMode::Piecewise, ROWS, &mixed()).unwrap();
    let planner = planner(policy, Some(sizes));
    let mode = graph_mode(CaptureMode::Piecewise, ROWS);
    let eight: &[Request] = &[Request::prefill(20, 0..20)];
    let step = |requests: &[Request]| plan(&planner, mode, requests);
    let upload = |model: &Model, requests: &[Request]| {
        let ahead = model.replay.upload_ahead(&model.toy, &mut step(requests));
        ahead.unwrap()
    };
    assert!(upload(&model, eight).is_none(), "no graph yet");
    model.replay.capture_graphs(&model.toy, |_| ()).unwrap();
    let none: [&[Request]; 2] = [
        &[Request::prefill(100, 0..32)],
        &[
            Request::prefill(20, 12..20),
            Request::prefill(20, 12..20),
            Request::decode(3, 5),
        ],
    ];
    for requests in none {
        assert!(upload(&model, requests).is_none(), "{requests:?}");
    }
    let mut calls = Vec::new();
    for (ahead_of, requests) in [(eight, eight), (&mixed(), &mixed()), (eight, &mixed())] {
        model.toy.borrow_mut().calls.clear();
        let ahead = upload(&model, ahead_of);
        model.toy.borrow_mut().ahead = ahead;
        model.toy.borrow_mut().calls.push("launch".to_owned());
        model.graph.launch_with(&mut step(requests)).unwrap();
        assert!(model.toy.borrow().ahead.is_none());
        calls.push(model.calls());
    }
    assert_eq!(
        calls,
        [
            "prepare 8, launch",
            "prepare 16, launch",
            "prepare 8, launch, prepare 16"
        ]
    );
}

/// What was captured before a capture failed can be dropped, also where the driver then fails to give
/// its memory back, and the layers run on.
#[test]
fn graphs_are_given_up_after_a_failed_capture() {
    let policy = ReplayPolicy::PromptTail;
    let sizes: &[u32] = &[8, 16];
    let mut model =
        Model::capture(policy, Some(sizes), CaptureMode::Piecewise, ROWS, &mixed()).unwrap();
    let failed = model.replay.capture_graphs(&model.toy, |progress| {
        assert_eq!(progress.done, 1, "the smaller one fails");
        model.tape.fail_at("open full graph of 8 rows", 2);
    });
    assert!(failed.is_err());
    assert_eq!(model.replay.captured().already, 1);
    model.tape.fail_at("trim", 2);
    model.replay.clear_graphs().unwrap_err();
    assert_eq!(model.replay.captured(), CaptureReport::default());
    let mode = graph_mode(CaptureMode::Piecewise, ROWS);
    model.launch(plan(&planner(policy, Some(sizes)), mode, &mixed()));
    assert_eq!(model.calls(), "run 15 rows");
}

/// Where layers run on different rows, the break gives the rows of the last.
#[test]
fn tapering_rows_end_at_those_of_the_last_layer() {
    let policy = ReplayPolicy::Exact;
    let mut model =
        Model::capture(policy, Some(&[32]), CaptureMode::Piecewise, ROWS, &mixed()).unwrap();
    let mode = graph_mode(CaptureMode::Piecewise, ROWS);
    let planner = planner(policy, Some(&[32]));
    let step = plan(&planner, mode, &[Request::prefill(30, 0..30)]);
    assert!(step.output_rows().n_rows() < step.n_rows());
    model.launch(step);
    assert_eq!(model.calls(), "run 15 rows");
}

/// Capture and planning ask one predicate, so small and full graphs hold the whole batch in both.
#[test]
fn graphs_that_do_not_break_run_the_whole_batch() {
    let requests = [Request::prefill(12, 0..12)];
    for (mode, rows) in [
        (CaptureMode::Piecewise, THRESHOLD - 1),
        (CaptureMode::Full, THRESHOLD - 1),
        (CaptureMode::Full, ROWS),
    ] {
        let (tape, device) = (Tape::default(), Device::Cpu);
        let planner = planner(ReplayPolicy::PromptTail, None);
        let toy = Toy::new(ROWS as usize, &device).unwrap();
        let spec = BufferSpec::new("x", [WIDTH], DType::F32);
        let outputs = FixedBuffers::new(&[spec], ROWS as usize, &device).unwrap();
        let replay = ReplayBreak::<TapeCapture>::new(planner.clone(), outputs);
        let mut step = plan(&planner, graph_mode(mode, rows), &requests);
        assert_eq!(step.decision(), ReplayPlan::WholeBatch);
        let x = toy::rows(rows as usize, 0.0, &device);
        let options = CaptureOptions::new("model").mode(mode);
        let graph = Graph::capture_with(&tape, options, &mut step, |scope| {
            replay.run(scope, RowCount::new(rows), &toy, vec![x.clone()])
        })
        .unwrap();
        assert_eq!(graph.n_breaks(), 0);
        assert_eq!(
            toy.borrow().calls.join(", "),
            "write batch kv, run batch, write batch kv, run batch"
        );
    }
}

/// A step that was planned for another graph is refused, not run on the wrong rows.
#[test]
fn a_plan_for_another_graph_is_refused() {
    let policy = ReplayPolicy::PromptTail;
    let mut model = Model::capture(policy, None, CaptureMode::Piecewise, ROWS, &mixed()).unwrap();
    let planner = planner(policy, None);
    let mut eager = plan(&planner, GraphMode::None, &mixed());
    let error = model.graph.launch_with(&mut eager).unwrap_err();
    let Error::Break { source, .. } = error else {
        panic!("{error}");
    };
    assert!(
        matches!(*source, Error::NotPlannedToBreak { .. }),
        "{source}"
    );
}

/// Layers that lose rows are found out; the rows that are left would land at others' places.
#[test]
fn fewer_output_rows_than_planned_are_refused() {
    let policy = ReplayPolicy::PromptTail;
    let mut model = Model::capture(policy, None, CaptureMode::Piecewise, ROWS, &mixed()).unwrap();
    model.toy.borrow_mut().forgets = 1;
    let mode = graph_mode(CaptureMode::Piecewise, ROWS);
    let mut step = plan(&planner(policy, None), mode, &mixed());
    let error = model.graph.launch_with(&mut step).unwrap_err();
    let Error::Break { source, .. } = error else {
        panic!("{error}");
    };
    assert_eq!(
        source.to_string(),
        "expected the output of 15 rows of the replay layers, got 14"
    );
}

/// Fixed inputs that cannot hold the largest replay graph are found at construction.
#[test]
fn inputs_below_the_largest_graph_are_refused() {
    let device = Device::Cpu;
    let buffer = |rows| {
        FixedBuffers::new(&[BufferSpec::new("x", [WIDTH], DType::F32)], rows, &device).unwrap()
    };
    let refused = ReplayBreak::<TapeCapture>::with_graphs(
        planner(ReplayPolicy::PromptTail, Some(&[8, 16])),
        buffer(32),
        buffer(15),
        Tape::default(),
        CacheConfig::default(),
    )
    .unwrap_err();
    assert!(
        matches!(
            refused,
            Error::TooManyRows {
                rows: 16,
                max_rows: 15
            }
        ),
        "{refused}"
    );
}
