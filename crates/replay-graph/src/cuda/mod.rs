//! Capture on a CUDA device, through cudarc.

mod address;
mod capture;
mod events;
mod evidence;
mod frontier;
mod guards;
mod raw;

pub(crate) use address::address;
pub use capture::{DeviceCapture, DeviceSegment};
pub(crate) use events::Events;
pub(crate) use frontier::Frontier;
