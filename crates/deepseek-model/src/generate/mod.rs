//! Generation for a fixed set of prompts: chunked prefill and decode, mixed in packed steps.

mod summary;

use std::{
    num::NonZeroUsize,
    sync::Arc,
    time::{Duration, Instant},
};

use replay_core::ReplayPolicy;

use crate::{
    CacheError, CaptureReport, Error, LogitRows, Model, PhaseTimes, Result, Runner, RunnerOptions,
    SequenceId, SequenceOptions, StepMode, StepOutput, StepRequest, StepStats,
    sampler::{Sampler, SamplingConfig, log_softmax_at},
    tokenizer::check_ids,
};
pub use summary::{GenerateSummary, ModeCounts, StepCount, StepCounts};

/// How to generate.
#[derive(Debug, Clone)]
pub struct GenerateOptions {
    /// Which rows of a prefill the replay layers run on.
    pub policy: ReplayPolicy,
    /// Prefill rows of a step at most, over all prompts.
    pub chunk: NonZeroUsize,
    /// Tokens to generate per prompt at most; 0 only computes the prompt.
    pub max_new_tokens: usize,
    /// Ids that end a generation; the id itself is not part of the result.
    pub stop_ids: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: SamplingConfig,
    /// Whether to give log-probabilities of prompt and output; then every prompt row is kept.
    pub logprobs: bool,
    /// Which steps run in CUDA graphs, once [`Generator::capture`] was called; none on a CPU. Without
    /// a number of rows for the largest graph, none is captured that no step of these prompts needs,
    /// and without one of tokens, graphs hold sequences of as many as the longest can reach.
    pub runner: RunnerOptions,
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model chose a stop id.
    Stop,
    /// `max_new_tokens` are there.
    Length,
    /// The model has no more positions.
    Positions,
}

/// What a step brought.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Event {
    /// A part of a prompt was computed.
    Prefilled {
        /// Index of the prompt.
        prompt: usize,
        /// Its tokens so far.
        done: usize,
        /// All its tokens.
        total: usize,
    },
    /// A token was chosen.
    Token {
        /// Index of the prompt.
        prompt: usize,
        /// The token's id.
        id: u32,
        /// Its log-probability in nats, if asked for.
        logprob: Option<f32>,
    },
    /// A generation ended.
    Finished {
        /// Index of the prompt.
        prompt: usize,
        /// Why.
        reason: FinishReason,
    },
}

/// What came of one prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// The tokens after the prompt.
    pub ids: Vec<u32>,
    /// Log-probability of each of them in nats, if asked for.
    pub logprobs: Vec<f32>,
    /// Log-probability of each prompt token but the first, given those before it, if asked for.
    pub prompt_logprobs: Vec<f32>,
    /// Why it ended; `None` while it goes on.
    pub finish: Option<FinishReason>,
    /// From the first step to the first token.
    pub time_to_first_token: Option<Duration>,
}

/// A prompt on its way.
struct Run {
    prompt: Vec<u32>,
    sequence: SequenceId,
    sampler: Sampler,
    result: Generation,
}

impl Run {
    /// The next tokens to compute, at most `budget` of a prompt.
    fn next_tokens(&self, done: usize, budget: usize) -> &[u32] {
        if done < self.prompt.len() {
            &self.prompt[done..self.prompt.len().min(done + budget)]
        } else {
            &self.result.ids[done - self.prompt.len()..]
        }
    }
}

/// Generates for a fixed set of prompts, step by step.
pub struct Generator {
    options: GenerateOptions,
    runner: Runner,
    runs: Vec<Run>,
    started: Option<Instant>,
    summary: GenerateSummary,
    last_stats: StepStats,
    /// Prompts of the last step's requests.
    last_prompts: Vec<usize>,
}

