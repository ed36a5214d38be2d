//! The router.
#![allow(unsafe_code)]

use candle_core::{DType, Result, Tensor};
use replay_cuda::kernel::Kernel;

use super::launch::{count, expect, grid, kernel, kernel_args, output, run, tensors};
use crate::{
    config::{Config, Scoring},
    ops::Faults,
};

const ROUTE: Kernel = kernel!("route", ROUTE, "route");

kernel_args! {
    struct RouteArgs {
        logits: u64, bias: u64, ids: u64, weights: u64, faults: u64,
        experts: u32, k: u32, scoring: u32, normalise: u32, factor: f32, code: u32,
    }
}

/// As [`crate::ops::route`], but a row with too few candidates is reported to `faults`; its other
/// choices are experts of weight 0.
pub(in crate::ops) fn route(
    logits: &Tensor,
    bias: &Tensor,
    config: &Config,
    faults: Faults<'_>,
) -> Result<(Tensor, Tensor)> {
    let op = "route";
    let (rows, experts) = logits.dims2()?;
    let k = config.experts_per_token;
    if k == 0 || k > experts {
        candle_core::bail!("{op}: cannot choose {k} of {experts} experts");
    }
    expect(op, "logits", logits, DType::F32, &[rows, experts])?;
    expect(op, "bias", bias, DType::F32, &[experts])?;
    let (word, code) = faults.target()?;
    expect(op, "faults", word, DType::U32, &[1])?;
    let ids = output(&[rows, k], DType::U32, logits.device())?;
    let weights = output(&[rows, k], DType::F32, logits.device())?;
    let read = [("logits", logits), ("bias", bias)];
    let written = [("ids", &ids), ("weights", &weights), ("faults", word)];
    let tensors = tensors(op, &read, &written)?;
    let grid = grid(rows, 32, (2 * experts + k) * size_of::<f32>())?;
    let (experts, k) = (count(experts)?, count(k)?);
    // SAFETY: one block of one warp per row of all tensors, whose shapes were compared; shared memory
    // for two values of each expert and k numbers; k is 1 to the number of experts.
    unsafe {
        run(ROUTE, &tensors, grid, |a| RouteArgs {
            logits: a[0],
            bias: a[1],
            ids: a[2],
            weights: a[3],
            faults: a[4],
            experts,
            k,
            scoring: match config.scoring {
                Scoring::SqrtSoftplus => 0,
                Scoring::Sigmoid => 1,
                Scoring::Softmax => 2,
            },
            normalise: u32::from(config.norm_topk_prob && k > 1),
            factor: config.routed_scaling_factor as f32,
            code,
        })
    }?;
    Ok((ids, weights))
}
