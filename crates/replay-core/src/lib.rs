//! Which rows of a prefill the replay layers of a DeepSeek-V4.1 decoder run on: pure logic, without
//! tensors, devices, I/O or `unsafe`, for engines with their own model and kernels.
//!
//! # The idea
//!
//! In DeepSeek-V4.1 every layer keeps window KV of its own, but only a few *KV-source* layers write
//! the long-range (compressed) KV, and each layer reads what the last source before it wrote. Once
//! the last source of all, the *cut*, has written its KV for every row of a prefill, the layers from
//! the cut on owe the future nothing but their window KV of the last rows, and the sampled row's
//! output. They are the *replay layers*, and most rows need not go through them. In the released
//! model they are half of the layers, and so half of a long prefill.
//!
//! # How it is used
//!
//! 1. [`ReplayLayers::from_schedule`] finds the cut, or says why there is none ([`Unsupported`]).
//! 2. A [`Planner`] is made for a [`Window`] and a [`ReplayPolicy`], with a [`TrimThreshold`] and
//!    [`CaptureSizes`] when graphs are captured.
//! 3. Each step, [`Planner::plan_step`] turns the batch's [`Request`]s into a [`StepPlan`]: a
//!    [`ReplayPlan`] to match on, and for each replay layer the [`LayerRows`].
//! 4. In the cut, all rows write their KV. Then, layer by layer, the rows of
//!    [`LayerRows::running`] are gathered and run; each layer first writes window KV for
//!    [`LayerRows::entering`], and attends to no window KV below [`LayerRows::kv_start`]
//!    ([`Window::keys`]).
//! 5. Outputs are scattered back to [`StepPlan::output_rows`]; all other rows' are zero.
//!
//! Around that: [`RowSet`] gathers slots and side buffers and pads them to a graph,
//! [`PrefixHit`] and [`pad_rebuilt_slots`] rebuild window KV after a prefix-cache hit, [`agree`] keeps
//! data-parallel ranks together, and [`PrefillCost`] and [`Picture`] show what a policy saves.
//!
//! # The rules, and where they come from
//!
//! Write `W` for the window, `p` for the prompt's length, `R` for the rows at its end whose outputs are
//! read, and number the replay layers from 0, the cut, to `D`.
//!
//! | rule | source |
//! |---|---|
//! | the cut is the last of `kv_source_layer_ids`, and past it only window attention mixes rows | the model's published configuration and code |
//! | [`StepTail`](ReplayPolicy::StepTail) keeps the last `min(q, W)` rows of a chunk, and bounds the window KV of a longer one by them | vLLM's decoder replay, which this policy follows; there a graph that drops nothing has no bound either, here it has the same, so that answers do not depend on graphs |
//! | [`PromptTail`](ReplayPolicy::PromptTail) keeps positions from `p - W` on | the same bound taken from the prompt's end, so that which rows run does not depend on the chunks |
//! | [`Exact`](ReplayPolicy::Exact) keeps `R + (D - i) * (W - 1)` rows in layer `i` | a row reads its own window KV and that of `W - 1` rows before it, each made from the layer before; followed back from the sampled rows |
//! | decode rows read from `replay_start` | they read nothing below `p - W + 1`, and every policy has written from `p - W` on |
//! | a graph breaks by its size alone | capture must foresee what a launch will do |
//! | capture sizes, trim threshold | vLLM's defaults, in proportion to the window |
//!
//! The tests derive the exact halo a second time, by brute force on dependency graphs, and run every
//! policy on a symbolic model whose values record what they depend on.
//!
//! Features: `serde`, for settings and batches. `no_std`, with `alloc`.

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod agree;
mod cost;
mod decision;
mod error;
mod fill;
mod gather;
mod graph;
mod hit;
mod picture;
mod plan;
mod planner;
mod policy;
mod request;
mod rows;
mod sizes;
mod support;
mod tails;
mod units;

pub use agree::{Agreement, AgreementError, RankNeed, agree};
pub use cost::{PrefillCost, Share, ShareError};
pub use decision::{ReplayBatch, ReplayLaunch, ReplayPlan};
pub use error::PlanError;
pub use gather::{Slot, SlotError};
pub use graph::{GraphMode, ThresholdError, TrimThreshold};
pub use hit::{PrefixHit, pad_rebuilt_slots};
pub use picture::Picture;
pub use plan::{LayerRows, StepPlan};
pub use planner::{Planner, PlannerConfig};
pub use policy::{ReplayPolicy, UnknownPolicy};
pub use request::Request;
pub use rows::{RowSet, Rows};
pub use sizes::{CaptureSizes, CaptureSizesError};
pub use support::{LayerSchedule, ReplayLayers, Unsupported};
pub use units::{Position, RowCount, RowIdx, Window, WindowError};

/// The README's examples, run as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
