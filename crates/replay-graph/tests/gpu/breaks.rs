//! Programs with breaks: what crosses them, and what changes from launch to launch.

use candle_core::{DType, Tensor};
use replay_graph::{
    BreakableGraph, BufferSpec, CaptureMode, CaptureOptions, Error, FixedBuffers, Result, Scope,
};

use crate::gpu::{Churn, Gpu, Layers, bits, gpu, rounds, within_ten_seconds};

const WIDTH: usize = 64;
const ROWS: usize = 32;

/// Layers with an eager break after every few, each of which takes some of the rows through a layer.
struct Broken<'a> {
    layers: &'a Layers,
    handoff: &'a FixedBuffers,
    input: &'a Tensor,
    n_breaks: usize,
}

/// Rows that a break works on; decided anew for each launch.
#[derive(Clone, Copy)]
struct Step {
    rows: usize,
}

impl Broken<'_> {
    fn capture(&self, gpu: &Gpu, mode: CaptureMode) -> BreakableGraph<Tensor, Step> {
        let mut options = CaptureOptions::new("layers").mode(mode);
        options.check_addresses = true;
        BreakableGraph::<_, _>::capture_with(gpu, options, &mut Step { rows: 5 }, |scope| {
            self.run(scope)
        })
        .unwrap()
    }

    fn run(&self, scope: &mut Scope<'_, Step>) -> Result<Tensor> {
        scope.fixed(self.handoff);
        let mut x = self.layers.run(0..1, self.input)?;
        for index in 0..self.n_breaks {
            let (from, fixed) = (x.clone(), self.handoff.rows(&index.to_string(), ROWS)?);
            x = scope.eager_break(move |step: &mut Step| {
                fixed.slice_set(&Self::between(&from, step.rows)?, 0, 0)?;
                Ok(fixed.clone())
            })?;
            x = self.layers.run(1..3, &x)?;
        }
        Ok(x)
    }

    /// What a break does: the first rows are doubled, the others become zero.
    fn between(x: &Tensor, rows: usize) -> Result<Tensor> {
        let kept = x.narrow(0, 0, rows)?.affine(2.0, 0.0)?;
        Ok(kept.pad_with_zeros(0, 0, ROWS - rows)?)
    }

    fn eager(&self, input: &Tensor, rows: usize) -> Tensor {
        let mut x = self.layers.run(0..1, input).unwrap();
        for _ in 0..self.n_breaks {
            x = Self::between(&x, rows).unwrap();
            x = self.layers.run(1..3, &x).unwrap();
        }
        x
    }
}

/// A buffer for each break.
fn handoff(gpu: &Gpu, n_breaks: usize) -> FixedBuffers {
    let specs: Vec<_> = (0..n_breaks)
        .map(|i| BufferSpec::new(i.to_string(), [WIDTH], DType::F32))
        .collect();
    FixedBuffers::new(&specs, ROWS, gpu).unwrap()
}

/// A segment that reads what the break of an earlier launch left, or where no break writes.
#[track_caller]
fn check_a_thousand_launches(n_breaks: usize) {
    let gpu = gpu();
    let layers = Layers::new(&gpu, 3, WIDTH);
    let (input, handoff) = (gpu.tensor(&[ROWS, WIDTH], 0), handoff(&gpu, n_breaks));
    let program = Broken {
        layers: &layers,
        handoff: &handoff,
        input: &input,
        n_breaks,
    };
    let mut graph = program.capture(&gpu, CaptureMode::Piecewise);
    assert_eq!(
        (graph.n_segments(), graph.n_breaks()),
        (n_breaks + 1, n_breaks)
    );
    for round in rounds(1000) {
        let fresh = gpu.tensor(&[ROWS, WIDTH], round);
        let rows = 1 + round as usize % ROWS;
        input.slice_set(&fresh, 0, 0).unwrap();
        let launched = bits(graph.launch_with(&mut Step { rows }).unwrap());
        assert_eq!(
            launched,
            bits(&program.eager(&fresh, rows)),
            "round {round}"
        );
    }
}

#[test]
fn a_thousand_launches_with_one_break() {
    check_a_thousand_launches(1);
}

#[test]
fn a_thousand_launches_with_five_breaks() {
    check_a_thousand_launches(5);
}

