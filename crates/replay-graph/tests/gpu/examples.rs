//! The examples: each ends in assertions, so running them is a test.

use crate::gpu::gpu;

#[path = "../../examples/04-cache.rs"]
mod cache;
#[path = "../../examples/01-capture-and-launch.rs"]
mod capture_and_launch;
#[path = "../../examples/03-changing-lengths.rs"]
mod changing_lengths;
#[path = "../../examples/02-one-break.rs"]
mod one_break;
#[path = "../../examples/05-replay-break.rs"]
mod replay_break;

#[test]
fn example_01_capture_and_launch() {
    let _alone = gpu();
    capture_and_launch::main().unwrap();
}

#[test]
fn example_02_one_break() {
    let _alone = gpu();
    one_break::main().unwrap();
}

#[test]
fn example_03_changing_lengths() {
    let _alone = gpu();
    changing_lengths::main().unwrap();
}

#[test]
fn example_04_cache() {
    let _alone = gpu();
    cache::main().unwrap();
}

#[test]
fn example_05_replay_break() {
    let _alone = gpu();
    replay_break::main().unwrap();
}
