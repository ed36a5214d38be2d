//! The model: loading, and what one asks of it.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_nn::Embedding;
use replay_core::Window;

use crate::{
    CacheOptions, Config, KvCache, Result, StepOutput, StepRequest,
    cache::ModelId,
    engram::{EngramError, NgramHasher, TokenMap},
    layers::{DecoderLayer, Observer},
    ops::{Act, Linear, RopeFrequencies, Site},
    profile::Profile,
    replay,
    tokenizer::Tokenizer,
    weights::{LoadOptions, LoadProgress, Weights},
};

/// Why a model cannot run as asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// Values of a layer have overflowed or are no numbers, so that nothing can be chosen by them.
    #[error("layer {layer}: {cause}")]
    NotFinite {
        /// The layer.
        layer: usize,
        /// What was found.
        cause: candle_core::Error,
    },
    /// The same, found on a device after the step.
    #[error("layer {layer}: the values that {site} chooses by are not finite")]
    NotFiniteOnDevice {
        /// The layer.
        layer: usize,
        /// What chooses.
        site: Site,
    },
    /// A device that the decoder does not run on.
    #[error("the decoder runs on the cpu and on CUDA devices, got device {device}")]
    Device {
        /// The device asked for.
        device: String,
    },
    /// A dtype that is not an activation dtype.
    #[error("expected f32 or bf16 activations, got {got}")]
    DType {
        /// The dtype asked for.
        got: String,
    },
}

/// How a model computes.
#[derive(Debug, Clone)]
pub struct ModelOptions {
    /// Where it runs.
    pub device: Device,
    /// Dtype of activations: `F32`, the clean reference, or `BF16`, as released. On a CPU values
    /// are kept in f32 and rounded where bf16 would be stored; a CUDA device holds them as bf16.
    pub dtype: DType,
    /// Whether cached values are rounded to the formats the released cache stores. If so, logits
    /// depend on chunks and neighbours by more than their last bits: see [`Model::forward`].
    pub round_cache: bool,
}

impl Default for ModelOptions {
    /// f32 on the CPU, with cache rounding.
    fn default() -> Self {
        Self {
            device: Device::Cpu,
            dtype: DType::F32,
            round_cache: true,
        }
    }
}

/// A loaded decoder.
#[derive(Debug)]
pub struct Model {
    pub(crate) id: ModelId,
    pub(crate) config: Config,
    pub(crate) options: ModelOptions,
    pub(crate) act: Act,
    pub(crate) window: Window,
    /// The layer that replay starts at, of a model that can.
    pub(crate) cut: Option<usize>,
    pub(crate) frequencies: [RopeFrequencies; 2],
    pub(crate) hasher: Option<NgramHasher>,
    pub(crate) embed: Embedding,
    pub(crate) layers: Vec<DecoderLayer>,
    pub(crate) norm: Tensor,
    pub(crate) head: Linear,
}

impl Model {
    /// Loads a checkpoint directory: `config.json`, `tokenizer.json` (if a layer has an engram)
    /// and safetensors files. `progress` is called from several threads.
    ///
    /// Safetensors files are memory-mapped: all of them until this returns, those with n-gram tables
    /// for as long as the model lives. They must not be truncated or overwritten meanwhile. The system
    /// ends a program that reads past the end of a mapped file (SIGBUS), which no check can prevent,
    /// and bytes that are overwritten are read as they are then. To replace a file, rename another to
    /// its name.
    ///
    /// # Errors
    /// If the device or dtype is not supported, or a file is missing, damaged or does not fit; see
    /// the error types of the modules.
    pub fn load(
        dir: &Path,
        options: ModelOptions,
        progress: &(dyn Fn(LoadProgress) + Sync),
    ) -> Result<Self> {
        activation(&options)?;
        let config = Config::load(dir)?;
        let hasher = match &config.engram {
            Some(engram) => {
                let tokenizer = Tokenizer::load(dir)?;
                tokenizer.check_fits(config.vocab_size)?;
                let map = TokenMap::from_tokenizer(&tokenizer, engram)?;
                let hasher = NgramHasher::new(engram, &map);
                Some(hasher.map_err(|cause| EngramError::Config {
                    path: dir.join("config.json"),
                    cause: cause.into(),
                })?)
            }
            None => None,
        };
        let load = LoadOptions {
            device: options.device.clone(),
            dtype: held_dtype(&options),
        };
        let weights = Weights::load(dir, &config, &load, progress)?;
        Self::assemble(config, options, hasher, weights)
    }

