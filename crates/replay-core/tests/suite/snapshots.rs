//! What is decided, as text that a person reads: plans of some thirty batches, ladders of capture
//! sizes, the reasons for every refusal, and the pictures of the README.

use std::fmt::Write as _;
use std::num::NonZeroU32;

use insta::{assert_snapshot, with_settings};
use replay_core::{
    AgreementError, CaptureSizes, GraphMode, LayerSchedule, Picture, PlanError, Planner,
    PrefillCost, ReplayLayers, ReplayPlan, ReplayPolicy, Request, RowCount, Share, SlotError,
    StepPlan, TrimThreshold, Window,
};

use crate::models::{planner, tiny};

/// A plan in a few lines: the decision, then each replay layer, alike ones together.
fn describe(plan: &StepPlan) -> String {
    let decision = match plan.decision() {
        ReplayPlan::WholeBatch => "whole batch".to_owned(),
        ReplayPlan::EagerTrim(b) => format!("eager trim to {} rows, {:?}", b.n_rows, b.launch),
        ReplayPlan::BreakOut(b) => {
            let what = if b.trimmed { "trimmed" } else { "not trimmed" };
            format!("break out with {} rows, {what}, {:?}", b.n_rows, b.launch)
        }
    };
    let lines: Vec<String> = plan
        .layers()
        .map(|layer| {
            let ranges: Vec<String> = layer
                .running
                .ranges()
                .map(|rows| {
                    if rows.is_empty() {
                        "-".into()
                    } else {
                        format!("{rows:?}")
                    }
                })
                .collect();
            let enter = layer.entering.n_rows();
            format!(
                "{enter:>2} enter; run {:<30} kv from {:?}",
                ranges.join(" "),
                layer.kv_start
            )
        })
        .collect();
    let mut text = format!("{decision}\n");
    let mut first = 0;
    for alike in lines.chunk_by(|a, b| a == b) {
        let last = first + alike.len() - 1;
        writeln!(text, "  layer {first}..={last}: {}", alike[0].trim_end()).unwrap();
        first = last + 1;
    }
    text
}

fn describe_all(batches: &[(&str, Vec<Request>)]) -> String {
    let sizes = CaptureSizes::new(&[8, 16, 32], 32).unwrap();
    let mut text = String::new();
    for (name, batch) in batches {
        writeln!(text, "## {name}").unwrap();
        for policy in ReplayPolicy::ALL {
            let plan = tiny(policy)
                .with_capture_sizes(sizes.clone())
                .plan(batch)
                .unwrap();
            write!(text, "{policy}: {}", describe(&plan)).unwrap();
        }
        text.push('\n');
    }
    text
}

fn after_hit(replay_start: u32, request: Request) -> Request {
    Request {
        replay_start,
        ..request
    }
}

fn keeping(request: Request) -> Request {
    Request {
        keeps_rows: true,
        ..request
    }
}

