//! Known hazards of replaying a part of the rows, each with the batch that shows it.

use replay_core::{
    Agreement, CaptureSizes, CaptureSizesError, GraphMode, PlanError, Position, PrefixHit,
    RankNeed, ReplayLaunch, ReplayPlan, ReplayPolicy, Request, RowCount, RowIdx, RowSet, Slot,
    SlotError, StepPlan, ThresholdError, TrimThreshold, Window, agree, pad_rebuilt_slots,
};

use crate::models::{planner, tiny};
use crate::symbolic::{Schedule, Sequence, step};

fn listed(set: &RowSet<'_>) -> Vec<u32> {
    set.indices().map(RowIdx::get).collect()
}

fn eager(plan: &StepPlan) -> bool {
    matches!(plan.decision(), ReplayPlan::EagerTrim(_))
}

/// Rows 0, 13..=20 and 21..=26 of a batch of 27: a decode row, a trimmed and a short prefill.
fn mixed_batch() -> [Request; 3] {
    [
        Request::decode(29, 30),
        Request::prefill(20, 0..20),
        Request::prefill(18, 12..18),
    ]
}

/// BR-01: decode rows dropped, or offsets shifted, where decode, trimmed prefill and short prefill
/// share a batch.
#[test]
fn mixed_batches_keep_decode_rows_and_offsets() {
    let kept = [vec![0], (12..20).collect(), (0..6).collect::<Vec<u32>>()];
    let kv_starts = [0, 12, 0];
    for order in [
        [0, 1, 2],
        [0, 2, 1],
        [1, 0, 2],
        [1, 2, 0],
        [2, 0, 1],
        [2, 1, 0],
    ] {
        let batch = order.map(|i| mixed_batch()[i]);
        let plan = tiny(ReplayPolicy::StepTail).plan(&batch).unwrap();

        let (mut rows, mut offsets, mut dropped, mut first) = (vec![], vec![0], vec![0], 0);
        for i in order {
            rows.extend(kept[i].iter().map(|row| first + row));
            first += mixed_batch()[i].query_len;
            offsets.push(rows.len() as u32);
            dropped.push(first - rows.len() as u32);
        }

        assert!(eager(&plan));
        assert!(plan.layer(0).entering.is_whole());
        for layer in plan.layers() {
            assert_eq!(listed(&layer.running), rows);
            assert_eq!(layer.running.query_start_loc(), offsets);
            let before = (0..=3).map(|r| layer.running.dropped_before(r).get());
            assert!(before.eq(dropped.iter().copied()));
        }
        assert_eq!(plan.layer(0).kv_start, [0, 0, 0]);
        assert_eq!(plan.layer(1).kv_start, order.map(|i| kv_starts[i]));
        assert_eq!(plan.layer(2).kv_start, order.map(|i| kv_starts[i]));
    }
}

/// BR-02: at a window of rows and one more, a trimmed request reads window KV that its layers never
/// wrote, or an untrimmed one loses history. The symbolic run panics on the former.
#[test]
fn the_bound_moves_only_when_rows_are_dropped() {
    let planner = tiny(ReplayPolicy::StepTail);
    let window = planner.config().window;
    for last in [1, 7, 8, 9, 15] {
        Schedule {
            decode_steps: 20,
            ..Schedule::chunks(&[16, last])
        }
        .run(&planner);

        let seq_len = 16 + last;
        let plan = planner
            .plan(&[Request::prefill(seq_len, 16..seq_len)])
            .unwrap();
        let later = plan.layer(1);
        let keys = |position| {
            window
                .keys(Position::new(position), Position::new(later.kv_start[0]))
                .len()
        };
        assert_eq!(keys(seq_len - 1), 8);
        if last > 8 {
            assert_eq!(later.kv_start, [seq_len - 8]);
            assert_eq!(keys(seq_len - 8), 1);
        } else {
            assert_eq!(later.kv_start, [0]);
            assert_eq!(keys(16), 8);
        }
    }
}

/// BR-03: the cut holds window KV of every row, yet its queries are clamped to the kept rows.
#[test]
fn the_cut_reads_the_whole_window() {
    for policy in [ReplayPolicy::StepTail, ReplayPolicy::PromptTail] {
        let planner = tiny(policy);
        let plan = planner.plan(&[Request::prefill(20, 0..20)]).unwrap();
        let first_kept = Position::new(12);
        let keys = |layer: u32| {
            let kv_start = plan.layer(layer).kv_start[0];
            planner
                .config()
                .window
                .keys(first_kept, Position::new(kv_start))
        };
        assert_eq!(plan.layer(0).running.positions().next(), Some(first_kept));
        assert_eq!((keys(0), keys(1), keys(2)), (5..13, 12..13, 12..13));
    }
}

