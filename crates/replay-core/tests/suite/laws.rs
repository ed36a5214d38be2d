//! Laws that hold for every plan, over random batches.

use proptest::prelude::*;
use replay_core::{
    GraphMode, LayerRows, Planner, Position, ReplayPlan, ReplayPolicy, Request, RowCount, RowIdx,
    RowSet, Rows, Slot, StepPlan,
};

use crate::models::planner;

fn policies() -> impl Strategy<Value = ReplayPolicy> {
    prop::sample::select(ReplayPolicy::ALL.to_vec())
}

fn planners() -> impl Strategy<Value = Planner> {
    (policies(), 1..=9u32, 1..=4u32, 1..=10u32)
        .prop_map(|(policy, window, depth, sampled)| planner(policy, window, depth, sampled))
}

/// A prefill chunk, cold or after a hit, that may run past its prompt; or decode rows; or no row.
fn requests() -> impl Strategy<Value = Request> {
    let prefill = (
        0..40u32,
        0..40u32,
        1..40u32,
        0..40u32,
        0..3u32,
        any::<bool>(),
    )
        .prop_map(|(replay_start, done, query_len, left, past, keeps_rows)| {
            let replay_start = replay_start.saturating_sub(20); // half of them cold
            let start = replay_start + done;
            let prompt_len = start + query_len + left;
            let past = if left == 0 { past } else { 0 };
            let chunk = Request::prefill(prompt_len, start..start + query_len + past);
            Request {
                replay_start,
                keeps_rows,
                ..chunk
            }
        });
    let decode = (1..40u32, 0..40u32, 0..4u32, any::<bool>()).prop_map(
        |(prompt_len, done, query_len, keeps_rows)| {
            let seq_len = prompt_len + done + query_len;
            Request {
                query_len,
                keeps_rows,
                ..Request::decode(prompt_len, seq_len)
            }
        },
    );
    prop_oneof![3 => prefill, 1 => decode]
}

fn batches() -> impl Strategy<Value = Vec<Request>> {
    prop::collection::vec(requests(), 0..8)
}

/// Which graph, and by how many rows it is larger than the batch.
fn modes() -> impl Strategy<Value = fn(u32) -> GraphMode> {
    prop::sample::select(vec![
        (|_| GraphMode::None) as fn(u32) -> GraphMode,
        |rows| GraphMode::Full {
            padded_rows: RowCount::new(rows),
        },
        |rows| GraphMode::Piecewise {
            padded_rows: RowCount::new(rows + 3),
        },
        |rows| GraphMode::Piecewise {
            padded_rows: RowCount::new(rows + 1000),
        },
    ])
}

fn n_rows(batch: &[Request]) -> u32 {
    batch.iter().map(|request| request.query_len).sum()
}

fn planned(planner: &Planner, mode: fn(u32) -> GraphMode, batch: &[Request]) -> StepPlan {
    let mut plan = StepPlan::new();
    planner
        .plan_step(mode(n_rows(batch)), batch, &mut plan)
        .expect("a plan");
    plan
}

fn indices(set: &RowSet<'_>) -> Vec<u32> {
    set.indices().map(RowIdx::get).collect()
}

/// Rows are ascending, in range and of each request a suffix; offsets, ranges, positions and lists
/// say the same.
fn check_set(set: &RowSet<'_>, batch: &[Request]) {
    let offsets = set.query_start_loc();
    assert_eq!(offsets.len(), batch.len() + 1);
    assert_eq!(set.n_requests(), batch.len());
    assert_eq!(offsets[0], 0);
    assert_eq!(set.n_rows().get(), offsets[batch.len()]);

    let (mut rows, mut positions, mut end) = (vec![], vec![], 0);
    for (r, request) in batch.iter().enumerate() {
        let n = set.n_rows_of(r).get();
        assert_eq!(n, offsets[r + 1] - offsets[r]);
        assert!(n <= request.query_len);
        assert_eq!(set.dropped_before(r).get(), end - offsets[r]);
        end += request.query_len;
        rows.extend(end - n..end);
        positions.extend(request.seq_len - n..request.seq_len);
    }
    assert_eq!(set.n_batch_rows().get(), end);
    assert!(rows.is_sorted_by(|a, b| a < b));
    assert_eq!(indices(set), rows);
    assert_eq!(
        set.positions().map(Position::get).collect::<Vec<_>>(),
        positions
    );
    assert_eq!(set.is_whole(), set.n_rows() == set.n_batch_rows());
    assert_eq!(set.is_empty(), rows.is_empty());
    match set.rows() {
        Rows::Whole => assert_eq!(rows.len() as u32, end),
        Rows::Listed(list) => assert_eq!(list, rows),
    }
}

