//! What a driver is asked to do, in order, by programs that go well and programs that do not.

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};

use candle_core::{DType, Device, Tensor};
use common::{Tape, TapeCapture};
use replay_graph::{
    BreakableGraph, BufferSpec, CacheConfig, CaptureMode, CaptureOptions, Error, FixedBuffers,
    Result, Scope,
};

type TapeScope<'s> = Scope<'s, (), TapeCapture>;
type TapeGraph<T = ()> = BreakableGraph<T, (), TapeCapture>;

/// Captures a program and launches it twice; gives what the driver was asked, and the errors.
#[track_caller]
fn trace(
    tape: &Tape,
    options: CaptureOptions,
    mut program: impl FnMut(&mut TapeScope<'_>) -> Result<()>,
) -> String {
    let pass = tape.clone();
    let captured = TapeGraph::capture_with(tape, options, &mut (), |scope| {
        pass.note(if scope.is_warm_up() {
            "warm-up"
        } else {
            "program"
        });
        program(scope)
    });
    match captured {
        Err(error) => tape.note(format!("error: {}", chain(&error))),
        Ok(mut graph) => {
            assert_eq!(graph.n_segments(), graph.n_breaks() + 1);
            for _ in 0..2 {
                tape.note("-- launch");
                if let Err(error) = graph.launch() {
                    tape.note(format!("error: {}", chain(&error)));
                }
            }
            tape.note("-- drop");
        }
    }
    tape.read()
}

fn chain(error: &Error) -> String {
    let mut texts = vec![error.to_string()];
    let mut next = std::error::Error::source(error);
    while let Some(error) = next {
        texts.push(error.to_string());
        next = error.source();
    }
    texts.join(": ")
}

/// A break that says when it runs.
fn noted(scope: &mut TapeScope<'_>, tape: &Tape, name: &'static str) -> Result<()> {
    let tape = tape.clone();
    scope.eager_break(move |()| {
        tape.note(name);
        Ok(())
    })
}

fn options() -> CaptureOptions {
    CaptureOptions::new("program")
}

#[test]
fn no_break() {
    let tape = Tape::default();
    insta::assert_snapshot!(trace(&tape, options(), |_| Ok(())));
}

#[test]
fn one_break() {
    let tape = Tape::default();
    insta::assert_snapshot!(trace(&tape, options(), |scope| noted(
        scope, &tape, "break"
    )));
}

#[test]
fn five_breaks() {
    let tape = Tape::default();
    insta::assert_snapshot!(trace(&tape, options(), |scope| {
        for name in ["a", "b", "c", "d", "e"] {
            noted(scope, &tape, name)?;
        }
        Ok(())
    }));
}

/// In full mode the same program is one segment, and its break runs at capture alone.
#[test]
fn a_break_in_full_mode() {
    let tape = Tape::default();
    let options = options().mode(CaptureMode::Full);
    insta::assert_snapshot!(trace(&tape, options, |scope| noted(scope, &tape, "break")));
}

#[test]
fn without_warm_up() {
    let tape = Tape::default();
    let mut options = options();
    options.warm_up = false;
    insta::assert_snapshot!(trace(&tape, options, |scope| noted(scope, &tape, "break")));
}

#[test]
fn a_failing_program() {
    let tape = Tape::default();
    insta::assert_snapshot!(trace(&tape, options(), |scope| {
        noted(scope, &tape, "break")?;
        if scope.is_warm_up() {
            Ok(())
        } else {
            Err(Error::program("no such expert"))
        }
    }));
}

#[test]
fn a_failing_break() {
    let tape = Tape::default();
    insta::assert_snapshot!(trace(&tape, options(), |scope| {
        let warm_up = scope.is_warm_up();
        noted(scope, &tape, "break")?;
        scope.eager_break(move |()| {
            if warm_up {
                Ok(())
            } else {
                Err(Error::program("no such plan"))
            }
        })
    }));
}

/// A program that goes on after its break has failed is not captured half.
#[test]
fn a_swallowed_error() {
    let tape = Tape::default();
    insta::assert_snapshot!(trace(&tape, options(), |scope| {
        let warm_up = scope.is_warm_up();
        let _ = scope.eager_break(move |()| -> Result<()> {
            if warm_up {
                Ok(())
            } else {
                Err(Error::program("no such plan"))
            }
        });
        Ok(())
    }));
}

/// A panic leaves neither a captured stream nor a claimed one.
#[test]
fn a_panicking_program() {
    let tape = Tape::default();
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        trace(&tape, options(), |scope| {
            noted(scope, &tape, "break")?;
            assert!(scope.is_warm_up(), "on purpose");
            Ok(())
        })
    }));
    assert!(panicked.is_err());
    let first = tape.read();
    let second = trace(&tape, options(), |_| Ok(()));
    insta::assert_snapshot!(format!("{first}\n-- again\n{second}"));
}

#[test]
fn a_driver_that_cannot_end_a_segment() {
    let tape = Tape::default();
    tape.fail_at("end segment 1", 901);
    insta::assert_snapshot!(trace(&tape, options(), |scope| noted(
        scope, &tape, "break"
    )));
}

