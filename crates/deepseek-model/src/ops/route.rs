//! The router: which experts a row goes to, and with what weight.

use candle_core::{Device, Result, Tensor};

use super::{
    Faults, cuda, f32s,
    fp::{sigmoid, softplus},
    from_f32s,
    topk::sort_best,
};
use crate::config::{Config, Scoring};

/// Chosen experts `[rows, k]` (u32) and their weights `[rows, k]` (f32).
///
/// `logits` is `[rows, E]`; `bias` `[E]` takes part in the choice but not in the weights.
pub(crate) fn route(
    logits: &Tensor,
    bias: &Tensor,
    config: &Config,
    faults: Faults<'_>,
) -> Result<(Tensor, Tensor)> {
    if logits.device().is_cuda() {
        return cuda::route(logits, bias, config, faults);
    }
    let (rows, experts) = logits.dims2()?;
    let (logits, bias) = (f32s(logits)?, f32s(bias)?);
    let k = config.experts_per_token;
    let (mut ids, mut weights) = (Vec::with_capacity(rows * k), Vec::with_capacity(rows * k));
    let (mut scores, mut pairs) = (vec![0f32; experts], Vec::with_capacity(experts));
    for row in logits.chunks_exact(experts) {
        score(&mut scores, row, config.scoring);
        pairs.clear();
        pairs.extend(
            scores
                .iter()
                .zip(bias.iter())
                .zip(0u32..)
                .map(|((s, b), e)| (s + b, e)),
        );
        sort_best(&mut pairs, k);
        if pairs.len() < k {
            candle_core::bail!(
                "router chose {} of {k} experts: its logits are not finite",
                pairs.len()
            );
        }
        let sum: f32 = pairs.iter().map(|&(_, e)| scores[e as usize]).sum();
        let divisor = if config.norm_topk_prob && k > 1 {
            sum + 1e-20
        } else {
            1.0
        };
        for &(_, e) in &pairs {
            ids.push(e);
            weights.push(scores[e as usize] / divisor * config.routed_scaling_factor as f32);
        }
    }
    Ok((
        Tensor::from_vec(ids, (rows, k), &Device::Cpu)?,
        from_f32s(weights, (rows, k))?,
    ))
}

fn score(scores: &mut [f32], logits: &[f32], scoring: Scoring) {
    let pairs = scores.iter_mut().zip(logits);
    match scoring {
        Scoring::SqrtSoftplus => pairs.for_each(|(s, x)| *s = softplus(*x).sqrt()),
        Scoring::Sigmoid => pairs.for_each(|(s, x)| *s = sigmoid(*x)),
        Scoring::Softmax => {
            let top = logits.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
            pairs.for_each(|(s, x)| *s = (x - top).exp());
            let inv = 1.0 / scores.iter().sum::<f32>();
            scores.iter_mut().for_each(|s| *s *= inv);
        }
    }
}
