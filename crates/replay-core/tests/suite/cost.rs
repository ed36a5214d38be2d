//! What a prefill costs, against numbers worked out by hand.

use std::num::NonZeroU32;

use proptest::prelude::*;
use replay_core::{PrefillCost, ReplayPolicy, Request, Share};

use crate::models::planner;

/// Layers 0 to 2 before the cut, layer 3 the cut, 4 and 5 after it; a window of 8.
fn cost(policy: ReplayPolicy, prompt_len: u32, chunk: u32) -> PrefillCost {
    PrefillCost::of(
        &planner(policy, 8, 2, 1),
        prompt_len,
        NonZeroU32::new(chunk).unwrap(),
    )
}

#[test]
fn row_layers_are_counted_chunk_by_chunk() {
    // (policy, chunk, rows in each of the three replay layers); 100 rows in three layers before.
    for (policy, chunk, rows) in [
        (ReplayPolicy::Off, 30, [100, 100, 100]),
        (ReplayPolicy::StepTail, 30, [32, 32, 32]), // chunks of 30, 30, 30, 10
        (ReplayPolicy::StepTail, 8, [100, 100, 100]), // no chunk above the window
        (ReplayPolicy::StepTail, 100, [8, 8, 8]),
        (ReplayPolicy::PromptTail, 30, [8, 8, 8]),
        (ReplayPolicy::PromptTail, 1, [8, 8, 8]),
        (ReplayPolicy::Exact, 30, [15, 8, 1]),
        (ReplayPolicy::Exact, 1, [15, 8, 1]),
    ] {
        let cost = cost(policy, 100, chunk);
        assert!(
            cost.rows_per_layer().eq(rows),
            "{policy} in chunks of {chunk}"
        );
        assert_eq!(cost.row_layers(), 300 + rows.iter().sum::<u64>());
        assert_eq!(cost.row_layers_off(), 600);
        // A layer writes KV for the rows of the layer before; the cut for all.
        assert_eq!(cost.kv_row_layers(), 100 - rows[2]);
    }
}

#[test]
fn the_ratio_counts_kv_by_its_share() {
    let close = |a: f64, b: f64| (a - b).abs() < 1e-12;
    let share = |value| Share::new(value).expect("a share");
    let bounded = cost(ReplayPolicy::PromptTail, 100, 30);
    assert!(close(bounded.ratio(share(0.0)), 324.0 / 600.0));
    assert!(close(bounded.ratio(share(0.5)), (324.0 + 46.0) / 600.0));
    assert!(close(bounded.ratio(share(1.0)), (324.0 + 92.0) / 600.0));
    assert!(close(
        cost(ReplayPolicy::Off, 100, 30).ratio(share(1.0)),
        1.0
    ));
    assert!(close(
        cost(ReplayPolicy::Exact, 0, 30).ratio(share(1.0)),
        1.0
    ));
    assert!(close(share(0.25).get(), 0.25));
    assert!(Share::new(f64::NAN).is_err() && Share::new(-0.1).is_err());
}

/// The released geometry: 40 layers cut at 20. Layers before the cut differ from this test's model,
/// so what is compared is the replay layers: twenty times a window, and the exact taper.
#[test]
fn the_released_geometry_runs_a_window_per_layer() {
    let rows = |policy| -> u64 {
        let planner = planner(policy, 128, 19, 1);
        PrefillCost::of(&planner, 32_768, NonZeroU32::new(8192).unwrap())
            .rows_per_layer()
            .sum()
    };
    assert_eq!(rows(ReplayPolicy::PromptTail), 20 * 128);
    assert_eq!(rows(ReplayPolicy::StepTail), 20 * 4 * 128);
    let taper: u64 = (0..20).map(|i| 1 + (19 - i) * 127).sum();
    assert_eq!(rows(ReplayPolicy::Exact), taper);
    assert_eq!(rows(ReplayPolicy::Off), 20 * 32_768);
}

proptest! {
    /// The closed form counts what plans run, chunk by chunk.
    #[test]
    fn the_count_is_that_of_the_plans(
        policy in prop::sample::select(ReplayPolicy::ALL.to_vec()),
        (window, depth, sampled) in (1..=9u32, 1..=4u32, 1..=12u32),
        (prompt_len, chunk) in (0..90u32, 1..=100u32),
    ) {
        let planner = planner(policy, window, depth, sampled);
        let (mut running, mut kv_only) = (vec![0; depth as usize + 1], 0);
        for start in (0..prompt_len).step_by(chunk as usize) {
            let chunk = start..prompt_len.min(start + chunk);
            let plan = planner.plan(&[Request::prefill(prompt_len, chunk)]).unwrap();
            for (sum, layer) in running.iter_mut().zip(plan.layers()) {
                *sum += u64::from(layer.running.n_rows().get());
                kv_only += u64::from(layer.entering.n_rows().get() - layer.running.n_rows().get());
            }
        }
        let cost = PrefillCost::of(&planner, prompt_len, NonZeroU32::new(chunk).unwrap());
        prop_assert!(cost.rows_per_layer().eq(running));
        prop_assert_eq!(cost.kv_row_layers(), kv_only);
    }
}
