//! The numerical operations of the model, each a function on candle tensors.
//!
//! These are the CPU implementations, and the oracle for CUDA devices: a function whose tensors lie
//! there goes to `cuda`. On a CPU every tensor is f32, and [`Act::Bf16`] rounds to bf16 at the places
//! where the released runtime stores bf16; a device holds activations in bf16 then.

mod act;
mod attention;
mod compress;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "cuda_absent.rs"]
mod cuda;
mod embed;
mod engram;
mod experts;
mod faults;
mod few;
mod fp;
mod gemm;
mod index;
mod linear;
mod mhc;
mod norm;
mod rope;
mod round;
mod route;
mod scatter;
mod topk;
mod view;

pub(crate) use act::Act;
pub(crate) use attention::{EntryKeys, KvStart, WindowKeys, attention};
pub(crate) use compress::{ClosedGroups, DeviceGroups, close_groups};
pub(crate) use cuda::kernel_text;
pub(crate) use embed::embed;
pub(crate) use engram::engram_gate;
pub(crate) use experts::{Experts, SortedChoices, routed_experts, sort_choices, swiglu};
pub use faults::Site;
pub(crate) use faults::{FaultWord, Faults};
pub(crate) use index::{Choice, IndexKeys, IndexQueries, Level, choose_entries};
pub(crate) use linear::{Linear, grouped_linear};
pub(crate) use mhc::{MAX_STREAMS, Mix, collapse_norm, expand, expand_norm, mix};
pub(crate) use norm::rms_norm;
pub(crate) use rope::{RopeFrequencies, RopeTable, rotate_heads, rotate_own_heads};
pub use round::{Rounding, round_groups};
pub(crate) use route::route;
pub(crate) use scatter::write_rows;
pub(crate) use view::{f32s, from_f32s, u32s};
