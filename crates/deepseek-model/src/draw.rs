//! Random values, drawn where a tensor lies.

use candle_core::{DType, Device, Result, Tensor};

use crate::pcg::{Pcg64, SeedSequence};

/// Values drawn at a time: in f32, before they are rounded to the tensor's dtype, so that a tensor of
/// gigabytes takes little beside itself. Even, as the device's generator wants it.
const PIECE: usize = 32 << 20;

/// Fills tensors with random values. The same seed gives the same values on the same kind of device.
#[derive(Debug)]
pub(crate) struct Draw {
    /// On the CPU, whose generator candle cannot seed. A device draws with its own.
    host: Option<Pcg64>,
}

impl Draw {
    pub(crate) fn new(device: &Device, seed: u64) -> Result<Self> {
        if device.is_cpu() {
            return Ok(Self {
                host: Some(Pcg64::new(&SeedSequence::new(seed))),
            });
        }
        device.set_seed(seed)?;
        Ok(Self { host: None })
    }

    /// A new tensor of values of this mean and standard deviation.
    pub(crate) fn tensor(
        &mut self,
        shape: &[usize],
        dtype: DType,
        device: &Device,
        (mean, deviation): (f64, f64),
    ) -> Result<Tensor> {
        if deviation == 0.0 {
            return Tensor::full(mean as f32, shape, device)?.to_dtype(dtype);
        }
        let tensor = Tensor::zeros(shape, dtype, device)?;
        self.fill(&tensor, (mean, deviation))?;
        Ok(tensor)
    }

    /// Overwrites a contiguous tensor: normal values on a device, uniform ones on the CPU.
    pub(crate) fn fill(&mut self, tensor: &Tensor, (mean, deviation): (f64, f64)) -> Result<()> {
        let flat = tensor.flatten_all()?;
        let (count, device) = (flat.elem_count(), tensor.device());
        for first in (0..count).step_by(PIECE) {
            let n = PIECE.min(count - first);
            let piece = match &mut self.host {
                Some(host) => Tensor::from_vec(uniform(host, n, (mean, deviation)), n, device)?,
                None => Tensor::randn(mean as f32, deviation as f32, n, device)?,
            };
            flat.slice_set(&piece.to_dtype(tensor.dtype())?, 0, first)?;
        }
        Ok(())
    }
}

fn uniform(host: &mut Pcg64, n: usize, (mean, deviation): (f64, f64)) -> Vec<f32> {
    // A uniform value between -1 and 1 has a variance of 1/3.
    let half_width = deviation * 3f64.sqrt();
    let values = (0..n).map(|_| mean + half_width * (2.0 * host.unit() - 1.0));
    values.map(|value| value as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_the_moments_asked_for() {
        let drawn = |seed| {
            let mut draw = Draw::new(&Device::Cpu, seed).unwrap();
            let tensor = draw.tensor(&[100, 101], DType::BF16, &Device::Cpu, (1.0, 0.5));
            let values = tensor.unwrap().to_dtype(DType::F32).unwrap();
            values.flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        let values = drawn(1);
        let n = values.len() as f32;
        let mean = values.iter().sum::<f32>() / n;
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / n;
        assert!((mean - 1.0).abs() < 0.02, "{mean}");
        assert!((variance.sqrt() - 0.5).abs() < 0.02, "{variance}");
        assert_eq!(values, drawn(1));
        assert_ne!(values, drawn(2));
    }
}