/// An operation that must break and is captured instead: its lengths are those of the capture, for
/// good. In full mode that is what is asked for.
#[test]
fn full_mode_decides_at_capture() {
    let gpu = gpu();
    let layers = Layers::new(&gpu, 3, WIDTH);
    let (input, handoff) = (gpu.tensor(&[ROWS, WIDTH], 0), handoff(&gpu, 2));
    let program = Broken {
        layers: &layers,
        handoff: &handoff,
        input: &input,
        n_breaks: 2,
    };
    let mut graph = program.capture(&gpu, CaptureMode::Full);
    assert_eq!((graph.n_segments(), graph.n_breaks()), (1, 0));
    let fresh = gpu.tensor(&[ROWS, WIDTH], 1);
    input.slice_set(&fresh, 0, 0).unwrap();
    let launched = bits(graph.launch_with(&mut Step { rows: 20 }).unwrap());
    assert_eq!(launched, bits(&program.eager(&fresh, 5)));
}

/// What was in the buffer before, NaN here, must not reach the rows that the break writes.
#[test]
fn a_poisoned_handoff() {
    let gpu = gpu();
    let layers = Layers::new(&gpu, 1, WIDTH);
    let spec = [BufferSpec::new("x", [WIDTH], DType::F32)];
    let handoff = FixedBuffers::new(&spec, ROWS, &gpu).unwrap();
    let input = gpu.tensor(&[ROWS, WIDTH], 0);
    let options = || CaptureOptions::new("poisoned").buffers(&handoff);
    let mut graph =
        BreakableGraph::<_, Step>::capture_with(&gpu, options(), &mut Step { rows: 8 }, |scope| {
            let (from, fixed) = (input.sqr()?, handoff.rows("x", ROWS)?);
            let x = scope.eager_break(move |step: &mut Step| {
                fixed.slice_set(&from.narrow(0, 0, step.rows)?, 0, 0)?;
                Ok(fixed.clone())
            })?;
            layers.run(0..1, &x)
        })
        .unwrap();
    let poison = Tensor::full(f32::NAN, (ROWS, WIDTH), &gpu.device).unwrap();
    for rows in [32, 8, 1, 31, 16] {
        handoff
            .rows("x", ROWS)
            .unwrap()
            .slice_set(&poison, 0, 0)
            .unwrap();
        let output = graph.launch_with(&mut Step { rows }).unwrap();
        let written = output.narrow(0, 0, rows).unwrap();
        let squares = input.sqr().unwrap().narrow(0, 0, rows).unwrap();
        let padded = squares.pad_with_zeros(0, 0, ROWS - rows).unwrap();
        let eager = layers.run(0..1, &padded).unwrap();
        assert_eq!(
            bits(&written),
            bits(&eager.narrow(0, 0, rows).unwrap()),
            "{rows} rows"
        );
        if rows < ROWS {
            let rest = output.narrow(0, rows, 1).unwrap();
            assert!(
                bits(&rest)
                    .iter()
                    .all(|bits| f32::from_bits(*bits).is_nan())
            );
        }
    }
}

/// Batches that shrink inside one graph hang kernels that compute with their padding.
#[test]
fn shrinking_batches_in_one_graph() {
    within_ten_seconds(|gpu| {
        let layers = Layers::new(gpu, 3, WIDTH);
        let (input, handoff) = (gpu.tensor(&[ROWS, WIDTH], 0), handoff(gpu, 1));
        let program = Broken {
            layers: &layers,
            handoff: &handoff,
            input: &input,
            n_breaks: 1,
        };
        let mut graph = program.capture(gpu, CaptureMode::Piecewise);
        for rows in [4, 3, 2, 1] {
            let launched = bits(graph.launch_with(&mut Step { rows }).unwrap());
            let eager = program.eager(&input, rows);
            assert_eq!(launched, bits(&eager), "{rows} rows");
        }
    });
}

