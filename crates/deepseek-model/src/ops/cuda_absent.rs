//! Stands in for the operations on CUDA devices in a build without the feature `cuda`.

use candle_core::{Error, Result, Tensor};

use super::{
    Act, Experts, Faults, Mix, Rounding,
    attention::{EntryKeys, WindowKeys},
    compress::ClosedGroups,
    index::{Chosen, IndexKeys, IndexQueries, Level},
};
use crate::{cache::RowRing, config::Config, rows::Rows};

fn absent<T>() -> Result<T> {
    Err(Error::NotCompiledWithCudaSupport)
}

/// The text of no kernel.
pub(crate) fn kernel_text() -> &'static str {
    ""
}

pub(super) fn attention(
    _: &Tensor,
    _: &Rows,
    _: &WindowKeys<'_>,
    _: Option<&EntryKeys<'_>>,
    _: &Tensor,
) -> Result<Tensor> {
    absent()
}

pub(super) fn close_groups(
    _: &ClosedGroups,
    _: usize,
    _: &Rows,
    _: (&Tensor, &RowRing),
    _: (&Tensor, &RowRing),
    _: Act,
) -> Result<Tensor> {
    absent()
}

pub(super) fn embed(_: &Tensor, _: &Tensor, _: usize) -> Result<Tensor> {
    absent()
}

pub(super) fn engram_gate(
    _: &Tensor,
    _: &Tensor,
    _: &Tensor,
    _: &Tensor,
    _: f64,
) -> Result<Tensor> {
    absent()
}

/// Choices on a device, of which there is none in this build.
#[derive(Debug)]
pub(crate) enum SortedChoices {}

pub(super) fn sort_choices(_: &Experts, _: &Tensor, _: &Tensor) -> Result<SortedChoices> {
    absent()
}

pub(super) fn routed_experts(
    _: &Experts,
    _: &Tensor,
    _: (&Tensor, &Tensor),
    _: &SortedChoices,
    _: &Tensor,
) -> Result<Tensor> {
    absent()
}

pub(super) fn swiglu(_: &Tensor, _: f64) -> Result<Tensor> {
    absent()
}

pub(super) fn choose_entries(
    _: &IndexQueries<'_>,
    _: &IndexKeys<'_>,
    _: Level<'_>,
    _: bool,
) -> Result<Chosen> {
    absent()
}

pub(super) fn grouped_linear(_: &Tensor, _: &Tensor, _: usize, _: Act) -> Result<Tensor> {
    absent()
}

pub(super) fn has_own_kernel(_: &Tensor, _: &Tensor) -> Result<bool> {
    absent()
}

pub(super) fn mix(_: &Mix, _: &Tensor) -> Result<(Tensor, Tensor)> {
    absent()
}

pub(super) fn expand(_: &Tensor, _: &Tensor, _: &Tensor) -> Result<Tensor> {
    absent()
}

pub(super) fn collapse_norm(_: &Tensor, _: &Tensor, _: &Tensor, _: f64) -> Result<Tensor> {
    absent()
}

pub(super) fn expands_and_norms(_: &Tensor) -> Result<bool> {
    absent()
}

pub(super) fn expand_norm(
    _: &Tensor,
    _: &Tensor,
    _: &Tensor,
    _: &Tensor,
    _: &Tensor,
    _: f64,
) -> Result<(Tensor, Tensor)> {
    absent()
}

pub(super) fn rms_norm(_: &Tensor, _: &Tensor, _: f64) -> Result<Tensor> {
    absent()
}

pub(super) fn rope_table(_: &Tensor, _: &Tensor) -> Result<Tensor> {
    absent()
}

pub(super) fn rotate_heads(
    _: &Tensor,
    _: usize,
    _: &Tensor,
    _: Option<Rounding>,
) -> Result<Tensor> {
    absent()
}

pub(super) fn rotate_in_place(_: &Tensor, _: usize, _: &Tensor, _: bool) -> Result<()> {
    absent()
}

pub(super) fn route(_: &Tensor, _: &Tensor, _: &Config, _: Faults<'_>) -> Result<(Tensor, Tensor)> {
    absent()
}