/// BR-04: per-row side buffers that are not gathered with the rows, or damaged by a gather in place.
/// A list such as `[19, 2, 7]` cannot occur: sets are ascending by construction.
#[test]
fn side_buffers_follow_the_rows() {
    let plan = tiny(ReplayPolicy::StepTail).plan(&mixed_batch()).unwrap();
    let set = plan.layer(0).running;
    let expected: Vec<u32> = [0].into_iter().chain(13..=20).chain(21..=26).collect();

    let row_numbers: Vec<u32> = (0..27).collect();
    let mut gathered = vec![99; 3];
    set.gather_into(&row_numbers, &mut gathered).unwrap();
    assert_eq!(gathered, expected);

    let mut in_place = row_numbers;
    set.compact(&mut in_place).unwrap();
    assert_eq!(in_place, expected);

    let wrong = Err(SlotError::WrongLength {
        expected: 27,
        got: 26,
    });
    assert_eq!(set.gather_into(&[0; 26], &mut vec![]), wrong);
    assert_eq!(set.compact(&mut vec![0; 26]), wrong);
}

/// BR-05: prompt log-probabilities are read from rows that were dropped.
#[test]
fn requests_whose_rows_are_read_keep_them() {
    for policy in ReplayPolicy::ALL {
        let planner = tiny(policy);
        let off = Schedule::chunks(&[20])
            .run(&tiny(ReplayPolicy::Off))
            .outputs;
        for read in [[true, false], [true, true], [false, true]] {
            let batch = read.map(|keeps_rows| Request {
                keeps_rows,
                ..Request::prefill(20, 0..20)
            });
            let (mut a, mut b) = (Sequence::default(), Sequence::default());
            let plan = step(&planner, GraphMode::None, &batch, &mut [&mut a, &mut b]);

            for (r, sequence) in [a, b].into_iter().enumerate() {
                if read[r] {
                    assert_eq!(plan.output_rows().n_rows_of(r).get(), 20);
                    assert_eq!(sequence.outputs, off);
                } else {
                    let kept = match policy {
                        ReplayPolicy::Off => 20,
                        ReplayPolicy::StepTail | ReplayPolicy::PromptTail => 8,
                        ReplayPolicy::Exact => 1,
                    };
                    assert_eq!(plan.output_rows().n_rows_of(r).get(), kept);
                }
            }
        }
    }
}

/// BR-08: a short last chunk is treated as a window of its own. Run by replay or by the plain path,
/// it gives the same next token.
#[test]
fn a_short_last_chunk_reads_the_chunks_before() {
    for policy in ReplayPolicy::ALL {
        let planner = planner(policy, 4, 2, 1);
        let by_replay = Schedule {
            decode_steps: 1,
            ..Schedule::chunks(&[6, 4])
        };
        let plain = Schedule {
            chunks: vec![(6, false), (4, true)],
            ..by_replay.clone()
        };
        let (by_replay, plain) = (by_replay.run(&planner), plain.run(&planner));
        for position in [9, 10] {
            assert_eq!(by_replay.outputs[&position], plain.outputs[&position]);
        }
    }
}

/// BR-10: the scheduler and the planner split prefill from decode differently. Every query length
/// around the window, alone and after a chunk, is planned; a batch that is split differently is
/// refused.
#[test]
fn the_split_of_prefill_and_decode_is_checked() {
    for policy in ReplayPolicy::ALL {
        let planner = tiny(policy);
        for query_len in 1..=2 * 8 + 1 {
            for chunks in [vec![query_len], vec![16, query_len]] {
                let run = Schedule {
                    decode_steps: 10,
                    ..Schedule::chunks(&chunks)
                }
                .run(&planner);
                let prompt_len: u32 = chunks.iter().sum();
                assert!((prompt_len - 1..prompt_len + 10).all(|x| run.outputs.contains_key(&x)));
            }
        }
        let as_decode = Request {
            prefilling: false,
            ..Request::prefill(20, 13..20)
        };
        let refused = PlanError::PhaseMismatch {
            request: 1,
            start: 13,
            prompt_len: 20,
            prefilling: false,
        };
        assert_eq!(
            planner.plan(&[Request::decode(2, 3), as_decode]),
            Err(refused)
        );
    }
}

