//! How fast rows move on a GPU, beside a plain copy of the same bytes on the same device.
//!
//! The layer inputs are those of DeepSeek-V4.1-Flash for a batch of 32,768 rows. Kept rows are the
//! last 128 of each of some requests. Every measurement walks through several row lists and buffers,
//! together larger than the L2 cache, so that none finds its data there. Times are medians between
//! CUDA events; "in a graph" is one launch of a graph of many operations, divided by their number.
//!
//! Run with `cargo bench -p replay-cuda --features cuda --bench gpu_rows`, or through
//! `cargo xtask test-gpu -- bench`. With `--json FILE` the table is also written as JSON.

mod table;

use std::error::Error;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaGraph, CudaStream, sys};
use candle_core::{DType, Device, Tensor};
use replay_cuda::{gather_rows_into, load_kernels, row_list, scatter_rows_into, write_rows_into};
use table::{Line, Table};

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

/// Rows of the batch.
const N_BATCH: usize = 32_768;

/// Rows that a request keeps.
const TAIL: usize = 128;

/// Kept rows of the measurements.
const KEPT: [usize; 3] = [128, 2_560, 8_192];

/// What no cache holds: more than twice the L2 of an H200.
const COLD_BYTES: usize = 160 << 20;

/// Measured runs; the median is taken.
const RUNS: usize = 31;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let json = args.find(|arg| arg == "--json").and_then(|_| args.next());

    let device = Device::new_cuda_with_stream(0)?;
    let cuda = device.as_cuda_device()?;
    // SAFETY: this program uses the device's one stream only.
    unsafe { cuda.disable_event_tracking() };
    load_kernels(&device)?;
    let stream = cuda.cuda_stream();
    let mut table = Table::new(stream.context().name()?);
    let bench = Bench { device, stream };

    for n_kept in KEPT {
        bench.gather(n_kept, &mut table)?;
    }
    for n_kept in KEPT {
        bench.scatter(n_kept, &mut table)?;
    }
    print!("{table}");
    if let Some(file) = json {
        std::fs::write(file, table.json())?;
    }
    Ok(())
}

/// The layer inputs of a batch of `n` rows.
fn layer_inputs(n: usize, device: &Device) -> Result<Vec<Tensor>> {
    let inputs = [
        (DType::BF16, vec![n, 5120]),    // hidden
        (DType::I64, vec![n]),           // positions
        (DType::I32, vec![n]),           // token ids
        (DType::F32, vec![n, 4]),        // mixes in
        (DType::F32, vec![n, 4, 1]),     // mixes out
        (DType::F32, vec![n, 4, 4]),     // mixes between streams
        (DType::BF16, vec![n, 4, 5120]), // streams
    ];
    inputs
        .into_iter()
        .map(|(dtype, dims)| filled(dtype, &dims, device))
        .collect()
}

/// The outputs of the replay layers: hidden rows and streams.
fn layer_outputs(n: usize, device: &Device) -> Result<Vec<Tensor>> {
    let outputs = [vec![n, 5120], vec![n, 4, 5120]];
    outputs
        .iter()
        .map(|dims| filled(DType::BF16, dims, device))
        .collect()
}

/// A tensor of bytes that are not all alike.
fn filled(dtype: DType, dims: &[usize], device: &Device) -> Result<Tensor> {
    let row: usize = dims[1..].iter().product();
    let some = 1024.min(dims[0]);
    let size = dtype.size_in_bytes();
    let mut state = 1u32;
    let bytes: Vec<u8> = (0..some * row * size)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        })
        .collect();
    let mut part = dims.to_vec();
    part[0] = some;
    let part = Tensor::from_raw_buffer(&bytes, dtype, &part, device)?;
    // By rows, in bytes: candle repeats no tensor of some dtypes.
    let list: Vec<u32> = (0..dims[0] as u32).map(|row| row % some as u32).collect();
    Ok(replay_cuda::gather_rows(&[&part], &list)?.remove(0))
}

fn bytes(tensors: &[Tensor]) -> usize {
    tensors
        .iter()
        .map(|t| t.elem_count() * t.dtype().size_in_bytes())
        .sum()
}

fn refs(tensors: &[Tensor]) -> Vec<&Tensor> {
    tensors.iter().collect()
}

/// The last rows of `n_kept / TAIL` requests of one length, in one of many places.
fn kept_rows(n_kept: usize, place: usize) -> Vec<u32> {
    let n_requests = n_kept / TAIL;
    let len = N_BATCH / n_requests;
    let places = len / TAIL;
    let shift = (place % places) * TAIL;
    let tails = (0..n_requests).map(|r| r * len + shift);
    tails
        .flat_map(|first| (first..first + TAIL).map(|row| row as u32))
        .collect()
}

struct Bench {
    device: Device,
    stream: Arc<CudaStream>,
}

impl Bench {
    fn gather(&self, n_kept: usize, table: &mut Table) -> Result<()> {
        let inputs = layer_inputs(N_BATCH, &self.device)?;
        let once = bytes(&inputs) / N_BATCH * n_kept;
        let n_sets = COLD_BYTES.div_ceil(once).clamp(2, 64);
        let lists = (0..n_sets)
            .map(|i| self.list(n_kept, i))
            .collect::<Result<Vec<_>>>()?;
        let outputs = (0..n_sets)
            .map(|_| layer_inputs(n_kept, &self.device))
            .collect::<Result<Vec<_>>>()?;
        let run = |set: usize| {
            gather_rows_into(&refs(&inputs), &lists[set], &refs(&outputs[set])).map_err(Into::into)
        };
        self.measure("gather 7 inputs", n_kept, (once, once), n_sets, &run, table)
    }

