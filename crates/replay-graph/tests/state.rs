//! The legal moves of a capture, all of them.

use replay_graph::{CaptureMove, CaptureState};

/// A move that is legal where it should not be lets a segment be launched before it is captured, or
/// a stream stay captured for ever.
#[test]
fn every_move_from_every_state() {
    let states = [
        CaptureState::Idle,
        CaptureState::Capturing { segment: 0 },
        CaptureState::Capturing { segment: 3 },
        CaptureState::InBreak { index: 0 },
        CaptureState::InBreak { index: 3 },
        CaptureState::Done { segments: 4 },
        CaptureState::Failed,
    ];
    let mut lines = Vec::new();
    for state in states {
        for step in CaptureState::MOVES {
            let next = match state.after(step) {
                Ok(next) => next.to_string(),
                Err(error) => format!("error: {error}"),
            };
            lines.push(format!("{state} + {step} -> {next}"));
        }
    }
    insta::assert_snapshot!(lines.join("\n"));
}

/// Whatever happens, giving up is possible until the capture is done, and final.
#[test]
fn giving_up_is_always_possible_and_final() {
    for state in [
        CaptureState::Idle,
        CaptureState::Capturing { segment: 7 },
        CaptureState::InBreak { index: 7 },
        CaptureState::Failed,
    ] {
        let failed = state.after(CaptureMove::Fail).unwrap();
        assert_eq!(failed, CaptureState::Failed);
        for step in CaptureState::MOVES {
            let legal = failed.after(step).is_ok();
            assert_eq!(legal, step == CaptureMove::Fail, "{step}");
        }
    }
}

/// Numbers of segments end at u32's: one that wraps would call the last segment the first.
#[test]
fn more_segments_than_are_counted() {
    let last = u32::MAX;
    let state = CaptureState::InBreak { index: last };
    assert_eq!(
        state.after(CaptureMove::Resume).unwrap_err().to_string(),
        "cannot resume a capture that is in break 4294967295"
    );
    let state = CaptureState::Capturing { segment: last };
    assert_eq!(
        state.after(CaptureMove::Finish).unwrap_err().to_string(),
        "cannot finish a capture that is capturing segment 4294967295"
    );
    let state = state.after(CaptureMove::Break).unwrap();
    assert_eq!(state.after(CaptureMove::Fail), Ok(CaptureState::Failed));
    // A state that no capture reaches still has an answer.
    assert_eq!(CaptureState::Done { segments: 0 }.segment(), 0);
}

/// Segments are one more than breaks, for any number of breaks.
#[test]
fn segments_are_one_more_than_breaks() {
    for n_breaks in 0..40 {
        let mut state = CaptureState::Idle.after(CaptureMove::Begin).unwrap();
        for index in 0..n_breaks {
            state = state.after(CaptureMove::Break).unwrap();
            assert_eq!(state, CaptureState::InBreak { index });
            state = state.after(CaptureMove::Resume).unwrap();
        }
        let done = state.after(CaptureMove::Finish).unwrap();
        let segments = n_breaks + 1;
        assert_eq!(done, CaptureState::Done { segments });
    }
}
