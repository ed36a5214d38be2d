//! What comes out: which policies give the same result, over chunks, graphs and prefix hits.

use proptest::prelude::*;
use replay_core::ReplayPolicy;

use crate::models::planner;
use crate::symbolic::{Schedule, Sequence};

/// Outputs from the sampled rows of the prompt on.
fn read_outputs(sequence: &Sequence, schedule: &Schedule, sampled_rows: u32) -> Vec<(u32, u64)> {
    let first = schedule
        .prompt_len
        .saturating_sub(sampled_rows)
        .max(schedule.replay_start);
    let read: Vec<_> = sequence
        .outputs
        .range(first..)
        .map(|(&x, &h)| (x, h))
        .collect();
    let expected = first..schedule.prompt_len + schedule.decode_steps;
    assert!(
        read.iter().map(|&(x, _)| x).eq(expected),
        "an output that is read is missing"
    );
    read
}

/// A model and two ways to compute the same sequence on it.
#[derive(Clone, Debug)]
struct Case {
    window: u32,
    depth: u32,
    sampled_rows: u32,
    schedule: Schedule,
    in_one_chunk: Schedule,
}

fn cases() -> impl Strategy<Value = Case> {
    let model = (1..=9u32, 1..=4u32, 1..=10u32);
    let chunks = prop::collection::vec((1..=24u32, any::<bool>()), 1..=8);
    (model, chunks, 0..=12u32, 0..=20u32).prop_map(
        |((window, depth, sampled_rows), chunks, replay_start, decode_steps)| {
            let rows: u32 = chunks.iter().map(|&(length, _)| length).sum();
            let prompt_len = replay_start + rows;
            let schedule = Schedule {
                prompt_len,
                replay_start,
                chunks,
                decode_steps,
                keeps_rows: false,
            };
            let in_one_chunk = Schedule {
                chunks: vec![(rows, false)],
                ..schedule.clone()
            };
            Case {
                window,
                depth,
                sampled_rows,
                schedule,
                in_one_chunk,
            }
        },
    )
}

impl Case {
    fn outputs(&self, policy: ReplayPolicy, schedule: &Schedule) -> Vec<(u32, u64)> {
        let planner = planner(policy, self.window, self.depth, self.sampled_rows);
        read_outputs(&schedule.run(&planner), schedule, self.sampled_rows)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// `Off` is the reference, so it must not depend on chunks or graphs itself.
    #[test]
    fn off_does_not_depend_on_chunks(case in cases()) {
        let off = ReplayPolicy::Off;
        prop_assert_eq!(case.outputs(off, &case.schedule), case.outputs(off, &case.in_one_chunk));
    }

    #[test]
    fn exact_equals_off(case in cases()) {
        let off = case.outputs(ReplayPolicy::Off, &case.in_one_chunk);
        prop_assert_eq!(case.outputs(ReplayPolicy::Exact, &case.schedule), off);
    }

    #[test]
    fn prompt_tail_does_not_depend_on_chunks_or_graphs(case in cases()) {
        let tail = ReplayPolicy::PromptTail;
        prop_assert_eq!(case.outputs(tail, &case.schedule), case.outputs(tail, &case.in_one_chunk));
    }

    /// `StepTail` depends on the chunks, but not on a prompt that is one of them, and it never reads
    /// window KV that was not written: running it checks that.
    #[test]
    fn step_tail_equals_prompt_tail_in_one_chunk(case in cases()) {
        case.outputs(ReplayPolicy::StepTail, &case.schedule);
        let tail = case.outputs(ReplayPolicy::PromptTail, &case.in_one_chunk);
        prop_assert_eq!(case.outputs(ReplayPolicy::StepTail, &case.in_one_chunk), tail);
    }

    /// `StepTail` does not depend on graphs that keep the rows it drops: a text would change with the
    /// sizes that happen to be captured.
    #[test]
    fn step_tail_does_not_depend_on_graphs(case in cases()) {
        let eager = Schedule {
            chunks: case.schedule.chunks.iter().map(|&(length, _)| (length, false)).collect(),
            ..case.schedule.clone()
        };
        let tail = ReplayPolicy::StepTail;
        prop_assert_eq!(case.outputs(tail, &case.schedule), case.outputs(tail, &eager));
    }

    /// A request whose rows are all read gets, under every policy, what `Off` gives.
    #[test]
    fn requests_that_keep_rows_equal_off(case in cases()) {
        let schedule = Schedule { keeps_rows: true, ..case.schedule.clone() };
        let all = |policy| {
            schedule.run(&planner(policy, case.window, case.depth, case.sampled_rows)).outputs
        };
        let off = all(ReplayPolicy::Off);
        prop_assert_eq!(off.len() as u32, schedule.prompt_len + schedule.decode_steps - schedule.replay_start);
        for policy in ReplayPolicy::ALL {
            prop_assert_eq!(&all(policy), &off);
        }
    }

    /// Decoding never has to end: the next turn of a conversation is a longer prompt on the same KV.
    #[test]
    fn a_grown_prompt_reads_only_what_was_written(case in cases(), turn in 1..=40u32) {
        for policy in ReplayPolicy::ALL {
            let planner = planner(policy, case.window, case.depth, case.sampled_rows);
            let mut sequence = case.schedule.run(&planner);
            let start = case.schedule.prompt_len + case.schedule.decode_steps;
            let request = replay_core::Request {
                replay_start: case.schedule.replay_start,
                ..replay_core::Request::prefill(start + turn, start..start + turn)
            };
            crate::symbolic::step(&planner, replay_core::GraphMode::None, &[request], &mut [&mut sequence]);
        }
    }
}

/// BR-09: exact and bounded replay taken for one another. On two layers past the cut and a window of
/// 8, keeping 1 + 2 * 7 = 15 rows is exact for the last row; 14, or the window's 8, are not.
#[test]
fn bounded_replay_is_exact_only_from_the_halo_on() {
    let schedule = Schedule::chunks(&[40]);
    let last = |policy, sampled_rows| {
        schedule
            .run(&planner(policy, 8, 2, sampled_rows))
            .outputs
            .pop_last()
            .unwrap()
    };
    let off = last(ReplayPolicy::Off, 1);
    assert_eq!(last(ReplayPolicy::PromptTail, 15), off);
    assert_ne!(last(ReplayPolicy::PromptTail, 14), off);
    assert_ne!(last(ReplayPolicy::PromptTail, 1), off);
    assert_eq!(last(ReplayPolicy::Exact, 1), off);
}

/// BR-09, the released geometry: 19 layers past the cut and a window of 128 need 2,414 rows.
#[test]
fn the_released_halo_is_2414_rows() {
    let planner = planner(ReplayPolicy::Exact, 128, 19, 1);
    assert_eq!(
        planner.tail_rows(0).map(replay_core::RowCount::get),
        Some(2414)
    );
    assert_eq!(
        planner.tail_rows(19).map(replay_core::RowCount::get),
        Some(1)
    );
}

/// `StepTail` is the policy whose result depends on the chunks; if it did not, the laws above would
/// show nothing.
#[test]
fn step_tail_depends_on_chunks() {
    let planner = planner(ReplayPolicy::StepTail, 8, 2, 1);
    let last = |lengths: &[u32]| Schedule::chunks(lengths).run(&planner).outputs.pop_last();
    assert_ne!(last(&[40]), last(&[36, 4]));
    assert_eq!(last(&[8; 5]), last(&[4; 10])); // never trimmed
}
