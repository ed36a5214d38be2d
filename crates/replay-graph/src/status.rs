//! Status codes of the driver.

use std::fmt;

/// A status code of the CUDA driver.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DriverStatus(u32);

impl DriverStatus {
    /// A status with the driver's number.
    pub const fn new(code: u32) -> Self {
        Self(code)
    }

    /// The driver's number.
    pub const fn code(self) -> u32 {
        self.0
    }

    const fn name(self) -> Option<&'static str> {
        Some(match self.0 {
            0 => "success",
            1 => "invalid value",
            2 => "out of memory",
            3 => "not initialized",
            4 => "shutting down",
            46 => "the GPU is busy or not available",
            101 => "no such device",
            201 => "invalid context",
            304 => {
                "the operating system refused a call, as it does at a limit (ulimit) of open files or addresses"
            }
            400 => "invalid handle",
            401 => "illegal state",
            500 => "not found",
            600 => "not ready",
            700 => "illegal address",
            701 => "launch out of resources",
            702 => "launch timeout",
            716 => "misaligned address",
            719 => "launch failed",
            800 => "not permitted",
            801 => "not supported",
            900 => "not permitted when the stream is capturing",
            901 => "an earlier error ended the capture",
            902 => "merge of two captures",
            903 => "the capture was not begun here",
            904 => "work of another stream was not joined",
            905 => "dependence on work outside the capture",
            906 => "implicit dependence on the default stream",
            907 => "operation on a captured event",
            908 => "capture ended from another thread",
            802 => "the system is not ready yet",
            803 => "the driver and its library libcuda.so.1 are of different versions",
            804 => "the library libcuda.so.1 is too new for the driver and this GPU",
            999 => "unknown error",
            _ => return None,
        })
    }
}

impl fmt::Display for DriverStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "CUDA status {}: {name}", self.0),
            None => write!(f, "CUDA status {}", self.0),
        }
    }
}

impl fmt::Debug for DriverStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DriverStatus({})", self.0)
    }
}
