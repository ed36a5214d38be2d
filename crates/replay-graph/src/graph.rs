//! Graphs with breaks: capture and launch.

use std::fmt;

use candle_core::Device;

use crate::recorder::{Break, Recorder};
use crate::{
    Backend, CaptureMove, CaptureOptions, DeviceCapture, Error, FixedBuffers, MemoryTaken,
    NodeCounts, Result, Scope, Segment, StreamKey, claim,
};

/// A captured program: graph segments, with eager breaks between them.
///
/// * `T` - what the program gave at capture. Each launch writes the tensors in it anew.
/// * `C` - what is lent to each launch, for the breaks: a step's plan, for instance.
/// * `B` - what captures.
///
/// The smallest use captures a closure, changes its input, and launches it:
///
/// ```no_run
/// use candle_core::{Device, Tensor};
/// use replay_graph::BreakableGraph;
///
/// let device = Device::new_cuda_with_stream(0)?;
/// let input = Tensor::zeros(4, candle_core::DType::F32, &device)?;
///
/// let mut graph = BreakableGraph::capture(&device, |_| Ok(input.affine(2.0, 1.0)?))?;
/// input.slice_set(&Tensor::new(&[1f32, 2.0, 3.0, 4.0], &device)?, 0, 0)?;
/// assert_eq!(graph.launch()?.to_vec1::<f32>()?, [3.0, 5.0, 7.0, 9.0]);
/// # Ok::<(), replay_graph::Error>(())
/// ```
///
/// # What it owns
///
/// The program's output, what the breaks own, and the fixed buffers. Everything else that a segment
/// reads must outlive the graph at the same address: weights, inputs, caches.
///
/// # Threads
///
/// A graph belongs to the one stream and the one thread that captured it: it is neither `Send` nor
/// `Sync`. Constants that were uploaded for it live as long as that thread.
///
/// ```compile_fail
/// fn send<T: Send>() {}
/// send::<replay_graph::BreakableGraph>();
/// ```
///
/// ```compile_fail
/// fn sync<T: Sync>() {}
/// sync::<replay_graph::BreakableGraph>();
/// ```
///
/// Fields are dropped in the order in which they are written: the memory of outputs is freed before
/// the segments that allocated it.
pub struct BreakableGraph<T = (), C = (), B: Backend = DeviceCapture> {
    output: T,
    breaks: Vec<Break<C>>,
    segments: Vec<B::Segment>,
    pinned: Vec<FixedBuffers>,
    options: CaptureOptions,
    stream: StreamKey,
    memory: MemoryTaken,
    /// As a raw pointer would: segments of other backends may well be `Send`.
    not_send: std::marker::PhantomData<*const ()>,
}

impl<T> BreakableGraph<T, (), DeviceCapture> {
    /// Captures a program on a CUDA device, with the default options.
    ///
    /// The program runs twice: once eagerly, as warm-up, and once captured, which is a real run too.
    ///
    /// # Errors
    ///
    /// What the program fails with, and all that [`Error`] says of captures. Nothing is being
    /// captured afterwards, and the device goes on as before.
    pub fn capture(
        device: &Device,
        program: impl FnMut(&mut Scope<'_>) -> Result<T>,
    ) -> Result<Self> {
        Self::capture_with(device, CaptureOptions::default(), &mut (), program)
    }
}

impl<T, C, B: Backend> BreakableGraph<T, C, B> {
    /// Captures a program. `context` is lent to the breaks of both its runs.
    ///
    /// # Errors
    ///
    /// As [`capture`](BreakableGraph::capture).
    pub fn capture_with(
        target: &B::Target,
        options: CaptureOptions,
        context: &mut C,
        mut program: impl FnMut(&mut Scope<'_, C, B>) -> Result<T>,
    ) -> Result<Self> {
        let mut recorder = Recorder::<C, B>::open(target, options)?;
        match run(&mut recorder, context, &mut program) {
            Ok((output, memory)) => Ok(Self {
                output,
                breaks: std::mem::take(&mut recorder.breaks),
                segments: std::mem::take(&mut recorder.segments),
                pinned: std::mem::take(&mut recorder.pinned),
                options: recorder.options.clone(),
                stream: recorder.claim().stream(),
                memory,
                not_send: std::marker::PhantomData,
            }),
            Err(error) => Err(recorder.give_up(error)),
        }
    }

    /// Launches the segments and runs the breaks between them, in order, without waiting for the
    /// device. Gives the output, whose tensors are written once the device gets there.
    ///
    /// # Errors
    ///
    /// [`Error::Break`] if a break fails, and what the driver fails with. The graph can be launched
    /// again.
    pub fn launch_with(&mut self, context: &mut C) -> Result<&T> {
        claim::check_launch(self.stream, &self.options.label)?;
        let mut breaks = (0u32..).zip(&mut self.breaks);
        for segment in &self.segments {
            segment.launch()?;
            if let Some((index, run)) = breaks.next() {
                run.launch(context, &self.options, index)?;
            }
        }
        Ok(&self.output)
    }

    /// What the program gave at capture; as the last launch left it.
    pub const fn output(&self) -> &T {
        &self.output
    }

    /// How many segments there are: one more than breaks.
    pub fn n_segments(&self) -> usize {
        self.segments.len()
    }

    /// How many breaks there are.
    pub fn n_breaks(&self) -> usize {
        self.breaks.len()
    }

    /// What each segment consists of.
    pub fn nodes(&self) -> impl ExactSizeIterator<Item = NodeCounts> {
        self.segments.iter().map(Segment::nodes)
    }

    /// Memory that the capture took. Warm-up is not in it.
    pub const fn memory(&self) -> MemoryTaken {
        self.memory
    }

    /// The fixed buffers that it keeps.
    pub fn buffers(&self) -> &[FixedBuffers] {
        &self.pinned
    }

    /// What errors call it.
    pub fn label(&self) -> &str {
        &self.options.label
    }
}

impl<T, B: Backend> BreakableGraph<T, (), B> {
    /// [`launch_with`](Self::launch_with) of breaks that need no context.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn launch(&mut self) -> Result<&T> {
        self.launch_with(&mut ())
    }
}

fn run<T, C, B: Backend>(
    recorder: &mut Recorder<C, B>,
    context: &mut C,
    program: &mut impl FnMut(&mut Scope<'_, C, B>) -> Result<T>,
) -> Result<(T, MemoryTaken), Error> {
    if recorder.options.warm_up {
        program(&mut Scope::new(recorder, context, true))?;
    }
    let before = recorder.memory()?;
    recorder.begin(CaptureMove::Begin)?;
    let output = program(&mut Scope::new(recorder, context, false))?;
    recorder.end(CaptureMove::Finish)?;
    let after = recorder.memory()?;
    Ok((output, MemoryTaken::between(before, after)))
}

impl<T: fmt::Debug, C, B: Backend> fmt::Debug for BreakableGraph<T, C, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BreakableGraph")
            .field("label", &self.options.label)
            .field("segments", &self.segments.len())
            .field("breaks", &self.breaks.len())
            .field("memory", &self.memory)
            .field("output", &self.output)
            .finish_non_exhaustive()
    }
}
