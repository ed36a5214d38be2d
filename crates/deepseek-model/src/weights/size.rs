//! How much memory the weights take, before any is read.

use std::path::Path;

use candle_core::DType;

use super::{
    error::WeightsError,
    load::LoadOptions,
    manifest::{Manifest, Target},
};
use crate::{
    Config, device,
    memory::{Shortage, host},
};

impl Target {
    /// Bytes of the tensor with matrices held as `matrices`; `None` if it cannot be addressed.
    fn bytes(&self, matrices: DType) -> Option<u64> {
        let dtype = if self.always_f32 {
            DType::F32
        } else {
            matrices
        };
        let mut axes = self.shape.iter();
        axes.try_fold(dtype.size_in_bytes() as u64, |bytes, &n| {
            bytes.checked_mul(n as u64)
        })
    }
}

fn sum(manifest: &Manifest, matrices: DType) -> Option<u64> {
    let mut sizes = manifest.targets.iter().map(|target| target.bytes(matrices));
    sizes.try_fold(0_u64, |sum, bytes| sum.checked_add(bytes?))
}

/// Bytes that the weights of a model of this configuration take on its device, with matrices held as
/// `dtype`; `None` if more than can be addressed. The n-gram tables are not among them: they stay in
/// their files.
///
/// # Errors
/// If a field of `config` was set to what no file may hold.
pub fn held_bytes(config: &Config, dtype: DType) -> Result<Option<u64>, WeightsError> {
    config.check_bounds()?;
    // A manifest names each matrix of each expert, which may be more names than there is memory for.
    // Its sum is linear in the number of experts, so two small manifests give it.
    let with = |num_experts| {
        let config = Config {
            num_experts,
            ..config.clone()
        };
        sum(&Manifest::new(&config), dtype)
    };
    let all = |one: u64, two: u64| {
        let others = (config.num_experts as u64).checked_sub(1)?;
        two.checked_sub(one)?.checked_mul(others)?.checked_add(one)
    };
    Ok(with(1).zip(with(2)).and_then(|(one, two)| all(one, two)))
}

/// Refuses tensors that cannot be allocated: the host would end the program, and a device would take
/// most of them before it fails. Only their dtype is ours to choose, their sizes are the
/// checkpoint's.
pub(super) fn check(
    manifest: &Manifest,
    options: &LoadOptions,
    dir: &Path,
) -> Result<(), WeightsError> {
    let all = sum(manifest, options.dtype);
    let on_host = if options.device.is_cpu() {
        all
    } else {
        // The host holds one tensor at a time.
        let mut sizes = manifest.targets.iter().map(|t| t.bytes(options.dtype));
        sizes.try_fold(0, |most: u64, bytes| Some(most.max(bytes?)))
    };
    let on_host = on_host.and_then(|bytes| usize::try_from(bytes).ok());
    let (dir, dtype) = (|| dir.to_owned(), options.dtype);
    let checked = on_host.map_or(Err(Shortage::UNKNOWN), |bytes| host::check(bytes as u64));
    checked.map_err(|shortage| WeightsError::Memory {
        dir: dir(),
        bytes: on_host,
        dtype,
        shortage,
    })?;
    let free = device::memory(&options.device).map_err(Box::new)?;
    let Some(free) = free.map(|memory| memory.free) else {
        return Ok(());
    };
    match all {
        Some(needed) if needed <= free => Ok(()),
        _ => Err(WeightsError::DeviceMemory {
            dir: dir(),
            needed: all.unwrap_or(u64::MAX),
            free,
            dtype,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::Weights;

    #[test]
    fn two_small_manifests_give_the_sum_of_the_whole() {
        for name in ["bf16-s1", "fp4-s1", "engram-s1"] {
            let dir = Path::new("tests/data").join(name);
            let mut config = Config::load(&dir).unwrap();
            for experts in [1, 2, 7, config.num_experts] {
                config.num_experts = experts;
                config.experts_per_token = config.experts_per_token.min(experts);
                for dtype in [DType::F32, DType::BF16] {
                    let whole = sum(&Manifest::new(&config), dtype);
                    assert_eq!(
                        held_bytes(&config, dtype).unwrap(),
                        whole,
                        "{name} {experts}"
                    );
                }
            }
        }
    }

    #[test]
    fn what_is_held_is_what_was_said() {
        for (name, dtype) in [("fp4-s1", DType::F32), ("engram-s1", DType::BF16)] {
            let dir = Path::new("tests/data").join(name);
            let config = Config::load(&dir).unwrap();
            let options = LoadOptions {
                device: candle_core::Device::Cpu,
                dtype,
            };
            let mut weights = Weights::load(&dir, &config, &options, &|_| {}).unwrap();
            let names: Vec<String> = weights.names().into_iter().map(str::to_owned).collect();
            let tensors = names.iter().map(|name| weights.take(name).unwrap());
            let bytes = tensors.map(|t| t.elem_count() * t.dtype().size_in_bytes());
            let held = bytes.sum::<usize>() as u64;
            assert_eq!(held_bytes(&config, dtype).unwrap(), Some(held), "{name}");
        }
    }

    #[test]
    fn too_little_memory_is_said_in_numbers() {
        let error = WeightsError::DeviceMemory {
            dir: "models/large".into(),
            needed: 300 << 30,
            free: 139 << 30,
            dtype: DType::BF16,
        };
        insta::assert_snapshot!(error, @"models/large takes 300 GiB of the device's memory as BF16, expected at most the 139 GiB that are free: 161 GiB are missing");
    }
}