/// Eager work and another thread's allocations between launches take memory that launches still use.
#[test]
fn launches_among_other_work() {
    let gpu = gpu();
    let layers = Layers::new(&gpu, 3, WIDTH);
    let (input, handoff) = (gpu.tensor(&[ROWS, WIDTH], 0), handoff(&gpu, 5));
    let program = Broken {
        layers: &layers,
        handoff: &handoff,
        input: &input,
        n_breaks: 5,
    };
    let churn = Churn::start();
    let mut graph = program.capture(&gpu, CaptureMode::Piecewise);
    let mut kept = Vec::new();
    for round in rounds(200) {
        let fresh = gpu.tensor(&[ROWS, WIDTH], round);
        input.slice_set(&fresh, 0, 0).unwrap();
        let rows = 1 + (round as usize * 7) % ROWS;
        let output = graph.launch_with(&mut Step { rows }).unwrap();
        // Work of its own on the same stream, some of which stays.
        kept.push(
            gpu.tensor(&[1 + round as usize % 500, WIDTH], round)
                .sqr()
                .unwrap(),
        );
        if round % 3 == 0 {
            kept.swap_remove(kept.len() / 2);
        }
        assert_eq!(
            bits(output),
            bits(&program.eager(&fresh, rows)),
            "round {round}"
        );
    }
    churn.stop();
}

/// A break's output at an address of its own is memory that later segments do not read.
#[test]
fn a_fresh_output_is_refused() {
    let gpu = gpu();
    let input = gpu.tensor(&[4], 1);
    let refused = BreakableGraph::capture(&gpu, |scope| {
        let from = input.sqr()?;
        let x = scope.eager_break(move |()| Ok(from.affine(2.0, 0.0)?))?;
        Ok(x.sqr()?)
    });
    let error = refused.unwrap_err();
    assert!(
        matches!(
            error,
            Error::FreshAddress {
                index: 0,
                output: 0,
                ..
            }
        ),
        "{error}"
    );
    gpu.works();
}

/// A break that fails in one launch must not spoil the next.
#[test]
fn a_break_that_fails_once() {
    let gpu = gpu();
    let input = gpu.tensor(&[64], 1);
    let mut graph = BreakableGraph::<_, bool>::capture_with(
        &gpu,
        CaptureOptions::new("failing"),
        &mut false,
        |scope| {
            let x = input.sqr()?;
            scope.eager_break(|fails: &mut bool| match fails {
                true => Err(Error::program("on purpose")),
                false => Ok(()),
            })?;
            Ok(x.affine(2.0, 1.0)?)
        },
    )
    .unwrap();
    let eager = bits(&input.sqr().unwrap().affine(2.0, 1.0).unwrap());
    for fails in [false, true, true, false] {
        match graph.launch_with(&mut { fails }) {
            Ok(output) => assert_eq!(bits(output), eager),
            Err(error) => assert!(fails && matches!(error, Error::Break { .. }), "{error}"),
        }
    }
}

/// A graph that a break first needs is captured in it, and launched there from then on.
#[test]
fn a_graph_inside_a_break() {
    let gpu = gpu();
    let input = gpu.tensor(&[64], 1);
    let spec = [BufferSpec::new("x", [], DType::F32)];
    let fixed = FixedBuffers::new(&spec, 64, &gpu).unwrap();
    let mut graph = BreakableGraph::capture(&gpu, |scope| {
        scope.fixed(&fixed);
        let (x, fixed) = (input.sqr()?, fixed.rows("x", 64)?);
        let (device, mut inner) = (gpu.device.clone(), None);
        let x = scope.eager_break(move |()| {
            let graph = match &mut inner {
                Some(graph) => graph,
                none => {
                    let x = x.clone();
                    let captured = BreakableGraph::capture(&device, |_| Ok(x.affine(3.0, 0.0)?))?;
                    none.insert(captured)
                }
            };
            fixed.slice_set(graph.launch()?, 0, 0)?;
            Ok(fixed.clone())
        })?;
        Ok(x.affine(1.0, 1.0)?)
    })
    .unwrap();
    for round in 0..20 {
        let fresh = gpu.tensor(&[64], round);
        input.slice_set(&fresh, 0, 0).unwrap();
        let eager = fresh.sqr().unwrap().affine(3.0, 0.0).unwrap();
        let eager = eager.affine(1.0, 1.0).unwrap();
        assert_eq!(bits(graph.launch().unwrap()), bits(&eager), "round {round}");
    }
}
