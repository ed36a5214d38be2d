//! Graph modes, the whole batch, and what a rank does under an agreement.

use replay_core::{
    Agreement, AgreementError, CaptureSizes, GraphMode, PlanError, RankNeed, ReplayBatch,
    ReplayLaunch, ReplayPlan, ReplayPolicy, Request, RowCount, StepPlan, agree,
};

use crate::models::tiny;

const BOUNDED: [ReplayPolicy; 2] = [ReplayPolicy::StepTail, ReplayPolicy::PromptTail];

fn piecewise(rows: u32) -> GraphMode {
    GraphMode::Piecewise {
        padded_rows: RowCount::new(rows),
    }
}

fn full(rows: u32) -> GraphMode {
    GraphMode::Full {
        padded_rows: RowCount::new(rows),
    }
}

fn planned(policy: ReplayPolicy, mode: GraphMode, requests: &[Request]) -> StepPlan {
    let mut plan = StepPlan::new();
    tiny(policy)
        .plan_step(mode, requests, &mut plan)
        .expect("a plan");
    plan
}

fn batch(n_rows: u32, trimmed: bool, launch: ReplayLaunch) -> ReplayBatch {
    ReplayBatch {
        n_rows: RowCount::new(n_rows),
        trimmed,
        launch,
    }
}

/// A piecewise graph breaks from six windows on (48 rows at a window of 8), whether or not the batch
/// in it has a row to drop; capture asks the same function.
#[test]
fn piecewise_graphs_break_by_their_size_alone() {
    let prefill = [Request::prefill(20, 0..20)];
    let decode = [Request::decode(3, 4)];
    for policy in BOUNDED {
        let planner = tiny(policy);
        assert_eq!(planner.trim_threshold().get(), 48);
        for (rows, breaks) in [(20, false), (47, false), (48, true), (64, true)] {
            assert_eq!(planner.graph_breaks(piecewise(rows)), breaks);
            for requests in [&prefill, &decode] {
                let plan = planned(policy, piecewise(rows), requests);
                assert_eq!(matches!(plan.decision(), ReplayPlan::BreakOut(_)), breaks);
                assert_eq!(plan.graph_mode(), piecewise(rows));
            }
        }
        let launch = ReplayLaunch::Eager;
        let plan = planned(policy, piecewise(48), &prefill);
        assert_eq!(
            plan.decision(),
            ReplayPlan::BreakOut(batch(8, true, launch))
        );
        let plan = planned(policy, piecewise(48), &decode);
        assert_eq!(
            plan.decision(),
            ReplayPlan::BreakOut(batch(1, false, launch))
        );
    }
}

#[test]
fn full_graphs_and_off_never_break() {
    let prefill = [Request::prefill(20, 0..20)];
    for policy in ReplayPolicy::ALL {
        assert!(!tiny(policy).graph_breaks(full(1024)));
        assert!(!tiny(policy).graph_breaks(GraphMode::None));
        let plan = planned(policy, full(20), &prefill);
        assert_eq!(plan.decision(), ReplayPlan::WholeBatch);
        assert!(
            plan.layers()
                .all(|layer| layer.entering.is_whole() && layer.running.is_whole())
        );
    }
    assert!(!tiny(ReplayPolicy::Off).graph_breaks(piecewise(1024)));
    let plan = planned(ReplayPolicy::Off, GraphMode::None, &prefill);
    assert_eq!(plan.decision(), ReplayPlan::WholeBatch);
}

#[test]
fn a_threshold_of_its_own() {
    let planner = tiny(ReplayPolicy::PromptTail)
        .with_trim_threshold(9)
        .unwrap();
    assert!(planner.graph_breaks(piecewise(9)));
    assert!(!planner.graph_breaks(piecewise(8)));
}

#[test]
fn planners_tell_what_they_were_made_for() {
    let sizes = CaptureSizes::new(&[8, 16], 16).expect("sizes");
    let planner = tiny(ReplayPolicy::Exact).with_capture_sizes(sizes.clone());
    assert_eq!(planner.capture_sizes(), Some(&sizes));
    assert_eq!(tiny(ReplayPolicy::Exact).capture_sizes(), None);
    let tails = |policy| [0, 1, 2].map(|layer| tiny(policy).tail_rows(layer).map(RowCount::get));
    assert_eq!(tails(ReplayPolicy::Off), [None; 3]);
    assert_eq!(tails(ReplayPolicy::StepTail), [Some(8); 3]);
    assert_eq!(tails(ReplayPolicy::PromptTail), [Some(8); 3]);
    assert_eq!(tails(ReplayPolicy::Exact), [Some(15), Some(8), Some(1)]);
}

