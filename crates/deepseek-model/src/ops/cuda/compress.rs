//! The compressor's pooling.
#![allow(unsafe_code)]

use candle_core::{DType, Result, Tensor};

use super::launch::{ByAct, blocks, by_act, count, expect, kernel_args, output, run, tensors};
use crate::{
    cache::RowRing,
    ops::{Act, compress::ClosedGroups},
    rows::Rows,
};

const CLOSE_GROUPS: ByAct = by_act!("compress", COMPRESS, "close_groups");

kernel_args! {
    struct CloseGroupsArgs {
        keys: u64, gates: u64, old_keys: u64, old_gates: u64, spans: u64, groups: u64, out: u64,
        requests: u32, rows: u32, ring_rows: u32, capacity: u32, ratio: u32, width: u32,
    }
}

/// As [`crate::ops::close_groups`].
pub(in crate::ops) fn close_groups(
    groups: &ClosedGroups,
    ratio: usize,
    rows: &Rows,
    keys: (&Tensor, &RowRing),
    gates: (&Tensor, &RowRing),
    act: Act,
) -> Result<Tensor> {
    let op = "close-groups";
    let (device, (n_rows, width)) = (keys.0.device(), keys.0.dims2()?);
    let (ring_rows, capacity) = (keys.1.data().dim(0)?, keys.1.capacity());
    expect(op, "keys", keys.0, DType::F32, &[n_rows, width])?;
    expect(op, "gates", gates.0, DType::F32, &[n_rows, width])?;
    let (old_keys, old_gates) = (keys.1.data(), gates.1.data());
    expect(op, "old_keys", old_keys, DType::F32, &[ring_rows, width])?;
    expect(op, "old_gates", old_gates, DType::F32, &[ring_rows, width])?;
    if capacity != gates.1.capacity() || !ring_rows.is_multiple_of(capacity) {
        candle_core::bail!("{op}: expected rings of one capacity, whole slots of it");
    }
    if groups.is_empty() {
        return output(&[0, width], act.dtype(), device);
    }
    let list = &groups.on_device(device)?.entries;
    let n_groups = list.dim(0)?;
    expect(op, "groups", list, DType::U32, &[n_groups, 2])?;
    let out = output(&[n_groups, width], act.dtype(), device)?;
    let spans = &rows.on_device()?.spans;
    let requests = spans.dims2()?.0;
    expect(op, "spans", spans, DType::U32, &[requests, 4])?;
    let read = [
        ("keys", keys.0),
        ("gates", gates.0),
        ("old_keys", old_keys),
        ("old_gates", old_gates),
        ("spans", spans),
        ("groups", list),
    ];
    let tensors = tensors(op, &read, &[("out", &out)])?;
    let kernel = CLOSE_GROUPS.of(out.dtype())?;
    let (requests, n_rows, width) = (count(requests)?, count(n_rows)?, count(width)?);
    let (ring_rows, capacity, ratio) = (count(ring_rows)?, count(capacity)?, count(ratio)?);
    // SAFETY: one block per group, whose channels are as many as those of all other tensors; the
    // kernel compares requests and rows with the counts, which are those of the tensors.
    unsafe {
        run(kernel, &tensors, blocks(n_groups)?, |a| CloseGroupsArgs {
            keys: a[0],
            gates: a[1],
            old_keys: a[2],
            old_gates: a[3],
            spans: a[4],
            groups: a[5],
            out: a[6],
            requests,
            rows: n_rows,
            ring_rows,
            capacity,
            ratio,
            width,
        })
    }?;
    Ok(out)
}
