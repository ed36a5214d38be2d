//! The DeepSeek-V4.1 text decoder in candle, with decoder-side bounded replay.
//!
//! From the last layer that writes long-range KV on (the *cut*), a row of a prefill is read by other
//! rows through the sliding window alone. So these *replay layers* run on each request's last rows
//! only, and a prefill costs about half. Which rows those are says a [`ReplayPolicy`]; it belongs to
//! the [`KvCache`], because it decides what the cache holds.
//!
//! From the ground up:
//!
//! - [`Model::forward`] runs one packed step: prefill chunks and decode rows of several sequences.
//! - [`Generator`] drives prompts to their ends.
//! - [`engine`] serves requests that come and go.
//! - [`tokenizer`], [`sampler`] and [`weights`] stand alone.
//!
//! Everything here runs on a CPU in f32, or with activations rounded to bf16, and with the feature
//! `cuda` on a CUDA device in f32 or bf16. There a [`Runner`] runs steps in CUDA graphs.
//!
//! ```
//! use std::{num::NonZeroUsize, sync::Arc};
//!
//! use deepseek_model::{GenerateOptions, Generator, Model, ModelOptions, ReplayPolicy};
//! use deepseek_model::{sampler::SamplingConfig, tokenizer::Tokenizer};
//!
//! let dir = "tests/data/bf16-s1".as_ref(); // a tiny random checkpoint
//! let model = Arc::new(Model::load(dir, ModelOptions::default(), &|_progress| {})?);
//!
//! let tokenizer = Tokenizer::load(dir)?;
//! let bos = model.config().bos_token_id.expect("this model has one");
//! let text = "Life's but a walking shadow, a poor player that struts and frets his hour";
//! let prompt = tokenizer.encode_with_bos(bos, text)?;
//! let options = GenerateOptions {
//!     policy: ReplayPolicy::PromptTail,
//!     chunk: NonZeroUsize::new(32).unwrap(),
//!     max_new_tokens: 4,
//!     stop_ids: model.config().eos_token_ids.clone(),
//!     sampling: SamplingConfig::GREEDY,
//!     logprobs: false,
//!     runner: Default::default(),
//! };
//! let mut generator = Generator::new(model.clone(), vec![prompt], options)?;
//! while !generator.is_finished() {
//!     for event in generator.step()? {
//!         println!("{event:?}");
//!     }
//! }
//! let result = generator.results().next().unwrap();
//! assert_eq!(result.ids.len(), 4);
//! println!("{text}{}", tokenizer.decode(&result.ids)?);
//! // Four of nine layers ran on the last 8 rows of the prompt.
//! let cost = generator.summary();
//! assert!(cost.row_layers < cost.row_layers_without_replay * 7 / 10);
//! # Ok::<(), deepseek_model::Error>(())
//! ```

mod cache;
pub mod config;
pub mod device;
mod draw;
pub mod engine;
pub mod engram;
mod error;
mod forward;
mod generate;
mod layers;
pub mod memory;
mod model;
mod ops;
mod pcg;
pub mod plain;
mod profile;
mod replay;
mod rows;
mod runner;
pub mod sampler;
mod step;
pub mod tokenizer;
pub mod weights;

pub use cache::{
    CacheError, CacheOptions, CachedPrefix, KvBudget, KvCache, PrefixOptions, SequenceId,
    SequenceOptions,
};
pub use config::Config;
pub use error::{Error, Result};
pub use generate::{
    Event, FinishReason, GenerateOptions, GenerateSummary, Generation, Generator, ModeCounts,
    StepCount, StepCounts,
};
pub use layers::Observer;
pub use model::{Model, ModelError, ModelOptions};
pub use ops::{Rounding, Site, round_groups};
pub use profile::PhaseTimes;
pub use replay_core::ReplayLaunch;
pub use replay_core::ReplayPolicy;
pub use replay_graph::{CaptureMode, CaptureReport};
pub use runner::{Graphs, ReplaySizes, Runner, RunnerOptions, StepMode};
pub use step::{LayerStats, LogitRows, StepError, StepOutput, StepRequest, StepStats};

/// The README's example, run as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