/// Earlier chunks kept nothing below `p - W`, so a last chunk that drops nothing, or a graph that
/// keeps every row, must not read there either.
#[test]
fn the_bound_follows_the_prompt_when_the_step_drops_nothing() {
    let last_chunk = [Request::prefill(80, 76..80)];
    for mode in [GraphMode::None, full(4), piecewise(4)] {
        let plan = planned(ReplayPolicy::PromptTail, mode, &last_chunk);
        assert_eq!(plan.decision(), ReplayPlan::WholeBatch);
        let bounds: Vec<u32> = plan.layers().map(|layer| layer.kv_start[0]).collect();
        assert_eq!(bounds, [0, 72, 72]);

        // Exact, cut + 1 and cut + 2: what the layer before ran, 15 and 8 rows.
        let plan = planned(ReplayPolicy::Exact, mode, &last_chunk);
        let bounds: Vec<u32> = plan.layers().map(|layer| layer.kv_start[0]).collect();
        assert_eq!(bounds, [0, 65, 72]);
    }
    // The whole chunk is below the bound: no negative length of window KV.
    let plan = planned(
        ReplayPolicy::PromptTail,
        full(16),
        &[Request::prefill(80, 16..32)],
    );
    assert_eq!(plan.layer(1).kv_start, [32]);
    // StepTail bounds by what an eager step drops of the chunk, whether or not this one does.
    for mode in [GraphMode::None, full(20), piecewise(20)] {
        let plan = planned(ReplayPolicy::StepTail, mode, &[Request::prefill(20, 0..20)]);
        assert_eq!(plan.layer(1).kv_start, [12]);
        let plan = planned(
            ReplayPolicy::StepTail,
            mode,
            &[Request::prefill(20, 12..20)],
        );
        assert_eq!(plan.layer(1).kv_start, [0]);
    }
    // Nothing is ever dropped of a prompt within the window, nor below a prefix hit's window.
    let plan = planned(
        ReplayPolicy::PromptTail,
        GraphMode::None,
        &[Request::prefill(8, 4..8)],
    );
    assert_eq!(plan.layer(1).kv_start, [0]);
    let hit = Request {
        replay_start: 75,
        ..Request::prefill(80, 76..80)
    };
    let plan = planned(ReplayPolicy::PromptTail, GraphMode::None, &[hit]);
    assert_eq!(plan.layer(1).kv_start, [75]);
}

/// A chunk without a kept row skips the layers; the cut still takes in all its rows.
#[test]
fn chunks_without_a_kept_row_skip_the_layers() {
    let planner = tiny(ReplayPolicy::PromptTail)
        .with_capture_sizes(CaptureSizes::new(&[8, 16], 16).expect("sizes"));
    let plan = planner.plan(&[Request::prefill(80, 16..32)]).unwrap();
    let skipped = batch(0, true, ReplayLaunch::Skip);
    assert_eq!(plan.decision(), ReplayPlan::EagerTrim(skipped));
    assert_eq!(plan.decision().replay_batch(), Some(&skipped));
    assert_eq!(plan.layer(0).entering.n_rows().get(), 16);
    assert!(plan.layers().all(|layer| layer.running.is_empty()));
    assert!(plan.layer(1).entering.is_empty() && !plan.layer(1).drops());

    // Exact: rows in the cut and in the layer after it, none in the last.
    let plan = tiny(ReplayPolicy::Exact)
        .plan(&[Request::prefill(80, 64..74)])
        .unwrap();
    let rows: Vec<u32> = plan
        .layers()
        .map(|layer| layer.running.n_rows().get())
        .collect();
    assert_eq!(rows, [9, 2, 0]);
    let mut gather = vec![];
    plan.layer(1).gather_into(&mut gather);
    assert_eq!(gather, [7, 8]);
    assert!(!plan.is_uniform());
}

/// Rows that a step has past the prompt run, even when they are more than a window.
#[test]
fn rows_past_the_prompt_always_run() {
    for policy in ReplayPolicy::ALL {
        let ends_prompt = Request {
            query_len: 30,
            seq_len: 40,
            ..Request::prefill(25, 10..25)
        };
        let verifies = Request {
            query_len: 12,
            ..Request::decode(25, 40)
        };
        let plan = planned(policy, GraphMode::None, &[ends_prompt, verifies]);
        for layer in plan.layers() {
            assert!(layer.running.n_rows_of(0).get() >= 15);
            assert_eq!(layer.running.n_rows_of(1).get(), 12);
        }
    }
}

