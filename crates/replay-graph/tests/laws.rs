//! Laws that hold for any program, wherever it or the driver fails.

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};

use common::{Tape, TapeCapture};
use proptest::prelude::*;
use replay_graph::{BreakableGraph, CaptureOptions, Error};

type Graph = BreakableGraph<(), (), TapeCapture>;

/// Where a program of some breaks goes wrong, in its captured run.
#[derive(Clone, Copy, Debug)]
enum Fault {
    None,
    /// Before this break, or at the end.
    Program(u32),
    /// In this break.
    Break(u32),
    /// As `Program`, by a panic.
    Panic(u32),
    /// The driver, when this segment ends.
    End(u32),
    /// The driver, when this segment is first launched.
    Launch(u32),
}

fn faults() -> impl Strategy<Value = (u32, Fault)> {
    let fault = |n_breaks: u32| {
        prop_oneof![
            Just(Fault::None),
            (0..=n_breaks).prop_map(Fault::Program),
            (0..=n_breaks).prop_map(Fault::Break),
            (0..=n_breaks).prop_map(Fault::Panic),
            (0..=n_breaks).prop_map(Fault::End),
            (0..=n_breaks).prop_map(Fault::Launch),
        ]
    };
    (0..8u32).prop_flat_map(move |n_breaks| (Just(n_breaks), fault(n_breaks)))
}

/// Captures the program; `None` if it panicked.
fn capture(tape: &Tape, n_breaks: u32, fault: Fault) -> Option<Result<Graph, Error>> {
    match fault {
        Fault::End(segment) => tape.fail_at(&format!("end segment {segment}"), 901),
        Fault::Launch(segment) => tape.fail_at(&format!("launch {segment}"), 2),
        _ => {}
    }
    let run = || {
        Graph::capture_with(tape, CaptureOptions::new("program"), &mut (), |scope| {
            let warm_up = scope.is_warm_up();
            for index in 0..=n_breaks {
                match fault {
                    Fault::Program(at) if at == index && !warm_up => {
                        return Err(Error::program("on purpose"));
                    }
                    Fault::Panic(at) => assert!(warm_up || at != index, "on purpose"),
                    _ => {}
                }
                if index < n_breaks {
                    scope.eager_break(move |()| match fault {
                        Fault::Break(at) if at == index && !warm_up => {
                            Err(Error::program("on purpose"))
                        }
                        _ => Ok(()),
                    })?;
                }
            }
            Ok(())
        })
    };
    catch_unwind(AssertUnwindSafe(run)).ok()
}

proptest! {
    /// However a capture ends, the stream is not captured any more, nothing was launched into it or
    /// freed in it, and the device is restored once, last.
    #[test]
    fn a_capture_ends_clean((n_breaks, fault) in faults()) {
        let tape = Tape::default();
        let captured = capture(&tape, n_breaks, fault);
        let trace = tape.read();
        let done = matches!(captured, Some(Ok(_)));

        let mut capturing = false;
        for line in trace.lines() {
            match line {
                "begin" => {
                    prop_assert!(!capturing, "two at once\n{trace}");
                    capturing = true;
                }
                "abort" => capturing = false,
                _ if line.starts_with("end") => {
                    prop_assert!(capturing, "nothing to end\n{trace}");
                    capturing = false;
                }
                _ if line.starts_with("launch") || line.starts_with("drop") => {
                    prop_assert!(!capturing, "{line} while capturing\n{trace}");
                }
                _ => {}
            }
        }
        prop_assert!(!capturing, "{trace}");
        prop_assert_eq!(trace.matches("restore").count(), 1);
        prop_assert!(trace.ends_with("restore"), "{trace}");
        let gave_up = trace.contains("abort\n") && trace.ends_with("settle\nrestore");
        prop_assert_eq!(gave_up, !done, "{}", trace);

        // Whatever happened, the stream is free for the next capture.
        prop_assert!(matches!(capture(&tape, 1, Fault::None), Some(Ok(_))));
    }

    /// A graph has one segment more than breaks and launches all of them, in order, each time.
    #[test]
    fn launches_repeat_the_segments(n_breaks in 0..8u32, n_launches in 1..4usize) {
        let tape = Tape::default();
        let mut graph = capture(&tape, n_breaks, Fault::None).unwrap().unwrap();
        prop_assert_eq!(graph.n_breaks(), n_breaks as usize);
        prop_assert_eq!(graph.n_segments(), n_breaks as usize + 1);
        tape.read();
        let launch: Vec<_> = (0..=n_breaks).map(|segment| format!("launch {segment}")).collect();
        for _ in 0..n_launches {
            graph.launch().unwrap();
            prop_assert_eq!(tape.read(), launch.join("\n"));
        }
    }
}