impl Generator {
    /// Takes the prompts in; computes nothing yet.
    ///
    /// # Errors
    /// [`Error::Prompt`] if a prompt is empty, exceeds the model's positions or has an id that the
    /// model does not know; or there is no prompt, the sampling configuration is refused, or the
    /// model cannot replay and the policy is not `Off`. [`CacheError::TooLarge`] or
    /// [`CacheError::NoMemory`] if there is no memory for all prompts with `max_new_tokens` more each.
    pub fn new(
        model: impl Into<Arc<Model>>,
        prompts: Vec<Vec<u32>>,
        options: GenerateOptions,
    ) -> Result<Self> {
        let model = model.into();
        for (index, prompt) in prompts.iter().enumerate() {
            check_prompt(&model, prompt).map_err(|source| Error::Prompt {
                index,
                source: Box::new(source),
            })?;
        }
        let cache = options.cache_options(model.config(), prompts.iter().map(Vec::len));
        if prompts.is_empty() {
            return Err(Error::NoPrompts);
        }
        let lengths = prompts.iter().map(Vec::len);
        let runner_options = options.runner_options(model.config(), lengths);
        let mut runner = Runner::new(model, cache, &runner_options)?;
        let mut runs = Vec::with_capacity(prompts.len());
        for (index, prompt) in prompts.into_iter().enumerate() {
            let sequence = SequenceOptions {
                prompt_len: prompt.len(),
                keeps_rows: options.logprobs,
            };
            runs.push(Run {
                sequence: runner.add(sequence)?,
                sampler: Sampler::for_sequence(options.sampling, index as u64)?,
                prompt,
                result: Generation {
                    ids: Vec::new(),
                    logprobs: Vec::new(),
                    prompt_logprobs: Vec::new(),
                    finish: None,
                    time_to_first_token: None,
                },
            });
        }
        Ok(Self {
            options,
            runner,
            runs,
            started: None,
            summary: GenerateSummary::default(),
            last_stats: StepStats::default(),
            last_prompts: Vec::new(),
        })
    }

    /// Captures the graphs that steps run in, if the options ask for them and the model is on
    /// a CUDA device; `progress` is told how many are done, of how many.
    ///
    /// # Errors
    /// As [`Runner::capture`].
    pub fn capture(&mut self, progress: impl FnMut(usize, usize)) -> Result<CaptureReport> {
        self.runner.capture(progress)
    }

    /// As [`Runner::captured`].
    pub fn captured(&self) -> CaptureReport {
        self.runner.captured()
    }

    /// Whether every prompt has ended.
    pub fn is_finished(&self) -> bool {
        self.runs.iter().all(|run| run.result.finish.is_some())
    }

    /// What came of each prompt so far.
    pub fn results(&self) -> impl ExactSizeIterator<Item = &Generation> {
        self.runs.iter().map(|run| &run.result)
    }

    /// What all steps so far cost.
    pub fn summary(&self) -> &GenerateSummary {
        &self.summary
    }

    /// Which rows the last step ran in which layer, and the prompt of each of its requests.
    pub fn last_step(&self) -> (&StepStats, &[usize]) {
        (&self.last_stats, &self.last_prompts)
    }

    /// Runs one step: a decode row of every prompt that is done, and the next chunk of the others,
    /// first come first served. Nothing happens once all have ended.
    ///
    /// # Errors
    /// If the model fails or its logits cannot be sampled from; the generator is then of no use.
    pub fn step(&mut self) -> Result<Vec<Event>> {
        let started = *self.started.get_or_insert_with(Instant::now);
        let mut budget = self.options.chunk.get();
        let (mut requests, mut prompts, mut prefill_rows) = (Vec::new(), Vec::new(), 0);
        for (index, run) in self
            .runs
            .iter()
            .enumerate()
            .filter(|(_, run)| run.result.finish.is_none())
        {
            let done = self.runner.cache().len(run.sequence)?;
            let tokens = run.next_tokens(done, budget);
            if tokens.is_empty() {
                continue; // the budget is spent
            }
            if done < run.prompt.len() {
                budget -= tokens.len();
                prefill_rows += tokens.len();
            }
            let last = done + tokens.len() >= run.prompt.len();
            let logits = match (self.options.logprobs, last) {
                (true, _) => LogitRows::All,
                (false, true) => LogitRows::Last,
                (false, false) => LogitRows::None,
            };
            requests.push(StepRequest {
                sequence: run.sequence,
                tokens,
                logits,
            });
            prompts.push(index);
        }
        if requests.is_empty() {
            return Ok(Vec::new());
        }
        let start = Instant::now();
        let (output, mode) = self.runner.forward(&requests)?;
        let phases = self.runner.profile()?;
        let rows: Vec<usize> = requests.iter().map(|r| r.tokens.len()).collect();
        let events = self.take(&prompts, &rows, &output, started)?;
        self.count(
            start.elapsed(),
            prefill_rows,
            rows.iter().sum(),
            (output.stats, mode),
            phases,
        );
        self.last_prompts = prompts;
        Ok(events)
    }