#[test]
fn an_empty_batch_is_a_whole_batch() {
    let plan = planned(ReplayPolicy::PromptTail, GraphMode::None, &[]);
    assert_eq!(plan.decision(), ReplayPlan::WholeBatch);
    assert_eq!(
        (
            plan.n_rows().get(),
            plan.n_batch_rows().get(),
            plan.n_requests()
        ),
        (0, 0, 0)
    );
    assert!(plan.layer(2).kv_start.is_empty());

    let unplanned = StepPlan::new();
    assert_eq!(
        (unplanned.n_rows().get(), unplanned.n_batch_rows().get()),
        (0, 0)
    );
    assert!(unplanned.is_uniform() && !unplanned.is_trimmed());
}

#[test]
fn contradictions_are_refused_and_leave_an_empty_plan() {
    let fine = Request::decode(3, 4);
    let cases = [
        (
            Request {
                query_len: 5,
                seq_len: 4,
                ..fine
            },
            PlanError::QueryExceedsSequence {
                request: 1,
                query_len: 5,
                seq_len: 4,
            },
        ),
        (
            Request {
                prefilling: true,
                ..fine
            },
            PlanError::PhaseMismatch {
                request: 1,
                start: 3,
                prompt_len: 3,
                prefilling: true,
            },
        ),
        (
            Request {
                replay_start: 4,
                ..fine
            },
            PlanError::StartsBelowReplay {
                request: 1,
                start: 3,
                replay_start: 4,
            },
        ),
        (
            Request::prefill(u32::MAX, 0..u32::MAX),
            PlanError::TooManyRows { request: 1 },
        ),
    ];
    let planner = tiny(ReplayPolicy::PromptTail);
    for (request, error) in cases {
        let mut plan = planner.plan(&[fine]).unwrap();
        assert_eq!(planner.plan_into(&[fine, request], &mut plan), Err(error));
        assert_eq!(plan, StepPlan::new());
    }
    let mut plan = StepPlan::new();
    let small = planner.plan_step(full(2), &[fine; 3], &mut plan);
    assert_eq!(
        small,
        Err(PlanError::GraphTooSmall {
            n_rows: 3,
            padded_rows: 2
        })
    );
    assert_eq!(plan, StepPlan::new());
}

/// A rank without a row to drop joins with its whole batch, one without a row with padding alone.
#[test]
fn ranks_join_what_was_agreed() {
    let sizes = CaptureSizes::new(&[8, 16, 32], 32).unwrap();
    let planner = tiny(ReplayPolicy::PromptTail).with_capture_sizes(sizes.clone());
    let ranks = [
        planner
            .plan(&[Request::prefill(20, 0..20), Request::decode(3, 4)])
            .unwrap(),
        planner.plan(&[Request::decode(3, 4); 17]).unwrap(),
        planner.plan(&[]).unwrap(),
    ];
    let needs: Vec<RankNeed> = ranks.iter().map(RankNeed::of).collect();
    let agreed = agree(&needs, Some(&sizes));
    let launch = ReplayLaunch::Graph {
        padded_rows: RowCount::new(32),
    };
    assert_eq!(agreed, Agreement::Replay(launch));
    for (plan, n_rows, trimmed) in [
        (&ranks[0], 9, true),
        (&ranks[1], 17, false),
        (&ranks[2], 0, false),
    ] {
        let joined = ReplayPlan::EagerTrim(batch(n_rows, trimmed, launch));
        assert_eq!(plan.decision_under(agreed), Ok(joined));
    }

    let idle = Agreement::WholeBatch;
    assert_eq!(ranks[1].decision_under(idle), Ok(ReplayPlan::WholeBatch));
    assert_eq!(
        ranks[0].decision_under(idle),
        Err(AgreementError::NotCounted)
    );
    let small = ReplayLaunch::Graph {
        padded_rows: RowCount::new(8),
    };
    let refused = AgreementError::DoesNotFit {
        launch: small,
        n_rows: 17,
    };
    assert_eq!(
        ranks[1].decision_under(Agreement::Replay(small)),
        Err(refused)
    );
    let skip = ReplayLaunch::Skip;
    let refused = AgreementError::DoesNotFit {
        launch: skip,
        n_rows: 17,
    };
    assert_eq!(
        ranks[1].decision_under(Agreement::Replay(skip)),
        Err(refused)
    );
    assert!(ranks[2].decision_under(Agreement::Replay(skip)).is_ok());

    let eager = Agreement::Replay(ReplayLaunch::Eager);
    let in_graph = planned(
        ReplayPolicy::PromptTail,
        piecewise(8),
        &[Request::decode(3, 4)],
    );
    let refused = AgreementError::GraphDoesNotBreak { padded_rows: 8 };
    assert_eq!(in_graph.decision_under(eager), Err(refused));
    let broken = planned(
        ReplayPolicy::PromptTail,
        piecewise(64),
        &[Request::decode(3, 4)],
    );
    let joined = ReplayPlan::BreakOut(batch(1, false, ReplayLaunch::Eager));
    assert_eq!(broken.decision_under(eager), Ok(joined));
}
