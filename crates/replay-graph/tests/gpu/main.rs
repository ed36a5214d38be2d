//! Capture and launch on a GPU. Every test pins one hazard, which its comment names.
//!
//! There is no skipping: without a GPU each test fails. They run one after the other, whatever the
//! number of test threads, since several of them measure the device's memory. Variables, which the
//! runner sets under a sanitizer:
//!
//! * `REPLAY_GPU_SMALL`: fewer rounds, and less to do in each.
//! * `REPLAY_GPU_PLAIN_MEMORY`: what captures allocate is memory of its own instead of the graph's.
//!   For sanitizers that misread the latter, which `probes` shows. Tests in `memory` are about
//!   the graph's.
//! * `REPLAY_GPU_LIST_GRAPHS`: prints what every graph consists of, with addresses.
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
mod joins;
mod launches;
mod memory;
mod probes;
mod refused;
mod replay;
mod sizes;
mod streams;