    /// A model of this configuration with random weights, drawn on its device: for benchmarks, which
    /// ask how long a model takes and not what it says. Tensors are held as [`Self::load`] holds them,
    /// activations stay finite, and rows choose their experts evenly.
    ///
    /// ```
    /// use deepseek_model::{Config, Model, ModelOptions};
    ///
    /// let config = Config::load("tests/data/bf16-s1".as_ref())?;
    /// let model = Model::random(config, ModelOptions::default(), 1)?;
    /// assert_eq!(model.config().layers.len(), 9);
    /// # Ok::<(), deepseek_model::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the device or dtype is not supported, the configuration has n-gram tables, or memory runs
    /// out.
    pub fn random(config: Config, options: ModelOptions, seed: u64) -> Result<Self> {
        activation(&options)?;
        let load = LoadOptions {
            device: options.device.clone(),
            dtype: held_dtype(&options),
        };
        let weights = Weights::random(&config, &load, seed)?;
        Self::assemble(config, options, None, weights)
    }

    fn assemble(
        config: Config,
        options: ModelOptions,
        hasher: Option<NgramHasher>,
        mut weights: Weights,
    ) -> Result<Self> {
        let act = activation(&options)?;
        let layers = (0..config.layers.len())
            .map(|i| DecoderLayer::new(&mut weights, &config, i))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            id: ModelId::new(),
            act,
            cut: replay::first_layer(&config),
            window: Window::new(config.sliding_window as u32)?,
            frequencies: [
                RopeFrequencies::new(&config, false, &options.device)?,
                RopeFrequencies::new(&config, true, &options.device)?,
            ],
            hasher,
            embed: Embedding::new(weights.take("embed.weight")?, config.hidden_size),
            layers,
            norm: weights.take("norm.weight")?,
            head: Linear::new(weights.take("head.weight")?),
            config,
            options,
        })
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// An empty cache for this model and no other.
    ///
    /// # Errors
    /// As [`KvCache::new`].
    pub fn new_cache(&self, options: CacheOptions) -> Result<KvCache> {
        let (device, dtype) = (&self.options.device, held_dtype(&self.options));
        Ok(KvCache::new(&self.config, options, device, dtype)?.owned_by(self.id))
    }

    /// Runs one packed step: the next tokens of each request, prefill chunks and decode rows mixed.
    ///
    /// On one machine the same steps give the same logits. Other steps over the same text, so other chunks or other
    /// requests beside it, may sum in another order, which moves logits in their last bits; except
    /// under `StepTail`, where the chunks decide which rows run. With
    /// [`round_cache`](ModelOptions::round_cache), the default, or bf16 activations that does not stay
    /// small: a last bit can take a rounded value to the next one of its format, and from there the
    /// choice of entries or experts to another. Whoever needs results that hang little on chunks and
    /// neighbours switches it off and computes in f32. What is left then is a matter of summation order,
    /// but for near-ties: where two scores at the edge of a choice differ in their last bits alone, either
    /// can win, and logits differ visibly.
    ///
    /// Two prompts, prefilled together in chunks of at most 32 rows each, then decoded: a row a step.
    /// The last row of a prompt and each decode row are read.
    ///
    /// ```
    /// use std::num::NonZeroU32;
    ///
    /// use deepseek_model::{
    ///     CacheOptions, LogitRows, Model, ModelOptions, ReplayPolicy, SequenceOptions, StepRequest,
    ///     sampler::{Sampler, SamplingConfig}, tokenizer::Tokenizer,
    /// };
    ///
    /// let dir = "tests/data/bf16-s1".as_ref(); // a tiny random checkpoint
    /// let model = Model::load(dir, ModelOptions::default(), &|_progress| {})?;
    /// let tokenizer = Tokenizer::load(dir)?;
    /// let bos = model.config().bos_token_id.expect("this model has one");
    /// let prompts = [
    ///     tokenizer.encode_with_bos(bos, "To-morrow, and to-morrow, and to-morrow, creeps in")?,
    ///     tokenizer.encode_with_bos(bos, "Out, out, brief candle!")?,
    /// ];
    ///
    /// let mut cache = model.new_cache(CacheOptions {
    ///     max_sequences: 2,
    ///     max_tokens: 512,
    ///     page_tokens: CacheOptions::PAGE_TOKENS,
    ///     policy: ReplayPolicy::PromptTail,
    ///     sampled_rows: NonZeroU32::MIN,
    /// })?;
    /// let mut sequences = Vec::new();
    /// for prompt in &prompts {
    ///     let options = SequenceOptions { prompt_len: prompt.len(), keeps_rows: false };
    ///     sequences.push(cache.add(options)?);
    /// }
    ///
    /// // Prompt and output of each sequence; the cache knows how much of it was computed.
    /// let mut texts = prompts.clone();
    /// let mut sampler = Sampler::new(SamplingConfig::GREEDY)?;
    /// while texts[0].len() < prompts[0].len() + 5 {
    ///     let mut requests = Vec::new();
    ///     for (&sequence, text) in sequences.iter().zip(&texts) {
    ///         let rest = &text[cache.len(sequence)?..];
    ///         let tokens = &rest[..rest.len().min(32)];
    ///         let is_last = tokens.len() == rest.len();
    ///         let logits = if is_last { LogitRows::Last } else { LogitRows::None };
    ///         requests.push(StepRequest { sequence, tokens, logits });
    ///     }
    ///     let output = model.forward(&requests, &mut cache)?;
    ///     let logits: Vec<Vec<f32>> = output.logits.to_vec2()?;
    ///     for (text, range) in texts.iter_mut().zip(output.ranges) {
    ///         if let Some(row) = logits[range].last() {
    ///             text.push(sampler.sample(row)?);
    ///         }
    ///     }
    /// }
    /// for (text, prompt) in texts.iter().zip(&prompts) {
    ///     println!("{}", tokenizer.decode(&text[prompt.len()..])?);
    /// }
    /// # Ok::<(), deepseek_model::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the step is refused ([`crate::StepError`], [`crate::CacheError`]): the cache is then as
    /// it was. A step on the CPU that would take more memory than there is is among them, as far as an
    /// estimate can tell; memory that runs out all the same ends the program. After
    /// any other error, or a panic, the sequences of the step take no further one
    /// ([`crate::CacheError::Unfinished`]): they can only be removed.
    pub fn forward(&self, requests: &[StepRequest<'_>], cache: &mut KvCache) -> Result<StepOutput> {
        self.forward_observed(requests, cache, None)
    }

    /// As [`Self::forward`], and shows intermediate tensors to `observer`, which costs the dense
    /// index scores.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_observed(
        &self,
        requests: &[StepRequest<'_>],
        cache: &mut KvCache,
        observer: Option<Observer<'_>>,
    ) -> Result<StepOutput> {
        self.forward_watched(requests, cache, (observer, None))
    }

    /// As [`Self::forward`], with an observer or a profile.
    pub(crate) fn forward_watched(
        &self,
        requests: &[StepRequest<'_>],
        cache: &mut KvCache,
        watch: (Option<Observer<'_>>, Option<&Profile>),
    ) -> Result<StepOutput> {
        self.step(requests, cache, |cache| {
            let run = || self.run(requests, cache, watch);
            if self.options.device.is_cpu() {
                // Inside the pool, the many small parallel loops start without a hand-over.
                rayon::scope(|_| run())
            } else {
                run()
            }
        })
    }

    /// The device that the model runs on.
    pub fn device(&self) -> &Device {
        &self.options.device
    }
}

/// Dtype in which the device holds activations, and the matrices that multiply them.
pub(crate) fn held_dtype(options: &ModelOptions) -> DType {
    if options.device.is_cpu() {
        DType::F32
    } else {
        options.dtype
    }
}

/// Activation rounding for the options, which must be ones the decoder runs with.
fn activation(options: &ModelOptions) -> Result<Act> {
    if !options.device.is_cpu() && !options.device.is_cuda() {
        return Err(ModelError::Device {
            device: format!("{:?}", options.device.location()),
        }
        .into());
    }
    match options.dtype {
        DType::F32 => Ok(Act::F32),
        DType::BF16 => Ok(Act::Bf16),
        got => Err(ModelError::DType {
            got: got.as_str().into(),
        }
        .into()),
    }
}
