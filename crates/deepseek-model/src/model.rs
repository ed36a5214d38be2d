//! The model: loading, and the forward pass over a packed batch.

use std::{path::Path, rc::Rc};

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::Embedding;
use replay_core::Window;

use crate::{
    CacheOptions, Config, KvCache, LayerStats, Result, StepOutput, StepRequest, StepStats,
    engram::{NgramHasher, TokenMap},
    layers::{DecoderLayer, Observer, RowState, StepContext},
    ops::{Act, Linear, RopeFrequencies, collapse_norm},
    rows::Rows,
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
    /// A device that the decoder does not run on.
    #[error("the decoder runs on the cpu, got device {device}")]
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
    /// are kept in f32 and rounded where bf16 would be stored.
    pub dtype: DType,
    /// Whether cached values are rounded to the formats the released cache stores.
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
    config: Config,
    options: ModelOptions,
    act: Act,
    window: Window,
    frequencies: [RopeFrequencies; 2],
    hasher: Option<NgramHasher>,
    embed: Embedding,
    layers: Vec<DecoderLayer>,
    norm: Tensor,
    head: Linear,
}

impl Model {
    /// Loads a checkpoint directory: `config.json`, `tokenizer.json` (if a layer has an engram)
    /// and safetensors files. `progress` is called from several threads.
    ///
    /// # Errors
    /// If the device or dtype is not supported, or a file is missing, damaged or does not fit; see
    /// the error types of the modules.
    pub fn load(
        dir: &Path,
        options: ModelOptions,
        progress: &(dyn Fn(LoadProgress) + Sync),
    ) -> Result<Self> {
        let act = activation(&options)?;
        let config = Config::load(dir)?;
        let hasher = match &config.engram {
            Some(engram) => {
                let tokenizer = Tokenizer::load(dir)?;
                tokenizer.check_fits(config.vocab_size)?;
                let map = TokenMap::from_tokenizer(&tokenizer, engram)?;
                Some(NgramHasher::new(engram, &map)?)
            }
            None => None,
        };
        let load = LoadOptions {
            device: options.device.clone(),
            dtype: DType::F32,
        };
        let mut weights = Weights::load(dir, &config, &load, progress)?;
        let layers = (0..config.layers.len())
            .map(|i| DecoderLayer::new(&mut weights, &config, i))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            act,
            window: Window::new(config.sliding_window as u32)?,
            frequencies: [
                RopeFrequencies::new(&config, false),
                RopeFrequencies::new(&config, true),
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

    /// An empty cache for this model.
    ///
    /// # Errors
    /// As [`KvCache::new`].
    pub fn new_cache(&self, options: CacheOptions) -> Result<KvCache> {
        KvCache::new(&self.config, options, &self.options.device)
    }

    /// Runs one packed step: the next tokens of each request, prefill chunks and decode rows mixed.
    ///
    /// Two prompts, prefilled together in chunks of 32 rows each; of the last chunk of a prompt the
    /// last row is read:
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
    ///     policy: ReplayPolicy::PromptTail,
    ///     sampled_rows: NonZeroU32::MIN,
    /// })?;
    /// let mut sequences = Vec::new();
    /// for prompt in &prompts {
    ///     let options = SequenceOptions { prompt_len: prompt.len(), keeps_rows: false };
    ///     sequences.push(cache.add(options)?);
    /// }
    ///
    /// let mut next = [None; 2];
    /// while next.contains(&None) {
    ///     let (mut requests, mut whose) = (Vec::new(), Vec::new());
    ///     for (i, (&sequence, prompt)) in sequences.iter().zip(&prompts).enumerate() {
    ///         let rest = &prompt[cache.len(sequence)?..];
    ///         if rest.is_empty() {
    ///             continue; // from here on a decode row: `tokens: &[next]`
    ///         }
    ///         let tokens = &rest[..rest.len().min(32)];
    ///         let is_last = tokens.len() == rest.len();
    ///         let logits = if is_last { LogitRows::Last } else { LogitRows::None };
    ///         requests.push(StepRequest { sequence, tokens, logits });
    ///         whose.push(i);
    ///     }
    ///     let output = model.forward(&requests, &mut cache)?;
    ///     let logits: Vec<Vec<f32>> = output.logits.to_vec2()?;
    ///     for (i, range) in whose.into_iter().zip(output.ranges) {
    ///         if let Some(row) = logits[range].last() {
    ///             next[i] = Some(Sampler::new(SamplingConfig::GREEDY)?.sample(row)?);
    ///         }
    ///     }
    /// }
    /// assert_eq!(cache.len(sequences[0])?, prompts[0].len());
    /// # Ok::<(), deepseek_model::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the step is refused ([`crate::StepError`], [`crate::CacheError`]): the cache is then as
    /// it was. After any other error the sequences of the step must be removed.
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
        let checked = cache.check(requests, &self.config)?;
        cache.reserve(requests, &checked)?;
        // Inside the pool, the many small parallel loops start without a hand-over.
        let output = rayon::scope(|_| self.run(requests, cache, observer))?;
        cache.advance(requests, self.lookback());
        Ok(output)
    }

    fn run(
        &self,
        requests: &[StepRequest<'_>],
        cache: &KvCache,
        observer: Option<Observer<'_>>,
    ) -> Result<StepOutput> {
        let sequences: Vec<_> = requests
            .iter()
            .map(|r| cache.sequences.get(r.sequence))
            .collect::<Result<_, _>>()?;
        let all = Rc::new(Rows::pack(
            requests
                .iter()
                .zip(&sequences)
                .map(|(r, s)| (r.sequence.slot(), s.len, r.tokens.len())),
        ));
        let replay = cache.planner.plan(requests, &sequences)?;
        let ctx = StepContext {
            config: &self.config,
            act: self.act,
            window: self.window,
            round_cache: self.options.round_cache,
            frequencies: &self.frequencies,
            layers: &cache.layers,
            pages: sequences.iter().map(|s| s.pages.as_slice()).collect(),
            table_rows: self.table_rows(requests, &sequences)?,
            observer,
        };
        let tokens: Vec<u32> = requests.iter().flat_map(|r| r.tokens).copied().collect();
        let mut state = self.embed(&tokens)?;
        let mut stats = StepStats {
            query_rows: all.counts(),
            layers: Vec::with_capacity(self.layers.len()),
        };
        let whole = vec![0; requests.len()];
        let first = replay
            .as_ref()
            .map_or(self.layers.len(), super::replay::Replay::first_layer);
        for layer in &self.layers[..first] {
            let entered = layer.enter(&ctx, state, &all)?;
            state = layer.run(&ctx, entered, &all, &all, &whole)?;
            stats.layers.push(LayerStats {
                written: all.counts(),
                run: all.counts(),
            });
        }
        let hidden = match &replay {
            None => self.finish(&state)?,
            Some(replay) => replay.run(
                &self.layers[first..],
                &ctx,
                state,
                all.clone(),
                &mut stats,
                |state| self.finish(state),
            )?,
        };
        ctx.note(|| "final_norm".into(), &hidden);
        let (rows, ranges) = read_rows(requests, &all);
        let logits = self.head.forward(&select(&hidden, &rows)?, Act::F32)?;
        Ok(StepOutput {
            logits,
            ranges,
            stats,
        })
    }

    /// `[rows, n, h]` copies of the embedding; the first sublayer reads stream 0.
    fn embed(&self, tokens: &[u32]) -> Result<RowState> {
        let (rows, n, h) = (tokens.len(), self.config.hc_mult, self.config.hidden_size);
        let device = &self.options.device;
        let x = self.embed.forward(&Tensor::new(tokens, device)?)?;
        let streams = x.unsqueeze(1)?.broadcast_as((rows, n, h))?.contiguous()?;
        let mut pre = vec![0f32; rows * n];
        pre.iter_mut().step_by(n).for_each(|x| *x = 1.0);
        let pre = Tensor::from_vec(pre, (rows, n), device)?;
        Ok(RowState {
            streams,
            pre,
            choice: None,
            candidates: None,
        })
    }

    /// The final norm: `[rows, h]`.
    fn finish(&self, state: &RowState) -> Result<Tensor> {
        Ok(collapse_norm(
            &state.streams,
            &state.pre,
            &self.norm,
            self.config.rms_norm_eps,
            self.act,
        )?)
    }

    /// Token ids that a later step's n-grams reach back to.
    fn lookback(&self) -> usize {
        self.config.engram.as_ref().map_or(0, |e| e.max_ngram - 1)
    }

    /// Table rows of every engram table for all rows of the step.
    fn table_rows(
        &self,
        requests: &[StepRequest<'_>],
        sequences: &[&crate::cache::Sequence],
    ) -> Result<Vec<Vec<i64>>> {
        let Some(hasher) = &self.hasher else {
            return Ok(Vec::new());
        };
        let tables = self.config.engram.as_ref().map_or(0, |e| e.layers.len());
        let mut rows = vec![Vec::new(); tables];
        for (table, rows) in rows.iter_mut().enumerate() {
            for (request, sequence) in requests.iter().zip(sequences) {
                hasher.table_rows(table, request.tokens, &sequence.tail, rows)?;
            }
        }
        Ok(rows)
    }
}

/// Activation rounding for the options, which must be ones the decoder runs with.
fn activation(options: &ModelOptions) -> Result<Act> {
    if !options.device.is_cpu() {
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

/// Batch rows whose logits are read, and each request's range among them.
fn read_rows(requests: &[StepRequest<'_>], all: &Rows) -> (Vec<u32>, Vec<std::ops::Range<usize>>) {
    let mut rows = Vec::new();
    let mut ranges = Vec::with_capacity(requests.len());
    for (request, span) in requests.iter().zip(all.spans()) {
        let start = rows.len();
        let all = span.rows();
        let read = all.end - request.logits.count(all.len())..all.end;
        rows.extend(read.map(|row| row as u32));
        ranges.push(start..rows.len());
    }
    (rows, ranges)
}

fn select(hidden: &Tensor, rows: &[u32]) -> Result<Tensor> {
    Ok(replay_cuda::gather_rows(&[hidden], rows)?.remove(0))
}
