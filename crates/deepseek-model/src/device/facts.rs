//! What the driver says of a machine, and whether the program's kernels can run there.

use replay_graph::DriverStatus;

use super::{
    error::DeviceError,
    target::{KernelTarget, Version},
};

/// What the driver says of a machine and of the GPU that was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Number of the GPU that was asked for.
    pub ordinal: usize,
    /// How the driver started.
    pub started: DriverStatus,
    /// The newest CUDA that the driver supports.
    pub driver_version: Version,
    /// GPUs that the driver shows to the program.
    pub gpus: usize,
    /// The GPU that was asked for, if there is one of that number.
    pub gpu: Option<GpuFacts>,
}

/// What the driver says of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuFacts {
    /// Its name.
    pub name: String,
    /// Its compute capability.
    pub capability: Version,
    /// Its memory, before anything is loaded.
    pub memory: DeviceMemory,
}

/// Memory of a device, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceMemory {
    /// That nobody uses.
    pub free: u64,
    /// All there is.
    pub total: u64,
    /// Most that tensors of this process have taken at once, those that graphs own left out.
    pub peak: u64,
}

const SUCCESS: u32 = 0;
/// The library is there to link against, and has no driver in it.
const STUB_LIBRARY: u32 = 34;
const NO_DEVICE: u32 = 100;

impl DeviceFacts {
    /// Whether kernels of `target` can run there.
    ///
    /// # Errors
    /// The first thing that is in the way: one has to be put right before the next can be judged.
    pub fn check(&self, target: &KernelTarget) -> Result<(), DeviceError> {
        match self.started.code() {
            SUCCESS => {}
            STUB_LIBRARY => return Err(DeviceError::NoDriver),
            NO_DEVICE => return Err(DeviceError::NoGpu),
            _ => {
                return Err(DeviceError::Start {
                    status: self.started,
                });
            }
        }
        let (driver, gpus) = (self.driver_version, self.gpus);
        if let Some(built) = target.cuda.filter(|built| driver < *built) {
            return Err(DeviceError::OldDriver { driver, built });
        }
        if gpus == 0 {
            return Err(DeviceError::NoGpu);
        }
        let Some(gpu) = &self.gpu else {
            let ordinal = self.ordinal;
            return Err(DeviceError::Ordinal { ordinal, gpus });
        };
        match target.arch {
            Some(arch) if !arch.runs_on(gpu.capability) => Err(DeviceError::Capability {
                name: gpu.name.clone(),
                capability: gpu.capability,
                arch,
            }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUILT: &str =
        "// Cuda compilation tools, release 13.0, V13.0.88\n.version 9.0\n.target sm_90a\n";

    fn h200() -> DeviceFacts {
        let memory = DeviceMemory {
            free: 139 << 30,
            total: 140 << 30,
            peak: 0,
        };
        DeviceFacts {
            ordinal: 1,
            started: DriverStatus::new(SUCCESS),
            driver_version: Version::new(13, 0),
            gpus: 2,
            gpu: Some(GpuFacts {
                name: "NVIDIA H200".to_owned(),
                capability: Version::new(9, 0),
                memory,
            }),
        }
    }

    fn refused(change: impl FnOnce(&mut DeviceFacts)) -> String {
        let mut facts = h200();
        change(&mut facts);
        let refused = facts.check(&KernelTarget::of(BUILT));
        refused.unwrap_err().to_string()
    }

    #[test]
    fn what_fits_is_accepted() {
        let target = KernelTarget::of(BUILT);
        assert_eq!(h200().check(&target), Ok(()));
        let mut newer = h200();
        newer.driver_version = Version::new(13, 1);
        assert_eq!(newer.check(&target), Ok(()));
        // Kernels that do not say what they are for are left for the driver to judge.
        newer.driver_version = Version::new(11, 0);
        assert_eq!(newer.check(&KernelTarget::of("")), Ok(()));
    }

    #[test]
    fn what_is_in_the_way_is_said() {
        let status = |code| move |facts: &mut DeviceFacts| facts.started = DriverStatus::new(code);
        insta::assert_snapshot!(refused(status(34)), @"there is no CUDA driver: expected the libcuda.so.1 of an NVIDIA driver, got the toolkit's stand-in, which is for linking only");
        insta::assert_snapshot!(refused(status(100)), @"expected an NVIDIA GPU, the driver finds none (CUDA_VISIBLE_DEVICES can hide them)");
        insta::assert_snapshot!(refused(status(803)), @"the CUDA driver does not start: CUDA status 803: the driver and its library libcuda.so.1 are of different versions");
        insta::assert_snapshot!(refused(|facts| facts.driver_version = Version::new(12, 4)), @"expected a driver for CUDA 13.0, with which the kernels were built, got one for CUDA 12.4 and older: update the driver, or build with a CUDA toolkit of at most that version");
        insta::assert_snapshot!(refused(|facts| { facts.gpus = 0; facts.gpu = None; }), @"expected an NVIDIA GPU, the driver finds none (CUDA_VISIBLE_DEVICES can hide them)");
        insta::assert_snapshot!(refused(|facts| { facts.ordinal = 2; facts.gpu = None; }), @"expected a GPU number below 2, got 2: there are 2 GPUs, numbered from 0");
        insta::assert_snapshot!(refused(|facts| { facts.gpus = 1; facts.gpu = None; }), @"expected a GPU number below 1, got 1: there is 1 GPU, numbered from 0");
        let a100 = |facts: &mut DeviceFacts| {
            let gpu = facts.gpu.as_mut().unwrap();
            (gpu.name, gpu.capability) = ("NVIDIA A100".to_owned(), Version::new(8, 0));
        };
        insta::assert_snapshot!(refused(a100), @"expected a GPU of compute capability 9.0, for which the kernels were built (sm_90a), got NVIDIA A100 of 8.0: build with CUDA_COMPUTE_CAP=80");
    }

    /// An old driver is the cause also where it does not know a new GPU.
    #[test]
    fn the_driver_is_judged_before_the_gpu() {
        let refused = refused(|facts| {
            (facts.driver_version, facts.gpus, facts.gpu) = (Version::new(12, 0), 0, None);
        });
        assert!(refused.starts_with("expected a driver"), "{refused}");
    }
}
