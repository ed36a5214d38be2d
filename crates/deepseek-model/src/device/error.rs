//! Why a GPU cannot be used.

use replay_graph::DriverStatus;

use super::target::{Arch, Version};

/// Why a GPU cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The program has no kernels for GPUs.
    #[error("this program was built without CUDA: build it with --features cuda")]
    NotCompiled,
    /// The library that was loaded as the driver's is there to link against only.
    #[error(
        "there is no CUDA driver: expected the libcuda.so.1 of an NVIDIA driver, got the toolkit's \
         stand-in, which is for linking only"
    )]
    NoDriver,
    /// The driver does not start.
    #[error("the CUDA driver does not start: {status}")]
    Start {
        /// What it says.
        status: DriverStatus,
    },
    /// The driver is older than the kernels.
    #[error(
        "expected a driver for CUDA {built}, with which the kernels were built, got one for CUDA \
         {driver} and older: update the driver, or build with a CUDA toolkit of at most that version"
    )]
    OldDriver {
        /// The newest CUDA that the driver supports.
        driver: Version,
        /// The CUDA of the kernels.
        built: Version,
    },
    /// There is no GPU.
    #[error("expected an NVIDIA GPU, the driver finds none (CUDA_VISIBLE_DEVICES can hide them)")]
    NoGpu,
    /// There is no GPU of that number.
    #[error(
        "expected a GPU number below {gpus}, got {ordinal}: there {} {gpus} GPU{}, numbered from 0",
        if *gpus == 1 { "is" } else { "are" },
        if *gpus == 1 { "" } else { "s" }
    )]
    Ordinal {
        /// The number asked for.
        ordinal: usize,
        /// How many there are.
        gpus: usize,
    },
    /// The GPU does not run kernels of that architecture.
    #[error(
        "expected a GPU of compute capability {}, for which the kernels were built ({arch}), got {name} \
         of {capability}: build with CUDA_COMPUTE_CAP={}{}",
        arch.gpus(),
        capability.major,
        capability.minor
    )]
    Capability {
        /// The GPU's name.
        name: String,
        /// What it has.
        capability: Version,
        /// What the kernels were built for.
        arch: Arch,
    },
    /// Other programs hold its memory.
    #[error(
        "GPU {ordinal} has no memory left for what CUDA itself takes, some 600 MiB: other programs hold it \
         (nvidia-smi lists them)"
    )]
    NoMemory {
        /// The GPU's number.
        ordinal: usize,
    },
    /// The driver fails at something else.
    #[error("{what} GPU {ordinal}: {status}")]
    Driver {
        /// What was asked of it.
        what: &'static str,
        /// Number of the GPU.
        ordinal: usize,
        /// What it says.
        status: DriverStatus,
    },
}
