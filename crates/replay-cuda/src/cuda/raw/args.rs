//! The arguments of the kernels, which are passed by value.
//!
//! The structs are those of the kernels' sources, field by field; these say of every address whether
//! it is the host's or the device's, how long it is and how it is aligned.

use candle_core::cuda_backend::cudarc::driver::DeviceRepr;

/// The most tensors of one launch of a row copy; `MAX_COPIES` of the kernels.
pub(in crate::cuda) const MAX_COPIES: usize = 32;

/// One tensor's part of a row copy.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::cuda) struct RowCopy {
    pub(in crate::cuda) src: u64,
    pub(in crate::cuda) dst: u64,
    pub(in crate::cuda) src_rows: u32,
    pub(in crate::cuda) dst_rows: u32,
    pub(in crate::cuda) n_rows: u32,
    pub(in crate::cuda) row_units: u32,
    pub(in crate::cuda) unit_log2: u32,
    pub(in crate::cuda) first_tile: u32,
    pub(in crate::cuda) tiles_per_row: u32,
    pub(in crate::cuda) tile_units: u32,
    pub(in crate::cuda) rows_per_tile: u32,
    pub(in crate::cuda) pad: u32,
}

/// The argument of the row copies.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::cuda) struct CopyArgs {
    pub(in crate::cuda) copies: [RowCopy; MAX_COPIES],
    pub(in crate::cuda) rows: u64,
    pub(in crate::cuda) n_list: u32,
    pub(in crate::cuda) n_copies: u32,
}

/// What one layer does.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) struct Rule {
    pub(in crate::cuda) policy: u32,
    pub(in crate::cuda) trims: u32,
    pub(in crate::cuda) is_cut: u32,
    pub(in crate::cuda) running: u32,
    pub(in crate::cuda) entering: u32,
    pub(in crate::cuda) relative: u32,
    pub(in crate::cuda) sampled: u32,
    pub(in crate::cuda) pad: u32,
}

/// The argument of `replay_rows`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct ReplayArgs {
    /// The twelve lists, in the order of the kernel's struct.
    pub(in crate::cuda) lists: [u64; 12],
    pub(in crate::cuda) n_requests: u32,
    pub(in crate::cuda) out_requests: u32,
    pub(in crate::cuda) n_batch_rows: u32,
    pub(in crate::cuda) max_rows: u32,
    pub(in crate::cuda) position_log2: u32,
    pub(in crate::cuda) slot_log2: u32,
    pub(in crate::cuda) rule: Rule,
}

/// The most lists of one launch of `pad_rebuilt_slots`; `MAX_LISTS` of the kernels.
pub(in crate::cuda) const MAX_LISTS: usize = 16;

/// The argument of `pad_rebuilt_slots`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::cuda) struct PadArgs {
    pub(in crate::cuda) lists: [u64; MAX_LISTS],
    pub(in crate::cuda) log2_bytes: [u32; MAX_LISTS],
    pub(in crate::cuda) query_start_loc: u64,
    pub(in crate::cuda) seq_lens: u64,
    pub(in crate::cuda) replay_starts: u64,
    pub(in crate::cuda) n_lists: u32,
    pub(in crate::cuda) n_requests: u32,
    pub(in crate::cuda) n_rows: u32,
    pub(in crate::cuda) window: u32,
}

// The sizes that the kernels assert of their own structs.
const _: () = assert!(size_of::<CopyArgs>() == 1808);
const _: () = assert!(size_of::<ReplayArgs>() == 152);
const _: () = assert!(size_of::<PadArgs>() == 232);

// SAFETY: each is a C struct of numbers without padding, of the layout that its kernel declares
// (sizes are asserted on both sides), so it may be passed by value.
unsafe impl DeviceRepr for CopyArgs {}
// SAFETY: as above.
unsafe impl DeviceRepr for ReplayArgs {}
// SAFETY: as above.
unsafe impl DeviceRepr for PadArgs {}