    fn scatter(&self, n_kept: usize, table: &mut Table) -> Result<()> {
        let (values, batch) = (
            layer_outputs(n_kept, &self.device)?,
            layer_outputs(N_BATCH, &self.device)?,
        );
        let (read, written) = (bytes(&values), bytes(&batch));
        let n_sets = COLD_BYTES.div_ceil(read).clamp(2, 64);
        let lists = (0..n_sets)
            .map(|i| self.list(n_kept, i))
            .collect::<Result<Vec<_>>>()?;
        let values = (0..n_sets)
            .map(|_| layer_outputs(n_kept, &self.device))
            .collect::<Result<Vec<_>>>()?;
        let scatter = |set: usize| {
            scatter_rows_into(&refs(&values[set]), &lists[set], &refs(&batch)).map_err(Into::into)
        };
        self.measure(
            "scatter 2 outputs",
            n_kept,
            (read, written),
            n_sets,
            &scatter,
            table,
        )?;
        let write = |set: usize| {
            write_rows_into(&refs(&values[set]), &lists[set], &refs(&batch)).map_err(Into::into)
        };
        self.measure(
            "write 2 outputs",
            n_kept,
            (read, read),
            n_sets,
            &write,
            table,
        )?;

        // Down to the rows that are sampled: the last of each request.
        let n_sampled = n_kept / TAIL;
        let last: Vec<u32> = (1..=n_sampled).map(|r| (r * TAIL - 1) as u32).collect();
        let last = row_list(&last, n_sampled, &self.device)?;
        let sampled = layer_outputs(n_sampled, &self.device)?;
        let once = bytes(&sampled);
        let compact = |set: usize| {
            gather_rows_into(&refs(&values[set]), &last, &refs(&sampled)).map_err(Into::into)
        };
        self.measure(
            "gather sampled rows",
            n_kept,
            (once, once),
            n_sets,
            &compact,
            table,
        )
    }

    fn list(&self, n_kept: usize, place: usize) -> Result<Tensor> {
        Ok(row_list(&kept_rows(n_kept, place), n_kept, &self.device)?)
    }

    /// Times an operation on its own and in a graph, and a copy of as many bytes.
    fn measure(
        &self,
        name: &'static str,
        n_kept: usize,
        (read, written): (usize, usize),
        n_sets: usize,
        run: &dyn Fn(usize) -> Result<()>,
        table: &mut Table,
    ) -> Result<()> {
        let alone = self.median(n_sets, run)?;
        let graph = self.capture(|| (0..n_sets).try_for_each(run))?;
        let graph_all = self.median(1, &|_| Ok(graph.launch()?))?;
        let copy = self.copy(usize::midpoint(read, written))?;
        table.push(Line {
            name,
            rows: n_kept,
            bytes: read + written,
            alone_us: alone,
            graph_us: graph_all / n_sets as f64,
            copy_us: copy,
        });
        Ok(())
    }

    /// Median time of one run in microseconds, the sets in turn.
    fn median(&self, n_sets: usize, run: &dyn Fn(usize) -> Result<()>) -> Result<f64> {
        let mut times = Vec::with_capacity(RUNS);
        for i in 0..RUNS + n_sets.max(3) {
            let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
            let begun = self.stream.record_event(flags)?;
            run(i % n_sets)?;
            let ended = self.stream.record_event(flags)?;
            self.stream.synchronize()?;
            // The first round warms up.
            if i >= n_sets.max(3) {
                times.push(f64::from(begun.elapsed_ms(&ended)?) * 1e3);
            }
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }

    fn capture(&self, body: impl FnOnce() -> Result<()>) -> Result<CudaGraph> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        self.stream.begin_capture(mode)?;
        let captured = body();
        let graph = self.stream.end_capture(flags)?;
        captured?;
        graph.ok_or_else(|| "nothing was captured".into())
    }

    /// Median time of a copy of `bytes` bytes within the device: on its own or in a graph of many,
    /// whichever is faster.
    fn copy(&self, bytes: usize) -> Result<f64> {
        let n_sets = COLD_BYTES.div_ceil(bytes).clamp(2, 64);
        let buffers = (0..n_sets)
            .map(|_| {
                let buffer = || self.stream.alloc_zeros::<u8>(bytes);
                Ok((buffer()?, std::cell::RefCell::new(buffer()?)))
            })
            .collect::<Result<Vec<_>>>()?;
        let copy = |set: usize| {
            let (from, to) = &buffers[set];
            Ok(self.stream.memcpy_dtod(from, &mut *to.borrow_mut())?)
        };
        let alone = self.median(n_sets, &copy)?;
        let graph = self.capture(|| (0..n_sets).try_for_each(copy))?;
        let all = self.median(1, &|_| Ok(graph.launch()?))?;
        Ok(alone.min(all / n_sets as f64))
    }
}
