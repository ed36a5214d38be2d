//! Capture and launch on a GPU. Every test pins one hazard, which its comment names.
//!
//! There is no skipping: without a GPU each test fails. They run one after the other, whatever the
//! number of test threads, since several of them measure the device's memory. With
//! `REPLAY_GPU_SMALL` set, as under a sanitizer, there are fewer rounds.
//!
//! Hazards of such graphs that have no test here, and why:
//!
//! * Captures with lengths that no batch has (zero, or all unset). A capture runs the program's own
//!   run-time path on a batch that its caller has planned; nothing here makes one up.
//! * Negative lengths of padding rows. Lengths are unsigned from the plan on, padding rows are gathered
//!   as zeros, and where the batch ends is in the plan that a break is lent.
//! * Sizes above the buffers, unsorted sizes, and those between two captured ones: no GPU is needed to
//!   test them.

#[path = "../common/toy.rs"]
#[allow(dead_code, reason = "shared with the tests on the CPU")]
mod toy;

mod breaks;
mod capture;
mod examples;
mod gpu;
mod launches;
mod memory;
mod refused;
mod replay;
mod sizes;
mod streams;
