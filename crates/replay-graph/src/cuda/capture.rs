//! Capture of a device's stream.

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::sys::{
    CUgraphInstantiate_flags, CUstreamCaptureMode, CUstreamCaptureStatus,
};
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaGraph, CudaStream, DriverError};
use candle_core::{CudaDevice, Device};

use super::evidence::{Evidence, evidence, status};
use super::guards::Guards;
use super::raw;
use crate::cause::Cause;
use crate::{
    Backend, CaptureOptions, DeviceMemory, DriverStatus, Error, NodeCounts, Result, Segment,
    StreamKey,
};

/// Captures on a CUDA device whose stream is its own.
///
/// Segments are captured in thread-local mode: this thread may not make calls that would wait for
/// the stream or break the capture, and other threads may do as they like on their own streams.
/// Memory that a segment allocates becomes part of the graph; it is mapped by a launch, and what a
/// launch leaves allocated the next one frees first, which is what lets a tensor of one segment be
/// read by those after it and be dropped anywhere.
pub struct DeviceCapture {
    stream: Arc<CudaStream>,
    names: Rc<Names>,
    /// Restores the device last.
    _guards: Guards,
}

/// A segment captured on a CUDA device.
pub struct DeviceSegment {
    graph: CudaGraph,
    context: Arc<CudaContext>,
    nodes: NodeCounts,
    names: Rc<Names>,
}

/// What errors are to say.
struct Names {
    label: String,
    knob: &'static str,
}

impl Backend for DeviceCapture {
    type Target = Device;
    type Segment = DeviceSegment;

    fn stream(device: &Device) -> Result<StreamKey> {
        /// The largest handle that stands for a default stream: of the context, legacy, or of the
        /// thread.
        const LAST_DEFAULT: usize = 2;
        let address = cuda_device(device)?.cuda_stream().cu_stream().addr();
        if address <= LAST_DEFAULT {
            return Err(Error::SharedStream);
        }
        Ok(StreamKey(address))
    }

    fn open(device: &Device, options: &CaptureOptions) -> Result<Self> {
        let device = cuda_device(device)?;
        let names = Names {
            label: options.label.clone(),
            knob: options.knob,
        };
        let stream = device.cuda_stream();
        match stream.capture_status() {
            Ok(CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE) => {}
            Ok(_) => return Err(Error::ForeignCapture { label: names.label }),
            Err(error) => return Err(names.failure(stream.context(), "capture status", error)),
        }
        Ok(Self {
            stream,
            names: Rc::new(names),
            _guards: Guards::set(device),
        })
    }

    fn begin(&mut self) -> Result<()> {
        self.stream
            .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .map_err(|error| self.failure("begin of capture", error))
    }

    fn end(&mut self, index: u32) -> Result<DeviceSegment> {
        let context = self.stream.context();
        // A drop cannot fail, so cudarc keeps its error for the next call; without this, for one
        // after the capture.
        if let Err(error) = context.check_err() {
            self.abort();
            return Err(match status(error).cause() {
                Cause::Forbidden => self.forbidden(status(error), index, None),
                _ => self.dropped_inside(status(error), index),
            });
        }
        let graph = self
            .stream
            .end_capture(CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)
            .map_err(|error| self.segment_failure("end of capture", error, index))?
            .ok_or_else(|| self.forbidden(DriverStatus::new(901), index, None))?;
        let nodes = raw::node_counts(&graph)
            .map_err(|error| self.failure("listing of graph nodes", error))?;
        if nodes.host_copies > 0 {
            return Err(self.host_copy(index, None));
        }
        if nodes.total() > 0 {
            graph
                .upload()
                .map_err(|error| self.failure("upload of a graph", error))?;
        }
        Ok(DeviceSegment {
            graph,
            context: context.clone(),
            nodes,
            names: self.names.clone(),
        })
    }

    fn abort(&mut self) {
        let context = self.stream.context();
        // An error that was kept would be taken for that of the calls below.
        let _ = context.check_err();
        let _ = context.bind_to_thread();
        raw::discard_capture(&self.stream);
        let _ = context.check_err();
    }

    fn settle(&mut self) {
        let context = self.stream.context();
        let _ = context.check_err();
        let _ = self.stream.synchronize();
        let _ = raw::trim_graph_memory(context);
        let _ = context.check_err();
    }

