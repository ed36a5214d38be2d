//! What a launch, a break and the capture of a ladder of sizes cost, beside the eager pass.
//!
//! `cargo bench -p replay-graph --features cuda --bench launch`, or the program that it builds. All
//! in one run, on one device; times are medians. `--json FILE` also writes the numbers there.

#[path = "../tests/gpu/launches.rs"]
#[allow(dead_code, reason = "shared with the tests")]
mod intercepted;

use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use replay_core::{CaptureSizes, Window};
use replay_graph::{
    Backend, BreakableGraph, BufferSpec, CacheConfig, CaptureMode, CaptureOptions, DeviceCapture,
    FixedBuffers, GraphCache, Result, Scope,
};

const LAYERS: usize = 40;
/// Elements of a row.
const WIDTH: usize = 256;
/// Rows of a decode step.
const ROWS: usize = 8;
const ROUNDS: usize = 300;

/// Layers of small kernels: in a decode step nearly all time goes into launching them.
struct Model {
    layers: Vec<(Tensor, Tensor)>,
}

impl Model {
    fn new(width: usize, device: &Device) -> Result<Self> {
        let layer = |_| {
            let weight = Tensor::randn(0f32, 0.05, (width, width), device)?;
            Ok((weight, Tensor::randn(0f32, 0.05, width, device)?))
        };
        Ok(Self {
            layers: (0..LAYERS).map(layer).collect::<Result<_>>()?,
        })
    }

    fn layer(&self, i: usize, x: &Tensor) -> Result<Tensor> {
        let (weight, bias) = &self.layers[i];
        let mean = x.sqr()?.mean_keepdim(1)?;
        let normed = x.broadcast_div(&mean.affine(1.0, 1e-6)?.sqrt()?)?;
        let y = normed.matmul(weight)?.broadcast_add(bias)?.silu()?;
        Ok((x + y)?)
    }

    fn run(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = x.clone();
        for i in 0..LAYERS {
            x = self.layer(i, &x)?;
        }
        Ok(x)
    }

    /// With an empty break after each of the first layers.
    fn run_broken(&self, scope: &mut Scope<'_>, n_breaks: usize, x: &Tensor) -> Result<Tensor> {
        let mut x = x.clone();
        for i in 0..LAYERS {
            x = self.layer(i, &x)?;
            if i < n_breaks {
                scope.eager_break(|()| Ok(()))?;
            }
        }
        Ok(x)
    }
}

/// What was measured, by name.
#[derive(Default)]
struct Numbers(Vec<(String, f64)>);

impl Numbers {
    fn add(&mut self, name: impl Into<String>, value: f64) {
        self.0.push((name.into(), value));
    }

    /// One object of numbers.
    fn json(&self) -> String {
        let fields = self
            .0
            .iter()
            .map(|(name, value)| format!("  \"{name}\": {value}"));
        format!("{{\n{}\n}}\n", fields.collect::<Vec<_>>().join(",\n"))
    }
}

fn main() -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    let mut numbers = Numbers::default();
    launches(&device, &mut numbers)?;
    bare_launches(&device, &mut numbers)?;
    breaks(&device, &mut numbers)?;
    ladder(&device, &mut numbers)?;
    parts_of_the_wall_time(&mut numbers)?;
    let file = std::env::args().skip_while(|arg| arg != "--json").nth(1);
    if let Some(file) = file {
        std::fs::write(file, numbers.json()).map_err(replay_graph::Error::program)?;
    }
    Ok(())
}

/// A launch against the eager step.
fn launches(device: &Device, numbers: &mut Numbers) -> Result<()> {
    let model = Model::new(WIDTH, device)?;
    let input = Tensor::randn(0f32, 1.0, (ROWS, WIDTH), device)?;
    let eager = timed(device, || model.run(&input).map(|_| ()))?;
    let mut graph = BreakableGraph::capture(device, |_| model.run(&input))?;
    let nodes = graph.nodes().next().unwrap_or_default();
    let launch = timed(device, || graph.launch().map(|_| ()))?;
    println!("decode-like step, {LAYERS} layers, {ROWS} rows of {WIDTH}: {nodes}");
    println!(
        "  eager step: host {:.1} us, wall {:.1} us",
        us(eager.host),
        us(eager.wall)
    );
    println!(
        "  graph step: host {:.1} us, wall {:.1} us",
        us(launch.host),
        us(launch.wall)
    );
    let share = us(launch.host) / us(eager.wall) * 100.0;
    println!("  host time of the launch: {share:.1} % of the eager wall time (goal: at most 15 %)");
    println!(
        "  wall time: {:.1} % of eager",
        us(launch.wall) / us(eager.wall) * 100.0
    );
    println!("  capture took {} bytes", graph.memory().bytes());
    for (name, times) in [("eager", eager), ("graph", launch)] {
        numbers.add(format!("{name}_host_us"), us(times.host));
        numbers.add(format!("{name}_wall_us"), us(times.wall));
    }
    Ok(())
}