/// A window of 8, replay layers 0..=2, graphs of 8, 16 and 32 rows.
#[test]
fn eager_plans() {
    let prefill = Request::prefill;
    let (decode, prompt) = (Request::decode(29, 30), prefill(20, 0..20));
    let verify = Request {
        query_len: 3,
        ..Request::decode(29, 32)
    };
    let one = vec![
        ("prompt of one row", vec![prefill(1, 0..1)]),
        ("prompt below the window", vec![prefill(7, 0..7)]),
        ("prompt of a window", vec![prefill(8, 0..8)]),
        ("prompt just above the window", vec![prefill(9, 0..9)]),
        ("prompt of two windows", vec![prefill(16, 0..16)]),
        (
            "prompt of the exact halo in layer 0",
            vec![prefill(15, 0..15)],
        ),
        ("prompt well above the halo", vec![prefill(40, 0..40)]),
        (
            "first chunk, wholly before the tail",
            vec![prefill(80, 0..16)],
        ),
        (
            "a chunk in which the exact halo begins",
            vec![prefill(80, 60..70)],
        ),
        (
            "a chunk in which the tail begins",
            vec![prefill(80, 68..76)],
        ),
        (
            "last chunk, shorter than the window",
            vec![prefill(80, 76..80)],
        ),
        ("last chunk, a window", vec![prefill(80, 72..80)]),
        ("last chunk, above a window", vec![prefill(80, 64..80)]),
        ("last chunk of one row", vec![prefill(80, 79..80)]),
        ("rows that are all read", vec![keeping(prompt)]),
        ("decode", vec![decode]),
        ("decode of several rows", vec![verify]),
        (
            "prompt's end and rows past it",
            vec![Request {
                query_len: 22,
                seq_len: 22,
                ..prompt
            }],
        ),
        (
            "hit of 16, a prompt of 20",
            vec![after_hit(8, prefill(20, 8..20))],
        ),
        (
            "hit of 19, a prompt of 20",
            vec![after_hit(11, prefill(20, 11..20))],
        ),
        (
            "hit of 12, a prompt of 40",
            vec![after_hit(4, prefill(40, 4..40))],
        ),
        (
            "decode after a hit",
            vec![after_hit(8, Request::decode(20, 24))],
        ),
    ];
    let several = vec![
        ("no request", vec![]),
        (
            "decode, prompt, short last chunk",
            vec![decode, prompt, prefill(18, 12..18)],
        ),
        (
            "short last chunk, prompt, decode",
            vec![prefill(18, 12..18), prompt, decode],
        ),
        (
            "two prompts, one with rows that are all read",
            vec![keeping(prompt), prompt],
        ),
        ("decode rows alone", vec![decode; 5]),
        (
            "first chunks alone",
            vec![prefill(80, 0..16), prefill(60, 0..16)],
        ),
        ("first chunk and decode", vec![prefill(80, 0..16), decode]),
        (
            "hit, cold prompt, decode",
            vec![after_hit(8, prefill(20, 8..20)), prompt, decode],
        ),
        (
            "a request without rows between prompts",
            vec![
                prompt,
                Request {
                    query_len: 0,
                    ..decode
                },
                prompt,
            ],
        ),
        ("more rows than the largest graph", vec![prompt; 5]),
    ];
    with_settings!({ omit_expression => true }, {
        assert_snapshot!("plans_of_one_request", describe_all(&one));
        assert_snapshot!("plans_of_several_requests", describe_all(&several));
    });
}

/// The same batch under each graph mode, around the threshold of 48 rows.
#[test]
fn graph_modes() {
    let batch = [
        Request::decode(29, 30),
        Request::prefill(20, 0..20),
        Request::prefill(18, 12..18),
    ];
    let rows = RowCount::new;
    let mut text = String::new();
    for mode in [
        GraphMode::None,
        GraphMode::Full {
            padded_rows: rows(48),
        },
        GraphMode::Piecewise {
            padded_rows: rows(47),
        },
        GraphMode::Piecewise {
            padded_rows: rows(48),
        },
    ] {
        for policy in ReplayPolicy::ALL {
            let mut plan = StepPlan::new();
            tiny(policy).plan_step(mode, &batch, &mut plan).unwrap();
            write!(text, "{mode:?} {policy}: {}", describe(&plan)).unwrap();
        }
    }
    with_settings!({ omit_expression => true }, { assert_snapshot!(text) });
}

#[test]
fn ladders() {
    let mut text = String::new();
    for (window, max_captured, max_seqs) in [
        (128, 8192, 256), // as released
        (128, 8192, 16),
        (128, 512, 256),
        (128, 8190, 256),
        (128, 64, 256),
        (100, 1000, 64),
        (8, 256, 64),
        (8, 32, 4),
        (1, 20, 64),
        (512, 16_384, 1024),
    ] {
        let w = Window::new(window).unwrap();
        let bound = CaptureSizes::bound(w, max_captured, max_seqs);
        let sizes = CaptureSizes::ladder(w, bound).unwrap();
        let list: Vec<String> = sizes.as_slice().iter().map(u32::to_string).collect();
        writeln!(
            text,
            "window {window}, graphs to {max_captured}, {max_seqs} sequences: bound {bound}, sizes: {}\n  {}",
            list.len(),
            list.join(" "),
        )
        .unwrap();
    }
    with_settings!({ omit_expression => true }, { assert_snapshot!(text) });
}

