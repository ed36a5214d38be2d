//! How much memory of a device a run takes, before anything is loaded.
//!
//! Weights and the KV cache are known exactly, from the configuration alone. Graphs and the workspace
//! of a step are estimated from above, on a GPU; on a CPU they are left out, and a step is refused by
//! what it takes when it comes.

mod bytes;
mod demand;
mod error;
pub(crate) mod fits;
pub(crate) mod footprint;
pub(crate) mod graphs;
pub(crate) mod host;
mod reading;
mod widths;
pub(crate) mod workspace;

pub use bytes::Bytes;
pub use demand::{Demand, MemoryUse, Place};
pub use error::MemoryError;
pub use fits::largest_below;
pub use host::Shortage;
pub use reading::check_text;
pub(crate) use reading::{check_json, check_json_text};
pub use workspace::StepSize;
