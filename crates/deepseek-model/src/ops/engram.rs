//! The engram gate: how much of a looked-up value each stream takes.

use candle_core::{Result, Tensor};
use rayon::prelude::*;

use super::{
    Act, cuda, f32s,
    fp::{inverse_rms, sigmoid},
    from_f32s,
    view::ROWS_PER_TASK,
};

/// `S'[j] = S[j] + gate_j · value`, `[rows, n, h]`.
///
/// `streams` is `[rows, n, h]`; `key_value` is `[rows, n · h + h]`, one key per stream and one
/// value; `query_weight` and `key_weight` are `[n, h]`.
pub(crate) fn engram_gate(
    streams: &Tensor,
    key_value: &Tensor,
    query_weight: &Tensor,
    key_weight: &Tensor,
    eps: f64,
    act: Act,
) -> Result<Tensor> {
    if streams.device().is_cuda() {
        return cuda::engram_gate(streams, key_value, query_weight, key_weight, eps);
    }
    let (rows, n, h) = streams.dims3()?;
    let (values, key_value) = (f32s(streams)?, f32s(key_value)?);
    let (query_weight, key_weight) = (f32s(query_weight)?, f32s(key_weight)?);
    let weight: Vec<f32> = query_weight
        .iter()
        .zip(key_weight.iter())
        .map(|(q, k)| q * k)
        .collect();
    let mut out = vec![0f32; rows * n * h];
    out.par_chunks_mut(n * h)
        .zip(
            values
                .par_chunks(n * h)
                .zip(key_value.par_chunks((n + 1) * h)),
        )
        .with_min_len(ROWS_PER_TASK)
        .for_each(|(out, (streams, key_value))| {
            let (keys, value) = key_value.split_at(n * h);
            for j in 0..n {
                let part = j * h..(j + 1) * h;
                let (stream, key) = (&streams[part.clone()], &keys[part.clone()]);
                let gate = gate(stream, key, &weight[part.clone()], eps as f32);
                for ((out, s), v) in out[part].iter_mut().zip(stream).zip(value) {
                    *out = act.store(s + gate * v);
                }
            }
        });
    from_f32s(out, (rows, n, h))
}

/// `sigmoid(± sqrt(max(|dot|, 1e-6)))` of the weighted product of the two normalised vectors.
fn gate(stream: &[f32], key: &[f32], weight: &[f32], eps: f32) -> f32 {
    let product: f32 = stream
        .iter()
        .zip(key)
        .zip(weight)
        .map(|((s, k), w)| s * w * k)
        .sum();
    let dot =
        product * (inverse_rms(stream, eps) * inverse_rms(key, eps)) / (stream.len() as f32).sqrt();
    // Not `f32::max`, which would make a number of NaN.
    let size = if dot.abs() < 1e-6 { 1e-6 } else { dot.abs() };
    sigmoid(size.sqrt().copysign(dot))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The least size of a product is no number to put in the place of one that is none.
    #[test]
    fn a_stream_or_key_that_overflows_has_no_gate() {
        let (plain, large) = ([1.0; 64], [1.5e19; 64]);
        for (stream, key) in [(&large, &plain), (&plain, &large)] {
            assert!(gate(stream, key, &[1.0; 64], 1e-20).is_nan());
        }
        let least = gate(&[0.0; 64], &plain, &[1.0; 64], 1e-20);
        assert!((least - sigmoid(1e-3)).abs() < 1e-6);
    }
}
