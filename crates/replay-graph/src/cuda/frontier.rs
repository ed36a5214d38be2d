//! What the next node of a capture will depend on.

#![allow(unsafe_code)]

use std::ptr;
use std::sync::Arc;

use candle_core::Device;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DriverError, sys};

use super::{capture::cuda_device, evidence::status};
use crate::{Error, Result};

/// The nodes of a capture under way that its next node would depend on.
pub(crate) struct Frontier {
    stream: Arc<CudaStream>,
    /// Tells the capture, which is one segment, from those before and after it.
    capture: u64,
    nodes: Vec<sys::CUgraphNode>,
    edges: Vec<sys::CUgraphEdgeData>,
}

impl Frontier {
    /// Of the device's stream; `None` where it is not being captured, or its capture has failed, which
    /// the end of the capture tells.
    pub(crate) fn of(device: &Device) -> Result<Option<Self>> {
        let Device::Cuda(_) = device else {
            return Ok(None);
        };
        let stream = cuda_device(device)?.cuda_stream();
        read(stream).map_err(|error| driver("reading of a capture", error))
    }

    /// Lets what comes next depend on these nodes and no others.
    pub(crate) fn go_back(self) -> Result<()> {
        const SET: u32 =
            sys::CUstreamUpdateCaptureDependencies_flags_enum::CU_STREAM_SET_CAPTURE_DEPENDENCIES
                as u32;
        self.update(SET)
    }

    /// Lets what comes next depend on these nodes as well.
    pub(crate) fn wait_as_well(self) -> Result<()> {
        const ADD: u32 =
            sys::CUstreamUpdateCaptureDependencies_flags_enum::CU_STREAM_ADD_CAPTURE_DEPENDENCIES
                as u32;
        self.update(ADD)
    }

    fn update(mut self, flags: u32) -> Result<()> {
        let now = read(self.stream.clone()).map_err(|e| driver("reading of a capture", e))?;
        if now.is_none_or(|now| now.capture != self.capture) {
            return Err(Error::BreakInBranch);
        }
        // SAFETY: the stream is alive. The nodes were read from it while it was captured, and it still is
        // in the same capture, so they are nodes of the graph that is being made. Both lists have as
        // many entries as are said.
        unsafe {
            sys::cuStreamUpdateCaptureDependencies_v2(
                self.stream.cu_stream(),
                self.nodes.as_mut_ptr(),
                self.edges.as_ptr(),
                self.nodes.len(),
                flags,
            )
        }
        .result()
        .map_err(|error| driver("branching of a capture", error))
    }
}

fn read(stream: Arc<CudaStream>) -> Result<Option<Frontier>, DriverError> {
    use sys::CUstreamCaptureStatus as Status;
    let mut capturing = Status::CU_STREAM_CAPTURE_STATUS_NONE;
    let (mut capture, mut graph, mut count) = (0, ptr::null_mut(), 0);
    let (mut nodes, mut edges) = (ptr::null(), ptr::null());
    // SAFETY: the stream is alive, and every place that is written to is of the type that the call writes.
    unsafe {
        sys::cuStreamGetCaptureInfo_v3(
            stream.cu_stream(),
            &raw mut capturing,
            &raw mut capture,
            &raw mut graph,
            &raw mut nodes,
            &raw mut edges,
            &raw mut count,
        )
    }
    .result()?;
    if capturing != Status::CU_STREAM_CAPTURE_STATUS_ACTIVE {
        return Ok(None);
    }
    // SAFETY: of an active capture the call gives lists of so many entries, which live until the stream is
    // used the next time. They are copied before.
    let (nodes, edges) = unsafe { (list(nodes, count), list(edges, count)) };
    Ok(Some(Frontier {
        stream,
        capture,
        nodes,
        edges,
    }))
}

/// A copy of a list of the driver's, which has none where it has no entries.
///
/// # Safety
/// At `start` lie `count` entries, unless it is null.
unsafe fn list<T: Copy>(start: *const T, count: usize) -> Vec<T> {
    if start.is_null() || count == 0 {
        return Vec::new();
    }
    // SAFETY: as the caller says.
    unsafe { std::slice::from_raw_parts(start, count) }.to_vec()
}

fn driver(op: &'static str, error: DriverError) -> Error {
    Error::Driver {
        label: "branches".to_owned(),
        op,
        status: status(error),
    }
}
