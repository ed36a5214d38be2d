//! Calls at the edge of what there is: numbers that are no position, plans of nothing, lengths that no
//! machine has memory or time for.

use std::num::NonZeroU32;

use replay_core::{
    LayerSchedule, Picture, PlanError, Position, PrefillCost, ReplayLayers, ReplayPolicy, Request,
    StepPlan, Unsupported, Window,
};

use crate::models::{planner, tiny};

/// The longest prompt there is, in one chunk.
const LONGEST: Request = Request::prefill(u32::MAX, 0..u32::MAX);

fn nonzero(n: u32) -> NonZeroU32 {
    NonZeroU32::new(n).unwrap()
}

/// No sequence has the last number of all as a position, and the end of its keys is no number: no panic.
#[test]
fn keys_of_the_number_after_the_last_position_end_before_it() {
    let window = Window::new(8).unwrap();
    let keys = |x| window.keys(Position::new(x), Position::new(0));
    assert_eq!(keys(u32::MAX - 1), u32::MAX - 8..u32::MAX);
    assert_eq!(keys(u32::MAX), u32::MAX - 8..u32::MAX);
}

#[test]
#[should_panic(expected = "an empty plan has no output rows: nothing was planned")]
fn an_empty_plan_has_no_output_rows() {
    StepPlan::new().output_rows();
}

#[test]
#[should_panic(expected = "expected a replay layer below 0, got 3")]
fn a_layer_that_is_none_is_named() {
    StepPlan::new().layer(3);
}

/// A list of gigabytes would end the program, or the machine's patience.
#[test]
fn a_plan_that_keeps_billions_of_rows_is_refused() {
    for planner in [
        planner(ReplayPolicy::PromptTail, 8, 2, 1 << 31),
        planner(ReplayPolicy::StepTail, 8, 2, 1 << 31),
        planner(ReplayPolicy::Exact, Window::MAX, 37, 1),
    ] {
        let mut plan = StepPlan::new();
        let error = planner.plan_into(&[LONGEST], &mut plan).unwrap_err();
        assert!(matches!(error, PlanError::TooLarge { .. }), "{error}");
        assert_eq!(plan, StepPlan::new());
    }
    // Few rows of as many are no matter, and neither are all of them.
    let plan = tiny(ReplayPolicy::Exact).plan(&[LONGEST]).unwrap();
    assert_eq!(plan.n_rows().get(), 15);
    let plan = tiny(ReplayPolicy::Off).plan(&[LONGEST]).unwrap();
    assert_eq!(plan.n_rows().get(), u32::MAX);
}

#[test]
fn more_layers_than_are_planned_one_by_one_are_refused() {
    let of = |num_layers| {
        ReplayLayers::from_schedule(&LayerSchedule {
            num_layers,
            kv_sources: &[1],
            compress_ratios: &[],
            engram_layers: &[],
        })
    };
    of(ReplayLayers::MAX_MODEL_LAYERS).unwrap();
    for num_layers in [ReplayLayers::MAX_MODEL_LAYERS + 1, u32::MAX] {
        assert_eq!(
            of(num_layers),
            Err(Unsupported::TooManyLayers { num_layers })
        );
    }
}

/// One chunk after the other these would take minutes.
#[test]
fn costs_and_pictures_take_no_longer_for_longer_prompts() {
    for policy in ReplayPolicy::ALL {
        let planner = tiny(policy);
        for chunk in [1, 7, 1000, u32::MAX] {
            let cost = PrefillCost::of(&planner, u32::MAX, nonzero(chunk));
            assert_eq!(cost.row_layers_off(), 6 * u64::from(u32::MAX));
            let picture = Picture::of(&planner, u32::MAX, nonzero(chunk), NonZeroU32::MAX);
            let first = picture.to_string();
            let cells = first.lines().next().unwrap().split('│').nth(1).unwrap();
            assert_eq!(cells.chars().count() as u32, Picture::MAX_COLUMNS);
        }
    }
}