/// As many kernels with nothing to do: all of the time is launching.
fn bare_launches(device: &Device, numbers: &mut Numbers) -> Result<()> {
    let number = Tensor::ones(1, DType::F32, device)?;
    let eager = timed(device, || bare_kernels(&number).map(|_| ()))?;
    let mut graph = BreakableGraph::capture(device, |_| bare_kernels(&number))?;
    let launch = timed(device, || graph.launch().map(|_| ()))?;
    let (eager, graph) = (us(eager.wall), us(launch.wall));
    println!("{KERNELS} kernels of one element:");
    println!(
        "  eager {eager:.1} us, graph {graph:.1} us wall: {:.1} % of eager (goal: at most 15 %)",
        graph / eager * 100.0
    );
    numbers.add("bare_eager_wall_us", eager);
    numbers.add("bare_graph_wall_us", graph);
    Ok(())
}

/// Kernels of the decode-like step.
const KERNELS: usize = 440;

fn bare_kernels(number: &Tensor) -> Result<Tensor> {
    let mut x = number.clone();
    for _ in 0..KERNELS {
        x = x.sqr()?;
    }
    Ok(x)
}

/// The same step without nodes for memory, and as many kernels that do next to nothing: what is left
/// of the graph's wall time after each is what the other costs. Not what a candle program gets.
fn parts_of_the_wall_time(numbers: &mut Numbers) -> Result<()> {
    println!("parts of the wall time; per launch, one queued after the other:");
    for (name, given, plain) in [
        ("graph_memory", false, false),
        // cuBLAS has memory for its products, so that captures allocate none for it.
        ("given_workspace", true, false),
        ("plain_memory", true, true),
    ] {
        intercepted::set_plain_memory(given);
        let device = Device::new_cuda_with_stream(0)?;
        intercepted::set_plain_memory(plain);
        let model = Model::new(WIDTH, &device)?;
        let input = Tensor::randn(0f32, 1.0, (ROWS, WIDTH), &device)?;
        // What an earlier graph has left would be taken first, and not counted.
        DeviceCapture::trim(&device)?;
        let mut step = BreakableGraph::capture(&device, |_| model.run(&input))?;
        part(&device, &format!("step_{name}"), &mut step, numbers)?;
        let number = Tensor::ones(1, DType::F32, &device)?;
        let mut floor = BreakableGraph::capture(&device, |_| bare_kernels(&number))?;
        part(&device, &format!("tiny_{name}"), &mut floor, numbers)?;
    }
    intercepted::set_plain_memory(false);
    Ok(())
}

fn part(
    device: &Device,
    name: &str,
    graph: &mut BreakableGraph<Tensor>,
    numbers: &mut Numbers,
) -> Result<()> {
    const LAUNCHES: usize = 10;
    let alone = timed(device, || graph.launch().map(|_| ()))?;
    let queued = timed(device, || {
        for _ in 0..LAUNCHES {
            graph.launch()?;
        }
        Ok(())
    })?;
    let (alone, queued) = (us(alone.wall), us(queued.wall) / LAUNCHES as f64);
    let nodes = graph.nodes().next().unwrap_or_default();
    let bytes = graph.memory().bytes();
    println!("  {name}: {queued:.1} us, alone {alone:.1} us wall; {nodes}; {bytes} bytes");
    numbers.add(format!("{name}_queued_us"), queued);
    numbers.add(format!("{name}_wall_us"), alone);
    Ok(())
}

