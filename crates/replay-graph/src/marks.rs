//! Points in the work of a device, and the time between them.

use std::time::Duration;

use candle_core::Device;

use crate::{Error, Result, device};

/// Points in a device's work, to measure the time between two of them.
///
/// A point that is marked while a graph is captured becomes part of the graph: each launch marks it
/// anew, with the time at which the device gets there. On a CPU a point is the time of the call.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use replay_graph::Marks;
///
/// let device = Device::Cpu;
/// let marks = Marks::new(2, &device)?;
/// marks.mark(0)?;
/// Tensor::ones((64, 64), DType::F32, &device)?.sqr()?;
/// marks.mark(1)?;
/// assert!(marks.between(0, 1)?.as_secs() < 10);
/// # Ok::<(), replay_graph::Error>(())
/// ```
#[derive(Debug)]
pub struct Marks {
    points: Points,
    count: usize,
}

#[derive(Debug)]
enum Points {
    Host(host::Points),
    Device(device::Events),
}

impl Marks {
    /// Points `0..count`, none of them marked. Call it outside captures.
    ///
    /// # Errors
    ///
    /// If the device is neither the CPU nor a CUDA device, there is no memory for so many points, or
    /// the device fails.
    pub fn new(count: usize, device: &Device) -> Result<Self> {
        let points = match device {
            Device::Cpu => Points::Host(host::Points::new(count)?),
            _ => Points::Device(device::Events::new(count, device)?),
        };
        Ok(Self { points, count })
    }

    /// Marks a point after all work that the device has been given, or will be by the graph that is
    /// being captured up to here.
    ///
    /// # Errors
    ///
    /// [`Error::NoMark`] if there is no such point, and what the driver fails with.
    pub fn mark(&self, point: usize) -> Result<()> {
        self.check(point)?;
        match &self.points {
            Points::Host(points) => points.mark(point),
            Points::Device(events) => events.mark(point)?,
        }
        Ok(())
    }

    /// The time from one point to another, zero if the first is the later one. Waits until the device
    /// has got to both.
    ///
    /// # Errors
    ///
    /// [`Error::NoMark`] if one is no point or has not been marked, and what the driver fails with.
    pub fn between(&self, from: usize, to: usize) -> Result<Duration> {
        self.check(from)?;
        self.check(to)?;
        match &self.points {
            Points::Host(points) => points.between(from, to),
            Points::Device(events) => events.between(from, to),
        }
    }

    fn check(&self, point: usize) -> Result<()> {
        if point >= self.count {
            let count = self.count;
            return Err(Error::NoMark { point, count });
        }
        Ok(())
    }
}

mod host {
    use std::sync::{Mutex, MutexGuard, PoisonError};
    use std::time::{Duration, Instant};

    use crate::{Error, Result};

    #[derive(Debug)]
    pub(super) struct Points(Mutex<Vec<Option<Instant>>>);

    impl Points {
        pub(super) fn new(count: usize) -> Result<Self> {
            let mut points = Vec::new();
            let room = points.try_reserve_exact(count);
            room.map_err(|_| Error::TooManyMarks { count })?;
            points.resize(count, None);
            Ok(Self(Mutex::new(points)))
        }

        fn points(&self) -> MutexGuard<'_, Vec<Option<Instant>>> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }

        pub(super) fn mark(&self, point: usize) {
            self.points()[point] = Some(Instant::now());
        }

        pub(super) fn between(&self, from: usize, to: usize) -> Result<Duration> {
            let points = self.points();
            let at = |point: usize| {
                let count = points.len();
                points[point].ok_or(Error::NoMark { point, count })
            };
            Ok(at(to)?.saturating_duration_since(at(from)?))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_points_than_memory_holds_are_refused() {
        for count in [usize::MAX, usize::MAX / 64] {
            let error = Marks::new(count, &Device::Cpu).unwrap_err().to_string();
            assert_eq!(error, format!("no memory for {count} points"));
        }
    }

    #[test]
    fn points_that_are_none_or_were_not_marked() {
        let marks = Marks::new(2, &Device::Cpu).unwrap();
        marks.mark(0).unwrap();
        let text = |result: Result<()>| result.unwrap_err().to_string();
        assert_eq!(
            text(marks.mark(2)),
            "point 2 of 2 is none, or was not marked"
        );
        let between = |from, to| text(marks.between(from, to).map(drop));
        assert_eq!(between(0, 1), "point 1 of 2 is none, or was not marked");
        assert_eq!(between(7, 0), "point 7 of 2 is none, or was not marked");
        marks.mark(1).unwrap();
        assert_eq!(marks.between(1, 0).unwrap(), Duration::ZERO);
    }
}
