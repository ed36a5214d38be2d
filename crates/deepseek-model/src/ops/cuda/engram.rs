//! The engram gate.
#![allow(unsafe_code)]

use candle_core::{DType, Result, Tensor};

use super::launch::{ByAct, blocks, by_act, count, expect, kernel_args, output, run, tensors};

const ENGRAM_GATE: ByAct = by_act!("engram", ENGRAM, "engram_gate");

kernel_args! {
    struct EngramGateArgs {
        streams: u64, key_value: u64, query_weight: u64, key_weight: u64, out: u64,
        n: u32, h: u32, eps: f32, pad: u32,
    }
}

/// As [`crate::ops::engram_gate`].
pub(in crate::ops) fn engram_gate(
    streams: &Tensor,
    key_value: &Tensor,
    query_weight: &Tensor,
    key_weight: &Tensor,
    eps: f64,
) -> Result<Tensor> {
    let op = "engram-gate";
    let (rows, n, h) = streams.dims3()?;
    expect(
        op,
        "key_value",
        key_value,
        streams.dtype(),
        &[rows, (n + 1) * h],
    )?;
    expect(op, "query_weight", query_weight, DType::F32, &[n, h])?;
    expect(op, "key_weight", key_weight, DType::F32, &[n, h])?;
    let out = output(&[rows, n, h], streams.dtype(), streams.device())?;
    let read = [
        ("streams", streams),
        ("key_value", key_value),
        ("query_weight", query_weight),
        ("key_weight", key_weight),
    ];
    let tensors = tensors(op, &read, &[("out", &out)])?;
    let (kernel, grid) = (ENGRAM_GATE.of(streams.dtype())?, blocks(rows * n)?);
    let (n, h) = (count(n)?, count(h)?);
    // SAFETY: a block for each of the rows x n streams; shapes were compared.
    unsafe {
        run(kernel, &tensors, grid, |a| EngramGateArgs {
            streams: a[0],
            key_value: a[1],
            query_weight: a[2],
            key_weight: a[3],
            out: a[4],
            n,
            h,
            eps: eps as f32,
            pad: 0,
        })
    }?;
    Ok(out)
}