    fn explain(&self, error: Error, index: u32) -> Error {
        // Drops on the way out may have left one, which would hide the state of the stream.
        let _ = self.stream.context().check_err();
        match evidence(&error) {
            Evidence::RefusedCopy => self.host_copy(index, Some(Box::new(error))),
            Evidence::Status(status) => match status.cause() {
                Cause::OutOfMemory => self.names.out_of_memory(self.stream.context(), status),
                Cause::DroppedInside if self.is_capturing() => self.dropped_inside(status, index),
                Cause::Forbidden => self.forbidden(status, index, Some(Box::new(error))),
                Cause::DroppedInside | Cause::Other => error,
            },
            // Some errors have lost their status on the way; the stream still knows.
            Evidence::Nothing if self.is_invalidated() && is_foreign(&error) => {
                self.forbidden(DriverStatus::new(901), index, Some(Box::new(error)))
            }
            Evidence::Nothing => error,
        }
    }

    fn memory(&self) -> Result<DeviceMemory> {
        let context = self.stream.context();
        let read = || {
            self.stream.synchronize()?;
            let (free, _) = context.mem_get_info()?;
            Ok(DeviceMemory {
                free: free as u64,
                graphs: raw::graph_memory(context)?,
            })
        };
        read().map_err(|error| self.failure("reading of free memory", error))
    }

    fn trim(device: &Device) -> Result<()> {
        let stream = cuda_device(device)?.cuda_stream();
        let names = Names {
            label: "graphs".to_owned(),
            knob: "",
        };
        stream
            .synchronize()
            .and_then(|()| raw::trim_graph_memory(stream.context()))
            .map_err(|error| names.failure(stream.context(), "return of graph memory", error))
    }
}

impl DeviceCapture {
    fn failure(&self, op: &'static str, error: DriverError) -> Error {
        self.names.failure(self.stream.context(), op, error)
    }

    /// What ends a capture may be what was done in it.
    fn segment_failure(&self, op: &'static str, error: DriverError, index: u32) -> Error {
        match status(error).cause() {
            Cause::Forbidden => self.forbidden(status(error), index, None),
            _ => self.failure(op, error),
        }
    }

    fn dropped_inside(&self, status: DriverStatus, index: u32) -> Error {
        Error::DroppedInside {
            label: self.names.label.clone(),
            segment: index,
            status,
        }
    }

    fn forbidden(&self, status: DriverStatus, index: u32, source: Option<Box<Error>>) -> Error {
        Error::Forbidden {
            label: self.names.label.clone(),
            segment: index,
            status,
            source,
        }
    }

    fn host_copy(&self, index: u32, source: Option<Box<Error>>) -> Error {
        Error::HostCopy {
            label: self.names.label.clone(),
            segment: index,
            source,
        }
    }

    fn is_capturing(&self) -> bool {
        !matches!(
            self.stream.capture_status(),
            Ok(CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
        )
    }

    fn is_invalidated(&self) -> bool {
        matches!(
            self.stream.capture_status(),
            Ok(CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED)
        )
    }
}

impl Names {
    fn failure(&self, context: &CudaContext, op: &'static str, error: DriverError) -> Error {
        match status(error).cause() {
            Cause::OutOfMemory => self.out_of_memory(context, status(error)),
            _ => Error::Driver {
                label: self.label.clone(),
                op,
                status: status(error),
            },
        }
    }

    fn out_of_memory(&self, context: &CudaContext, status: DriverStatus) -> Error {
        Error::OutOfMemory {
            label: self.label.clone(),
            knob: self.knob,
            free_bytes: context.mem_get_info().map_or(0, |(free, _)| free as u64),
            status,
        }
    }
}

impl Segment for DeviceSegment {
    fn launch(&self) -> Result<()> {
        if self.nodes.total() == 0 {
            return Ok(());
        }
        self.graph.launch().map_err(|error| {
            self.names
                .failure(&self.context, "launch of a graph", error)
        })
    }

    fn nodes(&self) -> NodeCounts {
        self.nodes
    }
}

/// Whether an error came from outside this crate.
fn is_foreign(error: &Error) -> bool {
    matches!(error, Error::Candle(_) | Error::Rows(_) | Error::Program(_))
}

pub(super) fn cuda_device(device: &Device) -> Result<&CudaDevice> {
    match device {
        Device::Cuda(device) => Ok(device),
        other => Err(Error::NoGraphs {
            device: format!("{:?}", other.location()),
        }),
    }
}

impl fmt::Debug for DeviceCapture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceCapture")
            .field("label", &self.names.label)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for DeviceSegment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceSegment")
            .field("nodes", &self.nodes)
            .finish_non_exhaustive()
    }
}
