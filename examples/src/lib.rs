//! What the programs `generate` and `perplexity` are made of.
//!
//! Each program is a struct of flags and a `run` that takes its streams as arguments, so that tests
//! drive it without a process: [`generate`] and [`perplexity`]. The other modules are shared.

pub mod generate;
pub mod io;
pub mod model;
pub mod output;
pub mod perplexity;
pub mod picture;
pub mod progress;
pub mod prompts;
pub mod sampling;
pub mod windows;