/// What each break adds.
fn breaks(device: &Device, numbers: &mut Numbers) -> Result<()> {
    let model = Model::new(WIDTH, device)?;
    let input = Tensor::randn(0f32, 1.0, (ROWS, WIDTH), device)?;
    let mut points = Vec::new();
    println!("empty breaks:");
    for n_breaks in [0, 1, 5, 10, 20, 39] {
        let mut options = CaptureOptions::new("breaks");
        options.check_addresses = false;
        let mut graph = BreakableGraph::<_>::capture_with(device, options, &mut (), |scope| {
            model.run_broken(scope, n_breaks, &input)
        })?;
        let launch = timed(device, || graph.launch().map(|_| ()))?;
        println!(
            "  {n_breaks:2} breaks: host {:.1} us, wall {:.1} us",
            us(launch.host),
            us(launch.wall)
        );
        points.push((n_breaks as f64, us(launch.host)));
        numbers.add(format!("{n_breaks}_breaks_host_us"), us(launch.host));
        numbers.add(format!("{n_breaks}_breaks_wall_us"), us(launch.wall));
    }
    let each = slope(&points);
    println!("  host time of each: {each:.2} us (goal: at most 8 us)");
    numbers.add("break_host_us", each);
    Ok(())
}

/// The default sizes of a model of 40 layers.
fn ladder(device: &Device, numbers: &mut Numbers) -> Result<()> {
    const MAX_ROWS: u32 = 8192;
    let window = Window::new(128).map_err(replay_graph::Error::program)?;
    let sizes = CaptureSizes::ladder(window, MAX_ROWS).map_err(replay_graph::Error::program)?;
    let n = sizes.as_slice().len();
    let model = Model::new(1024, device)?;
    let spec = [BufferSpec::new("x", [1024], DType::F32)];
    let inputs = FixedBuffers::new(&spec, MAX_ROWS as usize, device)?;
    let mut cache = GraphCache::<Tensor>::new(sizes, CacheConfig::default());
    println!("ladder of {n} sizes up to {MAX_ROWS} rows of 1024, {LAYERS} layers, one break:");
    for pass in ["first", "second"] {
        let start = Instant::now();
        let report = cache.capture_all(
            device,
            &[(CaptureMode::Piecewise, ())],
            &mut (),
            |descriptor, scope| {
                let x = inputs.rows("x", descriptor.rows.as_usize())?;
                let x = model.run_broken(scope, 1, &x)?;
                // A row for each request is what a step gives.
                Ok(x.narrow(0, 0, 8)?.contiguous()?)
            },
            |progress| {
                if progress.done == 1 || progress.done == progress.total {
                    println!("  {progress}");
                }
            },
        )?;
        let seconds = start.elapsed().as_secs_f64();
        numbers.add(format!("{pass}_pass_s"), seconds);
        numbers.add(format!("{pass}_pass_bytes"), report.memory.bytes() as f64);
        println!(
            "  {pass} pass: {} captured in {:.2} s, {} MiB of the device, {} MiB for graphs",
            report.captured,
            seconds,
            report.memory.device >> 20,
            report.memory.graphs >> 20
        );
    }
    println!("  (goals: under 20 s, and a second pass that adds nothing)");
    Ok(())
}

/// Of one call: until it returns, and until the device is done.
struct Times {
    host: Duration,
    wall: Duration,
}

fn timed(device: &Device, mut call: impl FnMut() -> Result<()>) -> Result<Times> {
    let (mut host, mut wall) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS + 20 {
        device.synchronize()?;
        let start = Instant::now();
        call()?;
        let queued = start.elapsed();
        device.synchronize()?;
        if round >= 20 {
            host.push(queued);
            wall.push(start.elapsed());
        }
    }
    Ok(Times {
        host: median(host),
        wall: median(wall),
    })
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Least squares.
fn slope(points: &[(f64, f64)]) -> f64 {
    let n = points.len() as f64;
    let mean = |f: fn(&(f64, f64)) -> f64| points.iter().map(f).sum::<f64>() / n;
    let (x, y) = (mean(|p| p.0), mean(|p| p.1));
    let rise: f64 = points.iter().map(|p| (p.0 - x) * (p.1 - y)).sum();
    let run: f64 = points.iter().map(|p| (p.0 - x).powi(2)).sum();
    rise / run
}
