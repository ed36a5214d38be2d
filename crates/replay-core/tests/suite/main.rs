//! The behaviour of `replay-core` through its public API, by theme.

mod cost;
mod decisions;
mod edges;
mod halo;
mod hazards;
mod laws;
mod models;
mod results;
#[cfg(feature = "serde")]
mod serialized;
mod snapshots;
mod symbolic;
