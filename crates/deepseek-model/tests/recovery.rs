//! Steps that fail, and what comes after them.

mod common;

use common::{FIXTURES, load, recovery::check_failed_steps};

#[test]
fn a_failed_step_leaves_the_next_request_alone() {
    for name in FIXTURES {
        check_failed_steps(&load(name, true));
    }
}
