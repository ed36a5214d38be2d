//! One error type at the crate's boundary; each module has its own with the facts as fields.

use replay_graph::CaptureMode;

use crate::{
    config::ConfigError, engram::EngramError, memory::Bytes, memory::Shortage,
    sampler::SamplerError, tokenizer::TokenizerError, weights::WeightsError,
};

/// What can go wrong in this crate.
///
/// A message leaves out what its [source](std::error::Error::source) says: print the whole chain, as
/// `{:#}` of anyhow does.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// `config.json` could not be read or breaks a rule.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A checkpoint file or tensor is missing, damaged or misshapen.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// `tokenizer.json` could not be read or used.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The engram's tables or token map do not fit the configuration.
    #[error(transparent)]
    Engram(#[from] EngramError),
    /// Sampling parameters or logits that no token can be chosen with.
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    /// The cache has no room, or does not hold a sequence.
    #[error(transparent)]
    Cache(#[from] crate::CacheError),
    /// A step was refused.
    #[error(transparent)]
    Step(#[from] crate::StepError),
    /// The device or dtype is not one the decoder runs with.
    #[error(transparent)]
    Model(#[from] crate::ModelError),
    /// A GPU cannot be used.
    #[error(transparent)]
    Device(#[from] crate::device::DeviceError),
    /// A run does not fit the memory it may take.
    #[error(transparent)]
    Memory(#[from] crate::memory::MemoryError),
    /// The model cannot replay, for this reason.
    #[error(transparent)]
    Unsupported(#[from] replay_core::Unsupported),
    /// The window is not one that can be planned with.
    #[error(transparent)]
    Window(#[from] replay_core::WindowError),
    /// The step's lengths contradict each other.
    #[error(transparent)]
    Plan(#[from] replay_core::PlanError),
    /// Rows of tensors could not be moved: shapes, dtypes, devices or row numbers that do not fit each
    /// other. The decoder checks a step before, so this is a fault in the decoder, not in its
    /// arguments.
    #[error(transparent)]
    Rows(#[from] replay_cuda::Error),
    /// A graph could not be captured or launched.
    #[error(transparent)]
    Graph(#[from] replay_graph::Error),
    /// A graph of this mode could not be captured. Those that had been are dropped, and steps of that
    /// mode run without.
    #[error("graphs of {} cannot be captured{}", steps_of(*mode), nor(other.as_deref()))]
    Capture {
        /// The mode.
        mode: CaptureMode,
        /// Why.
        source: Box<Error>,
        /// That of the other mode, if its graphs could not be captured either.
        other: Option<Box<Error>>,
    },
    /// The host has no memory for the lists of steps in graphs: tokens, rows, and the pages of each
    /// sequence.
    #[error(
        "graphs: {} of lists for steps of {requests} sequences of up to {tokens} tokens: {shortage}",
        Bytes(*bytes)
    )]
    GraphLists {
        /// Bytes of the lists.
        bytes: u64,
        /// Sequences of a step at most.
        requests: usize,
        /// Tokens of a sequence at most.
        tokens: usize,
        /// What there is.
        shortage: Shortage,
    },
    /// Sizes that no graph of a step can be captured for.
    #[error("graphs of steps: {0}")]
    CaptureSizes(replay_core::CaptureSizesError),
    /// Sizes that no graph of the replay layers can be captured for.
    #[error("graphs of the replay layers: {0}")]
    ReplayCaptureSizes(replay_core::CaptureSizesError),
    /// A trim threshold within the window.
    #[error(transparent)]
    Threshold(#[from] replay_core::ThresholdError),
    /// A prompt of a batch is refused.
    #[error("prompt {index}: {source}")]
    Prompt {
        /// Its index in the batch.
        index: usize,
        /// Why.
        source: Box<Error>,
    },
    /// An engine's thread has ended, or it takes no more requests.
    #[error("the engine has stopped")]
    EngineStopped,
    /// The system has no thread for an engine.
    #[error("no thread for the engine")]
    NoThread(#[source] std::io::Error),
    /// An engine did not take a request that it had agreed to.
    #[error(transparent)]
    Engine(Box<crate::engine::EngineError>),
    /// A batch without prompts.
    #[error("expected at least 1 prompt, got none")]
    NoPrompts,
    /// Anything else that a tensor operation failed at: no memory left, a device's error, or index or
    /// router scores that are not numbers.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl Error {
    /// Whether a GPU had no memory left, for a tensor, a library or a graph. Each of these says so in its
    /// own words, which only the text of the causes has in common.
    pub fn is_out_of_device_memory(&self) -> bool {
        const WORDS: [&str; 2] = ["CUDA_ERROR_OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED"];
        causes(self).any(|cause| {
            let text = format!("{cause} {cause:?}");
            WORDS.iter().any(|words| text.contains(words))
        })
    }
}

impl From<crate::engine::EngineError> for Error {
    fn from(error: crate::engine::EngineError) -> Self {
        match error {
            crate::engine::EngineError::Refused(error) => error,
            error => Self::Engine(Box::new(error)),
        }
    }
}

/// An error, what caused it, what caused that, and so on.
fn causes(error: &Error) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    let first: &(dyn std::error::Error + 'static) = error;
    std::iter::successors(Some(first), |error| error.source())
}

fn steps_of(mode: CaptureMode) -> &'static str {
    match mode {
        CaptureMode::Full => "decode steps",
        CaptureMode::Piecewise => "mixed steps",
    }
}

/// Says that a second mode has no graphs, and why: its chain of causes is not that of the first.
fn nor(other: Option<&Error>) -> String {
    let Some(other) = other else {
        return String::new();
    };
    let causes: Vec<String> = causes(other).map(ToString::to_string).collect();
    format!(" (and {})", causes.join(": "))
}

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;
