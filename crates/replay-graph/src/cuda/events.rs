//! Events as points in time, which graphs may mark too.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use candle_core::Device;
use candle_core::cuda_backend::cudarc::driver::{
    CudaEvent, CudaStream, DriverError, sys::CUevent_flags,
};

use super::{capture::cuda_device, evidence::status, raw};
use crate::{Error, Result};

pub(crate) struct Events {
    stream: Arc<CudaStream>,
    points: Vec<CudaEvent>,
    /// Which have been marked, or captured.
    marked: Vec<AtomicBool>,
}

impl Events {
    pub(crate) fn new(count: usize, device: &Device) -> Result<Self> {
        let stream = cuda_device(device)?.cuda_stream();
        let event = |_| {
            let event = stream
                .context()
                .new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
            event.map_err(|error| driver("making an event", error))
        };
        Ok(Self {
            points: (0..count).map(event).collect::<Result<_>>()?,
            marked: (0..count).map(|_| AtomicBool::new(false)).collect(),
            stream,
        })
    }

    pub(crate) fn mark(&self, point: usize) -> Result<()> {
        raw::record(&self.points[point], &self.stream)
            .map_err(|error| driver("recording an event", error))?;
        self.marked[point].store(true, Ordering::Relaxed);
        Ok(())
    }

    pub(crate) fn between(&self, from: usize, to: usize) -> Result<Duration> {
        for point in [from, to] {
            if !self.marked[point].load(Ordering::Relaxed) {
                let count = self.marked.len();
                return Err(Error::NoMark { point, count });
            }
        }
        let elapsed = self.points[from].elapsed_ms(&self.points[to]);
        let ms = elapsed.map_err(|error| driver("reading events", error))?;
        Ok(Duration::from_secs_f32(ms.max(0.0) / 1e3))
    }
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Events")
            .field("marked", &self.marked)
            .finish_non_exhaustive()
    }
}

fn driver(op: &'static str, error: DriverError) -> Error {
    Error::Driver {
        label: "marks".to_owned(),
        op,
        status: status(error),
    }
}
