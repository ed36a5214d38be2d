//! The walk over the replay layers without a graph.

#[path = "common/toy.rs"]
#[allow(dead_code, reason = "the planner alone is used")]
mod toy;

use replay_core::{LayerRows, ReplayPolicy, Request, RowIdx, StepPlan};
use replay_graph::{Error, ReplayDecoder, Result, resume_replay_layers, run_replay_layers};

/// A decoder whose only per-row tensor is the rows' numbers, and which counts the layers that ran.
#[derive(Default)]
struct Counting {
    ran: u32,
}

impl ReplayDecoder for Counting {
    type State = Vec<u32>;
    type Entered = Vec<u32>;
    type Error = Error;

    fn enter(&mut self, _: u32, rows: Vec<u32>, _: &LayerRows<'_>) -> Result<Vec<u32>> {
        Ok(rows)
    }

    fn gather(&mut self, rows: Vec<u32>, index: &[u32]) -> Result<Vec<u32>> {
        Ok(index.iter().map(|&i| rows[i as usize]).collect())
    }

    fn run(&mut self, _: u32, rows: Vec<u32>, _: &LayerRows<'_>) -> Result<Vec<u32>> {
        self.ran += 1;
        Ok(rows)
    }

    fn skip(&mut self, _: u32, _: Vec<u32>, _: &LayerRows<'_>) -> Result<()> {
        Ok(())
    }
}

/// A plan without a layer, new or left by an error of planning: its walk would give the state back as
/// if all layers had run.
#[test]
fn an_empty_plan_is_refused() {
    let planner = toy::planner(ReplayPolicy::PromptTail, None);
    let mut failed = planner.plan(&[Request::prefill(20, 0..20)]).unwrap();
    let contradiction = Request {
        seq_len: 3,
        ..Request::prefill(20, 0..20)
    };
    planner
        .plan_into(&[contradiction], &mut failed)
        .unwrap_err();

    for plan in [StepPlan::new(), failed] {
        let mut decoder = Counting::default();
        let error = run_replay_layers(&mut decoder, &plan, vec![0]).unwrap_err();
        assert!(matches!(error, Error::EmptyPlan), "{error}");
        let error = resume_replay_layers(&mut decoder, &plan, vec![0]).unwrap_err();
        assert!(matches!(error, Error::EmptyPlan), "{error}");
        assert_eq!(decoder.ran, 0);
    }
}

/// A step without a request has layers all the same, and no rows to lose.
#[test]
fn a_step_without_rows_is_no_empty_plan() {
    let planner = toy::planner(ReplayPolicy::PromptTail, None);
    let plan = planner.plan(&[]).unwrap();
    let left = run_replay_layers(&mut Counting::default(), &plan, Vec::new()).unwrap();
    assert_eq!(left, None);
}

/// Resumed after the cut, the walk ends at the rows at which the whole walk ends.
#[test]
fn resuming_ends_where_the_whole_walk_does() {
    let planner = toy::planner(ReplayPolicy::Exact, None);
    let plan = planner.plan(&[Request::prefill(40, 0..40)]).unwrap();
    let (mut whole, mut resumed) = (Counting::default(), Counting::default());
    let left = run_replay_layers(&mut whole, &plan, (0..40).collect()).unwrap();
    let entered = plan.layer(0).running.indices().map(RowIdx::get).collect();
    assert_eq!(
        resume_replay_layers(&mut resumed, &plan, entered).unwrap(),
        left
    );
    assert_eq!(left, Some(vec![39]));
    assert_eq!((whole.ran, resumed.ran), (3, 3));
}