/// BR-13: rewinding by a window from a short hit goes below 0, or writes to shared entries.
#[test]
fn short_hits_are_not_adopted_and_long_ones_write_no_shared_entry() {
    let planner = tiny(ReplayPolicy::PromptTail);
    let window = planner.config().window;
    for hit in [0, 1, 7, 8] {
        assert_eq!(PrefixHit::adopt(hit, window), None);
    }
    for end in [9, 16] {
        let hit = PrefixHit::adopt(end, window).unwrap();
        assert_eq!((hit.replay_start(), hit.end()), (end - 8, end));

        let request = Request {
            replay_start: hit.replay_start(),
            ..Request::prefill(end + 3, hit.replay_start()..end + 3)
        };
        let mut slots: Vec<i32> = (0..11).collect();
        pad_rebuilt_slots(&[request], window, &mut slots).unwrap();
        let pad = i32::PAD;
        assert_eq!(slots, [pad, pad, pad, pad, pad, pad, pad, pad, 8, 9, 10]);

        // Also when the rows come in two chunks, and when the second holds new rows alone.
        let at = |query_len, start| Request {
            query_len,
            seq_len: start + query_len,
            ..request
        };
        assert_eq!(at(5, hit.replay_start()).rebuilt_rows(window), 5);
        assert_eq!(at(6, hit.replay_start() + 5).rebuilt_rows(window), 3);
        assert_eq!(at(3, end).rebuilt_rows(window), 0);

        let below = Request {
            query_len: request.query_len + 1,
            ..request
        };
        let refused = PlanError::StartsBelowReplay {
            request: 0,
            start: hit.replay_start() - 1,
            replay_start: hit.replay_start(),
        };
        assert_eq!(planner.plan(&[below]), Err(refused));
    }
    assert_eq!(Request::prefill(20, 0..20).rebuilt_rows(window), 0);
    let wrong = pad_rebuilt_slots(&mixed_batch(), window, &mut [0_i64; 26]);
    assert_eq!(
        wrong,
        Err(SlotError::WrongLength {
            expected: 27,
            got: 26
        })
    );
}

/// BR-15: capture sizes beyond the buffers, unsorted or repeated, and a threshold within the window.
#[test]
fn capture_sizes_are_bounded_sorted_and_not_empty() {
    let given = vec![32, 8, 32];
    let sizes = CaptureSizes::new(&given, 32).unwrap();
    assert_eq!(sizes.as_slice(), [8, 32]);
    assert_eq!(sizes.largest().get(), 32);
    assert_eq!(given, [32, 8, 32]);

    let above = CaptureSizesError::AboveBuffers {
        size: 33,
        max_rows: 32,
    };
    assert_eq!(CaptureSizes::new(&[33], 32), Err(above));
    assert_eq!(CaptureSizes::new(&[], 32), Err(CaptureSizesError::Empty));
    assert_eq!(CaptureSizes::new(&[8, 0], 32), Err(CaptureSizesError::Zero));
    let window = Window::new(8).unwrap();
    assert_eq!(
        CaptureSizes::ladder(window, 0),
        Err(CaptureSizesError::Empty)
    );

    let fit = |rows| sizes.fit(RowCount::new(rows)).map(RowCount::get);
    assert_eq!(
        [fit(1), fit(31), fit(32), fit(33)],
        [Some(8), Some(32), Some(32), None]
    );

    let refused = ThresholdError { rows: 8, window: 8 };
    assert_eq!(TrimThreshold::new(8, window), Err(refused));
    assert_eq!(
        tiny(ReplayPolicy::PromptTail).with_trim_threshold(8),
        Err(refused)
    );
    assert_eq!(TrimThreshold::new(9, window).map(TrimThreshold::get), Ok(9));
}