fn check_layer(layer: &LayerRows<'_>, batch: &[Request], trims: bool, sampled: u32) {
    check_set(&layer.entering, batch);
    check_set(&layer.running, batch);

    let (entering, running) = (indices(&layer.entering), indices(&layer.running));
    let mut gather = vec![7; 3];
    layer.gather_into(&mut gather);
    let gathered: Vec<u32> = gather.iter().map(|&i| entering[i as usize]).collect();
    assert_eq!(gathered, running);
    assert_eq!(layer.drops(), running.len() < entering.len());

    assert_eq!(layer.kv_start.len(), batch.len());
    for (r, request) in batch.iter().enumerate() {
        let n = layer.running.n_rows_of(r).get();
        if request.keeps_rows || !request.prefilling {
            assert_eq!(n, request.query_len);
        }
        // Rows past the prompt, and the sampled rows before them.
        let read = (request.seq_len + sampled).saturating_sub(request.prompt_len);
        assert!(n >= read.min(request.query_len));
        assert!((request.replay_start..=request.seq_len).contains(&layer.kv_start[r]));
        if trims && n > 0 {
            assert!(
                layer.kv_start[r] <= request.seq_len - n,
                "a running row without a key"
            );
        }
    }
}

/// The rule of `StepTail`, said once more: of each prefill the last `min(q, W)` rows, with no window
/// KV below the first of them when that drops a row. (More than `W` when more outputs are read.)
fn step_tail(batch: &[Request], window: u32, sampled: u32) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
    let (mut rows, mut offsets, mut kv_start, mut end) = (vec![], vec![0], vec![], 0);
    for r in batch {
        end += r.query_len;
        let all = !r.prefilling || r.keeps_rows;
        let tail = window
            .max(sampled)
            .max((r.seq_len + sampled).saturating_sub(r.prompt_len));
        let n = if all {
            r.query_len
        } else {
            r.query_len.min(tail)
        };
        rows.extend(end - n..end);
        offsets.push(rows.len() as u32);
        kv_start.push(if n < r.query_len {
            r.seq_len - n
        } else {
            r.replay_start
        });
    }
    (rows, offsets, kv_start)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn plans_are_sound(planner in planners(), mode in modes(), batch in batches()) {
        let plan = planned(&planner, mode, &batch);
        let mode = plan.graph_mode();
        let breaks = planner.graph_breaks(mode);
        let trims = breaks || mode == GraphMode::None;
        prop_assert_eq!(plan.n_layers(), planner.config().layers.count());
        prop_assert_eq!(plan.n_batch_rows().get(), n_rows(&batch));

        prop_assert!(plan.layer(0).entering.is_whole());
        for i in 0..plan.n_layers() {
            check_layer(&plan.layer(i), &batch, trims, planner.config().sampled_rows.get());
            if i > 0 {
                prop_assert_eq!(plan.layer(i).entering, plan.layer(i - 1).running);
            }
        }
        let whole = plan.layers().all(|layer| layer.running.is_whole());
        let uniform = plan.layers().all(|layer| layer.running == plan.layer(0).running);
        prop_assert_eq!(plan.is_trimmed(), !whole);
        prop_assert_eq!(plan.is_uniform(), uniform);
        prop_assert_eq!(plan.n_rows(), plan.layer(0).running.n_rows());
        prop_assert_eq!(plan.output_rows(), plan.layer(plan.n_layers() - 1).running);
        match plan.decision() {
            ReplayPlan::WholeBatch => prop_assert!(whole && !breaks),
            ReplayPlan::EagerTrim(replay) => {
                prop_assert!(!whole && mode == GraphMode::None && replay.trimmed);
                prop_assert_eq!(replay.n_rows, plan.n_rows());
            }
            ReplayPlan::BreakOut(replay) => {
                prop_assert!(breaks);
                prop_assert_eq!(replay.trimmed, !whole);
            }
        }
    }

    #[test]
    fn step_tail_is_its_rule(
        window in 1..=9u32, depth in 1..=3u32, sampled in 1..=10u32, batch in batches(),
    ) {
        let plan = planner(ReplayPolicy::StepTail, window, depth, sampled).plan(&batch).expect("a plan");
        let (rows, offsets, kv_start) = step_tail(&batch, window, sampled);
        for (i, layer) in plan.layers().enumerate() {
            prop_assert_eq!(indices(&layer.running), rows.clone());
            prop_assert_eq!(layer.running.query_start_loc(), offsets.clone());
            if i > 0 {
                prop_assert_eq!(layer.kv_start, kv_start.clone());
            } else {
                prop_assert!(layer.kv_start.iter().eq(batch.iter().map(|r| &r.replay_start)));
            }
        }
    }

    /// `PromptTail` and `Exact` run the same positions of a prompt in whatever chunks it comes.
    #[test]
    fn chunks_cover_what_one_chunk_covers(
        policy in prop::sample::select(vec![ReplayPolicy::PromptTail, ReplayPolicy::Exact]),
        (window, depth, sampled) in (1..=9u32, 1..=4u32, 1..=10u32),
        replay_start in 0..20u32,
        chunks in prop::collection::vec(1..=30u32, 1..8),
    ) {
        let planner = planner(policy, window, depth, sampled);
        let prompt_len = replay_start + chunks.iter().sum::<u32>();
        let request = |positions| Request { replay_start, ..Request::prefill(prompt_len, positions) };

        let mut covered = vec![vec![]; depth as usize + 1];
        let mut start = replay_start;
        for length in chunks {
            let plan = planner.plan(&[request(start..start + length)]).expect("a plan");
            for (positions, layer) in covered.iter_mut().zip(plan.layers()) {
                positions.extend(layer.running.positions());
            }
            start += length;
        }
        let plan = planner.plan(&[request(replay_start..prompt_len)]).expect("a plan");
        for (positions, layer) in covered.iter().zip(plan.layers()) {
            prop_assert!(layer.running.positions().eq(positions.iter().copied()));
        }
    }

    /// Each row of a set takes its own slot with it, and padding writes to none.
    #[test]
    fn padding_writes_to_no_slot(
        planner in planners(), batch in batches(), padding in 0..50u32,
    ) {
        let plan = planner.plan(&batch).expect("a plan");
        let slots: Vec<i64> = (0..i64::from(n_rows(&batch))).map(|row| 1000 + row).collect();
        for layer in plan.layers() {
            let set = layer.running;
            let mut gathered = vec![];
            let padded_rows = RowCount::new(set.n_rows().get() + padding);
            set.gather_slots(&slots, padded_rows, &mut gathered).expect("they fit");
            let (rows, pads) = gathered.split_at(set.n_rows().as_usize());
            prop_assert!(rows.iter().copied().eq(set.indices().map(|row| 1000 + i64::from(row.get()))));
            prop_assert!(pads.len() == padding as usize && pads.iter().all(|&slot| slot == i64::PAD));

            let mut in_place = slots.clone();
            set.compact(&mut in_place).expect("one per row");
            prop_assert_eq!(in_place, rows);
        }
    }

    /// What happens to a request depends neither on its neighbours nor on its place among them, so a
    /// batch in another order gives the plan in that order.
    #[test]
    fn a_permuted_batch_gives_the_permuted_plan(
        planner in planners(),
        mode in modes(),
        (batch, order) in batches().prop_flat_map(|batch| {
            let order: Vec<usize> = (0..batch.len()).collect();
            (Just(batch), Just(order).prop_shuffle())
        }),
    ) {
        let plan = planned(&planner, mode, &batch);
        let permuted: Vec<Request> = order.iter().map(|&r| batch[r]).collect();
        let other = planned(&planner, mode, &permuted);
        prop_assert_eq!(plan.decision(), other.decision());
        for (a, b) in plan.layers().zip(other.layers()) {
            for (r, &from) in order.iter().enumerate() {
                prop_assert_eq!(a.entering.n_rows_of(from), b.entering.n_rows_of(r));
                prop_assert_eq!(a.running.n_rows_of(from), b.running.n_rows_of(r));
                prop_assert_eq!(a.kv_start[from], b.kv_start[r]);
            }
        }
    }

    /// Buffers that held another plan leave no trace.
    #[test]
    fn reused_buffers_leave_no_trace(
        (first, second) in (planners(), planners()), mode in modes(), (a, b) in (batches(), batches()),
    ) {
        let mut plan = planned(&first, mode, &a);
        second.plan_into(&b, &mut plan).expect("a plan");
        prop_assert_eq!(plan, second.plan(&b).expect("a plan"));
    }
}
