//! Graphs by what they were captured for.

mod config;
mod descriptor;

use std::collections::HashMap;
use std::fmt;

use replay_core::{CaptureSizes, RowCount};

pub use config::{CacheConfig, CaptureReport, Progress};
pub use descriptor::{Descriptor, Variant};

use crate::{
    Backend, BreakableGraph, CaptureMode, CaptureOptions, DeviceCapture, MemoryTaken, Result, Scope,
};

/// Graphs of one program, by [`Descriptor`].
///
/// A batch runs in the smallest captured size that holds it, its last rows being padding; a batch
/// above the largest size has no graph and runs eagerly. Sizes are captured ahead, all at once, or
/// when first needed, or both.
///
/// * `T`, `C`, `B` - as for [`BreakableGraph`].
/// * `X` - whatever else changes a launch, such as the choice between two kernels.
///
/// ```no_run
/// use candle_core::{DType, Device};
/// use replay_core::{CaptureSizes, RowCount};
/// use replay_graph::{BufferSpec, CacheConfig, CaptureMode, FixedBuffers, GraphCache};
///
/// let device = Device::new_cuda_with_stream(0)?;
/// let sizes = CaptureSizes::new(&[8, 16, 32], 32).map_err(replay_graph::Error::program)?;
/// let inputs = FixedBuffers::new(&[BufferSpec::new("x", [64], DType::F32)], 32, &device)?;
///
/// let mut cache = GraphCache::<_>::new(sizes, CacheConfig::default());
/// let report = cache.capture_all(
///     &device,
///     &[(CaptureMode::Piecewise, ())],
///     &mut (),
///     |descriptor, _| Ok(inputs.rows("x", descriptor.rows.as_usize())?.sqr()?),
///     |progress| eprintln!("{progress}"),
/// )?;
/// assert_eq!(report.captured, 3);
///
/// match cache.get(RowCount::new(11), CaptureMode::Piecewise, ()) {
///     Some(graph) => assert_eq!(graph.launch()?.dims(), [16, 64]),
///     None => unreachable!("11 rows fit a captured size"),
/// }
/// assert!(cache.get(RowCount::new(33), CaptureMode::Piecewise, ()).is_none());
/// # Ok::<(), replay_graph::Error>(())
/// ```
pub struct GraphCache<T = (), C = (), X = (), B: Backend = DeviceCapture> {
    graphs: HashMap<Descriptor<X>, BreakableGraph<T, C, B>>,
    taken: MemoryTaken,
    sizes: CaptureSizes,
    config: CacheConfig,
}

impl<T, C, X: Variant, B: Backend> GraphCache<T, C, X, B> {
    /// A cache without graphs, for these sizes.
    pub fn new(sizes: CaptureSizes, config: CacheConfig) -> Self {
        Self {
            graphs: HashMap::new(),
            taken: MemoryTaken::default(),
            sizes,
            config,
        }
    }

    /// What a batch of `rows` rows is captured for; `None` above the largest size.
    pub fn descriptor(
        &self,
        rows: RowCount,
        mode: CaptureMode,
        variant: X,
    ) -> Option<Descriptor<X>> {
        let rows = self.sizes.fit(rows)?;
        Some(Descriptor {
            rows,
            mode,
            variant,
        })
    }

    /// The graph for a batch of `rows` rows; `None` if none has been captured, or the batch is above
    /// the largest size, and the batch has to run eagerly.
    pub fn get(
        &mut self,
        rows: RowCount,
        mode: CaptureMode,
        variant: X,
    ) -> Option<&mut BreakableGraph<T, C, B>> {
        let descriptor = self.descriptor(rows, mode, variant)?;
        self.graphs.get_mut(&descriptor)
    }