#[test]
fn a_driver_without_memory_for_the_first_launch() {
    let tape = Tape::default();
    tape.fail_at("launch 0", 2);
    insta::assert_snapshot!(trace(&tape, options(), |scope| noted(
        scope, &tape, "break"
    )));
}

/// A break that fails in a launch leaves the graph fit for the next.
#[test]
fn a_break_that_fails_once() {
    let tape = Tape::default();
    insta::assert_snapshot!(trace(&tape, options(), |scope| {
        let (tape, mut runs) = (tape.clone(), 0);
        scope.eager_break(move |()| {
            runs += 1;
            tape.note(format!("break, run {runs}"));
            if runs == 2 {
                Err(Error::program("out of pages"))
            } else {
                Ok(())
            }
        })
    }));
}

/// A capture inside a segment is refused by name, and the outer one may go on.
#[test]
fn a_capture_in_a_segment() {
    let tape = Tape::default();
    insta::assert_snapshot!(trace(&tape, options(), |scope| {
        let options = CaptureOptions::new("inner");
        let nested = TapeGraph::capture_with(&tape, options, &mut (), |_| Ok(()));
        assert!(matches!(nested, Err(Error::Nested { .. })), "{nested:?}");
        noted(scope, &tape, "break")
    }));
}

/// A graph that a break needs may be captured in it, and launched there.
#[test]
fn a_capture_in_a_break() {
    let tape = Tape::default();
    insta::assert_snapshot!(trace(&tape, options(), |scope| {
        let (tape, mut inner) = (tape.clone(), None);
        scope.eager_break(move |()| {
            if inner.is_none() {
                let options = CaptureOptions::new("inner");
                inner = Some(TapeGraph::capture_with(
                    &tape,
                    options,
                    &mut (),
                    |_| Ok(()),
                )?);
            }
            inner
                .as_mut()
                .map_or(Ok(()), |graph| graph.launch().copied())
        })
    }));
}

/// A graph launched into another's segment would become part of it.
#[test]
fn a_launch_in_a_segment() {
    let tape = Tape::default();
    let mut inner =
        TapeGraph::capture_with(&tape, CaptureOptions::new("inner"), &mut (), |_| Ok(())).unwrap();
    tape.read();
    insta::assert_snapshot!(trace(&tape, options(), |scope| {
        if scope.is_warm_up() {
            Ok(())
        } else {
            inner.launch().copied()
        }
    }));
}

/// A break that gives a tensor of its own would have the next segment read freed memory.
#[test]
fn an_output_at_a_fresh_address() {
    let (tape, device) = (Tape::default(), Device::Cpu);
    let buffers = FixedBuffers::new(&[BufferSpec::new("x", [4], DType::F32)], 8, &device).unwrap();
    let captured = BreakableGraph::<_, (), TapeCapture>::capture_with(
        &tape,
        options().buffers(&buffers),
        &mut (),
        |scope| {
            let fixed = buffers.rows("x", 2)?;
            scope.eager_break(move |()| {
                let fresh = Tensor::ones((2, 4), DType::F32, &Device::Cpu)?;
                Ok(vec![fixed.clone(), fresh])
            })
        },
    );
    let error = captured.unwrap_err();
    assert!(
        matches!(
            error,
            Error::FreshAddress {
                index: 0,
                output: 1,
                ..
            }
        ),
        "{error}"
    );
}

/// A break whose output moves between launches is caught where it moves.
#[test]
fn an_output_that_moves() {
    let (tape, device) = (Tape::default(), Device::Cpu);
    let buffers = FixedBuffers::new(&[BufferSpec::new("x", [4], DType::F32)], 8, &device).unwrap();
    let mut graph =
        BreakableGraph::<_, usize, TapeCapture>::capture_with(&tape, options(), &mut 0, |scope| {
            scope.fixed(&buffers);
            let buffers = buffers.clone();
            scope.eager_break(move |first: &mut usize| {
                Ok(buffers.rows("x", 8)?.narrow(0, *first, 2)?)
            })
        })
        .unwrap();
    graph.launch_with(&mut 0).unwrap();
    let error = graph.launch_with(&mut 3).unwrap_err();
    match error {
        Error::Moved { expected, got, .. } => assert_eq!(got - expected, 3 * 4 * 4),
        other => panic!("{other}"),
    }
    graph.launch_with(&mut 0).unwrap();
}

/// What moves is looked for by default whatever the build, so that a release build does not read
/// stale memory where a debug build reports an error.
#[test]
fn addresses_are_compared_by_default() {
    assert!(CaptureOptions::default().check_addresses);
    assert!(CacheConfig::default().check_addresses);
}

/// On a device without graphs the caller learns so.
#[test]
fn a_device_without_graphs() {
    let refused = BreakableGraph::capture(&Device::Cpu, |_| Ok(())).unwrap_err();
    assert!(matches!(refused, Error::NoGraphs { .. }), "{refused}");
}
