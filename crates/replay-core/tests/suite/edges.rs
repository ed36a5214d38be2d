//! Calls at the edge of what there is: numbers that are no position, plans of nothing.

use replay_core::{Position, StepPlan, Window};

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