/// BR-15, in plans: a row count within the largest size runs in a graph, one above runs eagerly.
#[test]
fn replay_batches_above_the_largest_size_run_eagerly() {
    let sizes = CaptureSizes::new(&[8, 16, 32], 32).unwrap();
    let planner = tiny(ReplayPolicy::PromptTail).with_capture_sizes(sizes);
    let graph = |rows| ReplayLaunch::Graph {
        padded_rows: RowCount::new(rows),
    };
    for (decodes, launch) in [
        (0, graph(8)),
        (1, graph(16)),
        (23, graph(32)),
        (24, graph(32)),
        (25, ReplayLaunch::Eager),
    ] {
        let mut batch = vec![Request::decode(3, 9); decodes];
        batch.push(Request::prefill(20, 0..20));
        let plan = planner.plan(&batch).unwrap();
        let n_rows = RowCount::new(decodes as u32 + 8);
        let replay = replay_core::ReplayBatch {
            n_rows,
            trimmed: true,
            launch,
        };
        assert_eq!(plan.decision(), ReplayPlan::EagerTrim(replay));
    }
}

/// BR-16, BR-21: metadata padded to more requests or rows has no negative length, and its rows write
/// to no slot.
#[test]
fn padding_has_no_length_and_no_slot() {
    let plan = tiny(ReplayPolicy::StepTail).plan(&mixed_batch()).unwrap();
    let set = plan.layer(0).running;
    let mut offsets = vec![];
    set.pad_query_start_loc(5, &mut offsets).unwrap();
    assert_eq!(offsets, [0, 1, 9, 15, 15, 15]);
    let refused = SlotError::PaddedBelowRequests {
        n_requests: 3,
        padded_requests: 2,
    };
    assert_eq!(set.pad_query_start_loc(2, &mut offsets), Err(refused));
    // One offset more than requests: the largest number would wrap to no offset at all.
    for padded_requests in [usize::MAX, usize::MAX - 1, u32::MAX as usize] {
        let refused = SlotError::TooManyRequests { padded_requests };
        let padded = set.pad_query_start_loc(padded_requests, &mut offsets);
        assert_eq!(padded, Err(refused));
    }
    assert_eq!(offsets, [0, 1, 9, 15, 15, 15], "a refusal changes nothing");

    let batch_slots: Vec<u64> = (100..127).collect();
    let mut slots = vec![];
    set.gather_slots(&batch_slots, RowCount::new(16), &mut slots)
        .unwrap();
    assert_eq!(
        (slots[0], slots[1], slots[14], slots[15]),
        (100, 113, 126, u64::PAD)
    );
    let refused = SlotError::PaddedBelowRows {
        n_rows: 15,
        padded_rows: 14,
    };
    assert_eq!(
        set.gather_slots(&batch_slots, RowCount::new(14), &mut slots),
        Err(refused)
    );

    // A request that only fills up the metadata has no row anywhere.
    let filler = Request {
        query_len: 0,
        ..Request::decode(0, 0)
    };
    let plan = tiny(ReplayPolicy::StepTail)
        .plan(&[filler, Request::decode(3, 4), filler])
        .unwrap();
    assert_eq!(plan.layer(2).running.query_start_loc(), [0, 0, 1, 1]);
}

/// BR-22: some ranks replay while others do not, or in graphs of another size.
#[test]
fn ranks_agree_on_one_replay() {
    let sizes = CaptureSizes::new(&[8, 16, 32], 32).unwrap();
    let needs = |rows: [u32; 4]| {
        rows.map(|n| RankNeed {
            replays: n > 0,
            n_rows: RowCount::new(n),
            uniform: true,
        })
    };
    let padded_rows = RowCount::new(32);
    let graph = Agreement::Replay(ReplayLaunch::Graph { padded_rows });
    let eager = Agreement::Replay(ReplayLaunch::Eager);
    for (rows, agreed) in [
        ([8, 0, 21, 1], graph),
        ([0, 0, 0, 32], graph),
        ([0, 0, 0, 0], Agreement::WholeBatch),
        ([8, 0, 33, 1], eager),
    ] {
        for turn in 0..4 {
            let mut rows = rows;
            rows.rotate_left(turn);
            assert_eq!(agree(&needs(rows), Some(&sizes)), agreed);
        }
    }
    assert_eq!(agree(&needs([8, 0, 21, 1]), None), eager);
    let mut tapered = needs([8, 0, 21, 1]);
    tapered[1].uniform = false;
    assert_eq!(agree(&tapered, Some(&sizes)), eager);
    assert_eq!(agree(&[], Some(&sizes)), Agreement::WholeBatch);
    let skips = RankNeed {
        replays: true,
        n_rows: RowCount::new(0),
        uniform: true,
    };
    assert_eq!(
        agree(&[skips], Some(&sizes)),
        Agreement::Replay(ReplayLaunch::Skip)
    );
}