/// Every way in which a model, a setting or a batch is turned away, by its message.
#[test]
fn refusals() {
    let mut lines = vec![];
    let fine = LayerSchedule {
        num_layers: 6,
        kv_sources: &[1, 3],
        compress_ratios: &[0, 4, 0, 1],
        engram_layers: &[0],
    };
    for schedule in [
        LayerSchedule {
            kv_sources: &[],
            ..fine
        },
        LayerSchedule {
            kv_sources: &[1, 6],
            ..fine
        },
        LayerSchedule {
            kv_sources: &[5, 3],
            ..fine
        },
        LayerSchedule {
            kv_sources: &[0],
            ..fine
        },
        LayerSchedule {
            kv_sources: &[1, 5],
            ..fine
        },
        LayerSchedule {
            num_layers: 1,
            kv_sources: &[0],
            ..fine
        },
        LayerSchedule {
            num_layers: 0,
            kv_sources: &[0],
            ..fine
        },
        LayerSchedule {
            engram_layers: &[0, 3],
            ..fine
        },
        LayerSchedule {
            engram_layers: &[4],
            ..fine
        },
        LayerSchedule {
            compress_ratios: &[0, 4, 0, 2],
            ..fine
        },
    ] {
        lines.push(
            ReplayLayers::from_schedule(&schedule)
                .unwrap_err()
                .to_string(),
        );
    }

    let window = Window::new(8).unwrap();
    lines.push(Window::new(0).unwrap_err().to_string());
    lines.push(Window::new(Window::MAX + 1).unwrap_err().to_string());
    lines.push("tail".parse::<ReplayPolicy>().unwrap_err().to_string());
    lines.push(TrimThreshold::new(8, window).unwrap_err().to_string());
    lines.push(CaptureSizes::new(&[], 32).unwrap_err().to_string());
    lines.push(CaptureSizes::new(&[0], 32).unwrap_err().to_string());
    lines.push(CaptureSizes::new(&[33], 32).unwrap_err().to_string());
    lines.push(Share::new(1.5).unwrap_err().to_string());

    for error in [
        PlanError::QueryExceedsSequence {
            request: 3,
            query_len: 5,
            seq_len: 4,
        },
        PlanError::PhaseMismatch {
            request: 3,
            start: 5,
            prompt_len: 9,
            prefilling: false,
        },
        PlanError::PhaseMismatch {
            request: 3,
            start: 9,
            prompt_len: 9,
            prefilling: true,
        },
        PlanError::StartsBelowReplay {
            request: 3,
            start: 5,
            replay_start: 8,
        },
        PlanError::TooManyRows { request: 3 },
        PlanError::TooLarge { numbers: 1 << 40 },
        PlanError::NoMemory { numbers: 1 << 20 },
        PlanError::GraphTooSmall {
            n_rows: 17,
            padded_rows: 16,
        },
    ] {
        lines.push(error.to_string());
    }
    for error in [
        SlotError::WrongLength {
            expected: 27,
            got: 26,
        },
        SlotError::PaddedBelowRows {
            n_rows: 17,
            padded_rows: 16,
        },
        SlotError::PaddedBelowRequests {
            n_requests: 4,
            padded_requests: 2,
        },
    ] {
        lines.push(error.to_string());
    }
    for error in [
        AgreementError::NotCounted,
        AgreementError::GraphDoesNotBreak { padded_rows: 16 },
        AgreementError::DoesNotFit {
            launch: replay_core::ReplayLaunch::Skip,
            n_rows: 17,
        },
    ] {
        lines.push(error.to_string());
    }
    with_settings!({ omit_expression => true }, { assert_snapshot!(lines.join("\n")) });
}

fn draw(planner: &Planner, prompt_len: u32, chunk: u32, columns: u32) -> String {
    let of = |n| NonZeroU32::new(n).unwrap();
    let cost = PrefillCost::of(planner, prompt_len, of(chunk));
    let picture = Picture::of(planner, prompt_len, of(chunk), of(columns));
    let policy = planner.config().policy;
    let (run, off) = (cost.row_layers(), cost.row_layers_off());
    format!("{policy}: {run} of {off} row-layers\n{picture}\n")
}

/// The released geometry, a model of few layers with chunks that end in mid-column, and a prompt of
/// fewer rows than columns.
#[test]
fn pictures() {
    let mut text = String::new();
    for policy in ReplayPolicy::ALL {
        text += &draw(&planner(policy, 128, 19, 1), 32_768, 8192, 64);
    }
    for policy in ReplayPolicy::ALL {
        text += &draw(&planner(policy, 8, 4, 1), 100, 30, 50);
    }
    text += &draw(&tiny(ReplayPolicy::Exact), 20, 20, 64);
    text += &draw(&tiny(ReplayPolicy::PromptTail), 0, 20, 64);
    with_settings!({ omit_expression => true }, { assert_snapshot!(text) });
}