    /// Reads the logits of a step: log-probabilities of the prompt, and the next token of each
    /// prompt that is computed.
    fn take(
        &mut self,
        prompts: &[usize],
        rows: &[usize],
        output: &StepOutput,
        started: Instant,
    ) -> Result<Vec<Event>> {
        let mut events = Vec::new();
        let logits: Vec<Vec<f32>> = output.logits.to_vec2()?;
        let positions = self.runner.model().config().max_positions;
        for ((&prompt, &rows), range) in prompts.iter().zip(rows).zip(&output.ranges) {
            let run = &mut self.runs[prompt];
            let (done, total) = (self.runner.cache().len(run.sequence)?, run.prompt.len());
            if done - rows < total {
                if self.options.logprobs {
                    let next = run.prompt[done - rows + 1..].iter();
                    let logits = logits[range.clone()].iter();
                    for (row, id) in logits.zip(next) {
                        run.result.prompt_logprobs.push(log_softmax_at(row, *id)?);
                    }
                }
                events.push(Event::Prefilled {
                    prompt,
                    done,
                    total,
                });
            }
            if done < total {
                continue;
            }
            let enough = |ids: &Vec<u32>| ids.len() == self.options.max_new_tokens;
            let mut finish = enough(&run.result.ids).then_some(FinishReason::Length);
            if finish.is_none() {
                let row = &logits[range.end - 1];
                let id = run.sampler.sample(row)?;
                run.result
                    .time_to_first_token
                    .get_or_insert_with(|| started.elapsed());
                if self.options.stop_ids.contains(&id) {
                    finish = Some(FinishReason::Stop);
                } else {
                    let logprob = self.options.logprobs.then(|| log_softmax_at(row, id));
                    let logprob = logprob.transpose()?;
                    run.result.ids.push(id);
                    run.result.logprobs.extend(logprob);
                    events.push(Event::Token {
                        prompt,
                        id,
                        logprob,
                    });
                    if enough(&run.result.ids) {
                        finish = Some(FinishReason::Length);
                    } else if done == positions {
                        finish = Some(FinishReason::Positions);
                    }
                }
            }
            if let Some(reason) = finish {
                run.result.finish = finish;
                self.runner.remove(run.sequence)?;
                events.push(Event::Finished { prompt, reason });
            }
        }
        Ok(events)
    }

    fn count(
        &mut self,
        time: Duration,
        prefill_rows: usize,
        rows: usize,
        (stats, mode): (StepStats, StepMode),
        phases: Option<PhaseTimes>,
    ) {
        let summary = &mut self.summary;
        if prefill_rows > 0 {
            summary.prefill_tokens += prefill_rows;
            summary.prefill_time += time;
        } else {
            summary.decode_tokens += rows;
            summary.decode_time += time;
        }
        let sum = match prefill_rows {
            0 => &mut summary.decode_phases,
            _ => &mut summary.prefill_phases,
        };
        if let Some(phases) = phases {
            *sum = Some(sum.unwrap_or_default().plus(&phases));
        }
        let trimmed = stats.row_layers() < stats.row_layers_without_replay();
        summary.steps.count((prefill_rows, rows), mode, trimmed);
        summary.row_layers += stats.row_layers();
        summary.row_layers_without_replay += stats.row_layers_without_replay();
        self.last_stats = stats;
    }
}

/// What a step would refuse of a prompt, found before anything runs.
pub(crate) fn check_prompt(model: &Model, prompt: &[u32]) -> Result<()> {
    let (config, prompt_len) = (model.config(), prompt.len());
    if prompt.is_empty() {
        return Err(CacheError::EmptyPrompt.into());
    }
    if prompt_len > config.max_positions {
        let max_positions = config.max_positions;
        return Err(CacheError::PromptTooLong {
            prompt_len,
            max_positions,
        }
        .into());
    }
    Ok(check_ids(prompt, config.vocab_size)?)
}