    /// The graph for a batch of `rows` rows, captured if it has not been; `None` above the largest
    /// size.
    ///
    /// # Errors
    ///
    /// If the cache is full, and what the capture fails with. The batch can run eagerly then.
    pub fn get_or_capture(
        &mut self,
        target: &B::Target,
        (rows, mode, variant): (RowCount, CaptureMode, X),
        context: &mut C,
        program: impl FnMut(&Descriptor<X>, &mut Scope<'_, C, B>) -> Result<T>,
    ) -> Result<Option<&mut BreakableGraph<T, C, B>>> {
        let Some(descriptor) = self.descriptor(rows, mode, variant) else {
            return Ok(None);
        };
        if !self.graphs.contains_key(&descriptor) {
            self.capture(target, descriptor.clone(), context, program)?;
        }
        Ok(self.graphs.get_mut(&descriptor))
    }

    /// Captures every size in every one of `kinds`, the largest first, so that the memory it takes
    /// serves the smaller ones too. What is there already is left alone. `progress` is told of each.
    ///
    /// # Errors
    ///
    /// The first error; graphs captured before it stay.
    pub fn capture_all(
        &mut self,
        target: &B::Target,
        kinds: &[(CaptureMode, X)],
        context: &mut C,
        mut program: impl FnMut(&Descriptor<X>, &mut Scope<'_, C, B>) -> Result<T>,
        mut progress: impl FnMut(Progress<'_, X>),
    ) -> Result<CaptureReport> {
        let sizes: Vec<u32> = self.sizes.as_slice().iter().rev().copied().collect();
        let total = sizes.len() * kinds.len();
        let mut report = CaptureReport::default();
        for rows in sizes {
            for (mode, variant) in kinds {
                let descriptor = Descriptor {
                    rows: RowCount::new(rows),
                    mode: *mode,
                    variant: variant.clone(),
                };
                if let Some(graph) = self.graphs.get(&descriptor) {
                    report.already += 1;
                    let memory = graph.memory();
                    progress(Progress::new(&descriptor, &report, total, memory));
                    continue;
                }
                let memory = self.capture(target, descriptor.clone(), context, &mut program)?;
                report.add(memory);
                progress(Progress::new(&descriptor, &report, total, memory));
            }
        }
        Ok(report)
    }

    fn capture(
        &mut self,
        target: &B::Target,
        descriptor: Descriptor<X>,
        context: &mut C,
        mut program: impl FnMut(&Descriptor<X>, &mut Scope<'_, C, B>) -> Result<T>,
    ) -> Result<MemoryTaken> {
        let label = descriptor.to_string();
        self.config.admit(&label, self.graphs.len(), self.taken)?;
        let mut options = CaptureOptions::new(label).mode(descriptor.mode);
        options.knob = self.config.knob;
        options.check_addresses = self.config.check_addresses;
        let graph = BreakableGraph::capture_with(target, options, context, |scope| {
            program(&descriptor, scope)
        })?;
        let memory = graph.memory();
        self.taken = self.taken.plus(memory);
        self.graphs.insert(descriptor, graph);
        Ok(memory)
    }

    /// Drops all graphs and returns their memory to the device.
    ///
    /// # Errors
    ///
    /// If the driver fails to return the memory.
    pub fn clear(&mut self, target: &B::Target) -> Result<()> {
        self.graphs.clear();
        self.taken = MemoryTaken::default();
        B::trim(target)
    }

    /// The sizes.
    pub const fn sizes(&self) -> &CaptureSizes {
        &self.sizes
    }

    /// Whether the graph of a descriptor has been captured.
    pub fn contains(&self, descriptor: &Descriptor<X>) -> bool {
        self.graphs.contains_key(descriptor)
    }

    /// How many graphs there are.
    pub fn len(&self) -> usize {
        self.graphs.len()
    }

    /// Whether there is no graph.
    pub fn is_empty(&self) -> bool {
        self.graphs.is_empty()
    }

    /// The graphs that there are, as [`already`](CaptureReport::already) there, with the memory that
    /// they took.
    pub fn captured(&self) -> CaptureReport {
        CaptureReport {
            captured: 0,
            already: self.len(),
            memory: self.taken,
        }
    }

    /// Memory that the graphs took, all together.
    pub const fn memory(&self) -> MemoryTaken {
        self.taken
    }

    /// All graphs, in no order.
    pub fn graphs(&self) -> impl Iterator<Item = (&Descriptor<X>, &BreakableGraph<T, C, B>)> {
        self.graphs.iter()
    }
}

impl<T, C, X: Variant, B: Backend> fmt::Debug for GraphCache<T, C, X, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GraphCache")
            .field("sizes", &self.sizes)
            .field("graphs", &self.graphs.len())
            .field("memory", &self.taken)
            .finish_non_exhaustive()
    }
}
