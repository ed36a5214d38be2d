//! The operations on CUDA devices: a launch or a few for each, of kernels in `kernels/*.cu`.
//!
//! Arguments are those of the CPU implementations, on the device; activations are f32 or bf16 there,
//! lists u32. Nothing here waits for the device or reads a value back. Shapes and dtypes are checked
//! before a launch, so the functions are safe; values that index are checked by the kernels.

mod attention;
mod compress;
mod embed;
mod engram;
mod experts;
mod ffn;
mod grouped;
mod index;
mod launch;
mod linear;
mod mhc;
mod mix_tiles;
mod norm;
mod rope;
mod route;
#[cfg(test)]
mod tests;

pub(super) use attention::attention;
pub(super) use compress::close_groups;
pub(super) use embed::embed;
pub(super) use engram::engram_gate;
pub(super) use experts::{SortedChoices, routed_experts, sort_choices};
pub(super) use ffn::swiglu;
pub(super) use index::choose_entries;
pub(super) use linear::{grouped_linear, has_own_kernel};
pub(super) use mhc::{expand, mix};
pub(super) use norm::{collapse_norm, expand_norm, expands_and_norms, rms_norm};
pub(super) use rope::{rope_table, rotate_heads, rotate_in_place};
pub(super) use route::route;

/// PTX of the program, to see what it was built for.
pub(crate) fn kernel_text() -> &'static str {
    launch::ptx::NORM
}
