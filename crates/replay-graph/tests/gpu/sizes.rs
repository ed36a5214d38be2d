//! Many sizes of one program, in every order.

use candle_core::{DType, Tensor};
use replay_core::{CaptureSizes, RowCount};
use replay_graph::{BufferSpec, CacheConfig, CaptureMode, FixedBuffers, GraphCache, Result, Scope};

use crate::gpu::{Gpu, Layers, bits, cases, gpu};

const WIDTH: usize = 64;
const SIZES: [u32; 3] = [8, 16, 32];

/// Rows of the step's batch.
struct Step {
    rows: usize,
}

struct Program {
    layers: Layers,
    inputs: FixedBuffers,
    handoff: FixedBuffers,
}

impl Program {
    fn new(gpu: &Gpu) -> Self {
        let spec = [BufferSpec::new("x", [WIDTH], DType::F32)];
        let buffers = || FixedBuffers::new(&spec, 32, gpu).unwrap();
        Self {
            layers: Layers::new(gpu, 4, WIDTH),
            inputs: buffers(),
            handoff: buffers(),
        }
    }

    fn run(&self, scope: &mut Scope<'_, Step>, padded: usize) -> Result<Tensor> {
        scope.fixed(&self.handoff);
        let x = self.layers.run(0..2, &self.inputs.rows("x", padded)?)?;
        let fixed = self.handoff.rows("x", padded)?;
        let x = scope.eager_break(move |step: &mut Step| {
            // Padding rows are whatever they are; none of the batch's rows reads them.
            fixed.slice_set(&x.narrow(0, 0, step.rows)?.affine(2.0, 0.5)?, 0, 0)?;
            Ok(fixed.clone())
        })?;
        self.layers.run(2..4, &x)
    }

    /// The batch's rows of an eager pass over the padded size, so that products are of one shape.
    fn eager(&self, batch: &Tensor, padded: usize) -> Tensor {
        let rows = batch.dims()[0];
        let pad = |x: &Tensor| x.pad_with_zeros(0, 0, padded - rows).unwrap();
        let x = self.layers.run(0..2, &pad(batch)).unwrap();
        let x = x.narrow(0, 0, rows).unwrap().affine(2.0, 0.5).unwrap();
        let x = self.layers.run(2..4, &pad(&x)).unwrap();
        x.narrow(0, 0, rows).unwrap()
    }
}

/// Buffers that the first capture sizes, and captures that overwrite each other's memory: the order
/// of captures and of launches must not matter.
#[test]
fn capture_and_launch_in_every_order() {
    const ORDERS: [[usize; 3]; 6] = [
        [0, 1, 2],
        [0, 2, 1],
        [1, 0, 2],
        [1, 2, 0],
        [2, 0, 1],
        [2, 1, 0],
    ];
    let gpu = gpu();
    let program = Program::new(&gpu);
    let mode = CaptureMode::Piecewise;
    for &captures in cases(&ORDERS) {
        let sizes = CaptureSizes::new(&SIZES, 32).unwrap();
        let mut cache = GraphCache::<Tensor, Step>::new(sizes, CacheConfig::default());
        for i in captures {
            let key = (RowCount::new(SIZES[i]), mode, ());
            let mut step = Step {
                rows: SIZES[i] as usize,
            };
            cache
                .get_or_capture(&gpu, key, &mut step, |descriptor, scope| {
                    program.run(scope, descriptor.rows.as_usize())
                })
                .unwrap()
                .expect("a captured size");
        }
        for (round, launches) in cases(&ORDERS).iter().enumerate() {
            for &i in launches {
                let padded = SIZES[i] as usize;
                let rows = padded - round % 4;
                let batch = gpu.tensor(&[rows, WIDTH], (round * 7 + i) as u64);
                program
                    .inputs
                    .rows("x", padded)
                    .unwrap()
                    .slice_set(&batch, 0, 0)
                    .unwrap();
                let graph = cache.get(RowCount::new(rows as u32), mode, ()).unwrap();
                let output = graph.launch_with(&mut Step { rows }).unwrap();
                let launched = bits(&output.narrow(0, 0, rows).unwrap());
                let eager = bits(&program.eager(&batch, padded));
                assert_eq!(
                    launched, eager,
                    "captured {captures:?}, {rows} rows in {padded}"
                );
            }
        }
    }
}

/// What one graph has put out stays while others are launched: it is memory of its own.
#[test]
fn outputs_survive_launches_of_other_sizes() {
    let gpu = gpu();
    let program = Program::new(&gpu);
    let sizes = CaptureSizes::new(&SIZES, 32).unwrap();
    let mut cache = GraphCache::<Tensor, Step>::new(sizes, CacheConfig::default());
    let kinds = [(CaptureMode::Piecewise, ())];
    let run = |d: &replay_graph::Descriptor, scope: &mut Scope<'_, Step>| {
        program.run(scope, d.rows.as_usize())
    };
    cache
        .capture_all(&gpu, &kinds, &mut Step { rows: 8 }, run, |_| ())
        .unwrap();
    let batch = gpu.tensor(&[8, WIDTH], 1);
    program
        .inputs
        .rows("x", 8)
        .unwrap()
        .slice_set(&batch, 0, 0)
        .unwrap();
    let mut outputs = Vec::new();
    for size in SIZES {
        let graph = cache
            .get(RowCount::new(size), CaptureMode::Piecewise, ())
            .unwrap();
        outputs.push(graph.launch_with(&mut Step { rows: 8 }).unwrap().clone());
    }
    for (size, output) in SIZES.into_iter().zip(outputs) {
        let rows = output.narrow(0, 0, 8).unwrap();
        // Padding differs, and with it nothing in these rows but the products' kernels.
        let eager = program.eager(&batch, size as usize);
        assert_eq!(bits(&rows), bits(&eager), "{size} rows");
    }
}
