//! Stands in for the driver in a build without the feature `cuda`: every capture is refused.

use std::time::Duration;

use candle_core::{CudaStorage, Device};

use crate::{Backend, CaptureOptions, DeviceMemory, Error, NodeCounts, Result, Segment, StreamKey};

/// Captures on a CUDA device. There is none in this build.
#[derive(Debug)]
pub enum DeviceCapture {}

/// A segment captured on a CUDA device. There is none in this build.
#[derive(Debug)]
pub enum DeviceSegment {}

impl Backend for DeviceCapture {
    type Target = Device;
    type Segment = DeviceSegment;

    fn stream(device: &Device) -> Result<StreamKey> {
        Err(refused(device))
    }

    fn open(device: &Device, _: &CaptureOptions) -> Result<Self> {
        Err(refused(device))
    }

    fn begin(&mut self) -> Result<()> {
        match *self {}
    }

    fn end(&mut self, _: u32) -> Result<DeviceSegment> {
        match *self {}
    }

    fn abort(&mut self) {
        match *self {}
    }

    fn settle(&mut self) {
        match *self {}
    }

    fn memory(&self) -> Result<DeviceMemory> {
        match *self {}
    }

    fn trim(device: &Device) -> Result<()> {
        Err(refused(device))
    }
}

impl Segment for DeviceSegment {
    fn launch(&self) -> Result<()> {
        match *self {}
    }

    fn nodes(&self) -> NodeCounts {
        match *self {}
    }
}

pub(crate) fn address(_: &CudaStorage) -> Result<u64> {
    Err(Error::NoCuda)
}

/// Points in the work of a CUDA device. There is none in this build.
#[derive(Debug)]
pub(crate) enum Events {}

impl Events {
    pub(crate) fn new(_: usize, device: &Device) -> Result<Self> {
        Err(refused(device))
    }

    pub(crate) fn mark(&self, _: usize) -> Result<()> {
        match *self {}
    }

    pub(crate) fn between(&self, _: usize, _: usize) -> Result<Duration> {
        match *self {}
    }
}

/// What the next node of a capture will depend on. Nothing is captured in this build.
#[derive(Debug)]
pub(crate) enum Frontier {}

impl Frontier {
    #[allow(clippy::unnecessary_wraps, reason = "with CUDA the driver may fail")]
    pub(crate) const fn of(_: &Device) -> Result<Option<Self>> {
        Ok(None)
    }

    pub(crate) fn go_back(self) -> Result<()> {
        match self {}
    }

    pub(crate) fn wait_as_well(self) -> Result<()> {
        match self {}
    }
}

fn refused(device: &Device) -> Error {
    match device {
        Device::Cuda(_) => Error::NoCuda,
        other => Error::NoGraphs {
            device: format!("{:?}", other.location()),
        },
    }
}
