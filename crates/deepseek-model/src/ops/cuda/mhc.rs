//! Hyper-connections.
#![allow(unsafe_code)]

use candle_core::{DType, Result, Tensor};

use super::launch::{ByAct, blocks, by_act, count, expect, kernel_args, output, run, tensors};
use crate::ops::{Act, Mix, mhc::MAX_STREAMS};

const MIX: ByAct = by_act!("mhc", MHC, "mix");
const EXPAND: ByAct = by_act!("mhc", MHC, "expand");

kernel_args! {
    struct MixArgs {
        raw: u64, streams: u64, base: u64, scale: u64, pre: u64, post_comb: u64,
        n: u32, width: u32, iterations: u32, eps: f32, norm_eps: f32, pad: u32,
    }
}

/// As [`crate::ops::mix`].
pub(in crate::ops) fn mix(site: &Mix, streams: &Tensor) -> Result<(Tensor, Tensor)> {
    let op = "mix";
    let (rows, n, h) = streams.dims3()?;
    let (width, device) = (n * h, streams.device());
    if n > MAX_STREAMS {
        candle_core::bail!("{op}: expected at most {MAX_STREAMS} streams, got {n}");
    }
    let flat = streams.flatten_from(1)?;
    let raw = site.project.forward(&flat, Act::F32)?;
    expect(op, "raw", &raw, DType::F32, &[rows, (2 + n) * n])?;
    expect(op, "base", &site.base, DType::F32, &[(2 + n) * n])?;
    expect(op, "scale", &site.scale, DType::F32, &[3])?;
    let pre = output(&[rows, n], DType::F32, device)?;
    let post_comb = output(&[rows, n + n * n], DType::F32, device)?;
    let read = [
        ("raw", &raw),
        ("streams", streams),
        ("base", &site.base),
        ("scale", &site.scale),
    ];
    let tensors = tensors(op, &read, &[("pre", &pre), ("post_comb", &post_comb)])?;
    let kernel = MIX.of(streams.dtype())?;
    let (n, width, iterations) = (count(n)?, count(width)?, count(site.iterations)?);
    // SAFETY: one block per row of all tensors, whose shapes were compared; n is at most
    // MAX_STREAMS, so a block has a thread for each of the n n cells.
    unsafe {
        run(kernel, &tensors, blocks(rows)?, |a| MixArgs {
            raw: a[0],
            streams: a[1],
            base: a[2],
            scale: a[3],
            pre: a[4],
            post_comb: a[5],
            n,
            width,
            iterations,
            eps: site.eps as f32,
            norm_eps: site.norm_eps as f32,
            pad: 0,
        })
    }?;
    Ok((pre, post_comb))
}

kernel_args! {
    struct ExpandArgs { y: u64, streams: u64, post_comb: u64, out: u64, n: u32, h: u32 }
}

/// As [`crate::ops::expand`].
pub(in crate::ops) fn expand(y: &Tensor, streams: &Tensor, post_comb: &Tensor) -> Result<Tensor> {
    let op = "expand";
    let (rows, n, h) = streams.dims3()?;
    if n > MAX_STREAMS {
        candle_core::bail!("{op}: expected at most {MAX_STREAMS} streams, got {n}");
    }
    expect(op, "y", y, streams.dtype(), &[rows, h])?;
    expect(op, "post_comb", post_comb, DType::F32, &[rows, n + n * n])?;
    let out = output(&[rows, n, h], streams.dtype(), streams.device())?;
    let read = [("y", y), ("streams", streams), ("post_comb", post_comb)];
    let tensors = tensors(op, &read, &[("out", &out)])?;
    let (kernel, n, h) = (EXPAND.of(streams.dtype())?, count(n)?, count(h)?);
    // SAFETY: one block per row of all tensors, whose shapes were compared.
    unsafe {
        run(kernel, &tensors, blocks(rows)?, |a| ExpandArgs {
            y: a[0],
            streams: a[1],
            post_comb: a[2],
            out: a[3],
            n,
            h,
        })
    }?;
    Ok(out)
}
