//! Stands in for the driver in a build without the feature `cuda`.

use candle_core::Device;

use super::{DeviceError, DeviceFacts, DeviceMemory};
use crate::Result;

pub(super) fn gather(_: usize) -> Result<(DeviceFacts, ())> {
    Err(DeviceError::NotCompiled.into())
}

pub(super) fn reset_peak(_: &Device) -> Result<()> {
    Err(DeviceError::NotCompiled.into())
}

pub(super) fn memory(_: &Device) -> Result<DeviceMemory> {
    Err(DeviceError::NotCompiled.into())
}
