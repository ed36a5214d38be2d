//! The compressor's pooling, on pending rings that hold NaN wherever nothing may be read.

use candle_core::{DType, Device};

use super::{ACTS, Draw, Sparse, assert_close, gpu, plain};
use crate::{
    cache::RowRing,
    ops::{Act, ClosedGroups, close_groups},
    rows::Rows,
};

/// `(slot, first position, rows)`: a first chunk, a later one that completes a group begun before, a
/// decode row that completes one, a decode row that does not, and a request without rows.
const REQUESTS: [(usize, usize, usize); 5] =
    [(3, 0, 25), (0, 37, 14), (4, 11, 1), (1, 12, 1), (2, 5, 0)];

/// A ring of 6 slots, whose rows of earlier steps that an open group needs are numbers.
fn pending(ratio: usize, width: usize, draw: &mut Draw) -> Sparse {
    let mut ring = Sparse::new(6 * ratio, width);
    for (slot, first, _) in REQUESTS {
        for pos in first / ratio * ratio..first {
            ring.draw(slot * ratio + pos % ratio, || 4.0 * draw.value(Act::F32));
        }
    }
    ring
}

fn ring(device: &Device, ratio: usize, width: usize, content: &Sparse) -> RowRing {
    let ring = RowRing::new(6, ratio, width, (DType::F32, device)).unwrap();
    let content = plain(device, &content.tensor());
    ring.data().slice_set(&content, 0, 0).unwrap();
    ring
}

#[test]
fn gpu_pooling_of_closed_groups() {
    let (device, mut draw) = (gpu(), Draw::new());
    for (act, tolerance) in ACTS {
        for (ratio, width) in [(2, 512), (4, 40), (3, 31), (2, 300)] {
            let rows = |device: &Device| Rows::pack(device, REQUESTS);
            let (here, there) = (rows(&Device::Cpu), rows(&device));
            let groups = ClosedGroups::of(&here, ratio);
            assert!(groups.entries.len() >= 10);
            let keys = draw.values(&[here.len(), width], Act::F32);
            let gates = (draw.values(&[here.len(), width], Act::F32) * 4.0).unwrap();
            let old_keys = pending(ratio, width, &mut draw);
            let old_gates = pending(ratio, width, &mut draw);
            let pool = |device: &Device, rows: &Rows| {
                close_groups(
                    &groups,
                    ratio,
                    rows,
                    (
                        &plain(device, &keys),
                        &ring(device, ratio, width, &old_keys),
                    ),
                    (
                        &plain(device, &gates),
                        &ring(device, ratio, width, &old_gates),
                    ),
                    act,
                )
                .unwrap()
            };
            let (got, expected) = (pool(&device, &there), pool(&Device::Cpu, &here));
            assert_close("pooled", &got, &expected, tolerance);
        }
    }
}

#[test]
fn gpu_no_group_closes() {
    let (device, mut draw) = (gpu(), Draw::new());
    let rows = Rows::pack(&device, [(0, 4, 1)]);
    let x = plain(&device, &draw.values(&[1, 8], Act::F32));
    let pending = RowRing::new(1, 2, 8, (DType::F32, &device)).unwrap();
    let (groups, x) = (ClosedGroups::of(&rows, 2), (&x, &pending));
    let pooled = close_groups(&groups, 2, &rows, x, x, Act::F32).unwrap();
    assert_eq!(pooled.dims(), [0, 8]);
}
