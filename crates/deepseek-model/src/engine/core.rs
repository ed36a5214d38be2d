//! The engine without a thread: requests come in, each step gives what came of it.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use rayon::prelude::*;

use super::{
    EngineError, EngineOptions,
    job::Job,
    request::{EndReason, EngineRequest, RequestId, Update},
    schedule::Part,
};
use crate::{
    CaptureReport, Error, Model, Result, Runner, SequenceId, StepOutput, StepRequest,
    generate::check_prompt,
};

/// A job with its sequence.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) job: Job,
    pub(super) sequence: SequenceId,
}

/// Requests, first come first served, over one model and its cache.
///
/// Each [`Self::step`] runs a decode row of the sequences whose text is computed, then as many tokens
/// of prompts as the budget leaves, oldest request first. A request begins to run when there is a place
/// and room for all that is known of it; a step later where another one's step computes what both begin
/// with. One that later finds no room for its next token takes that of the youngest, which is computed
/// again from the tokens that it has. Where a budget is smaller than the number of sequences that decode,
/// the oldest do.
///
/// Texts are those of lone runs, up to rounding: under `Exact` and `Off` always, under `PromptTail` where
/// nothing is found in the cache. Under `StepTail` they depend on how prompts are cut into chunks, and so
/// on what runs beside them.
#[derive(Debug)]
pub struct EngineCore {
    pub(super) runner: Runner,
    pub(super) options: EngineOptions,
    pub(super) waiting: VecDeque<Job>,
    /// Oldest first.
    pub(super) running: Vec<Running>,
    next_id: u64,
    /// The first that waits, when there was no room for it; how many pages were free then, and how many
    /// ran.
    pub(super) refused: Option<(RequestId, usize, usize)>,
    pub(super) stats: EngineStats,
    pages: usize,
}

/// What an engine has done, and what is in it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Requests that wait for a place.
    pub waiting: usize,
    /// Requests that run.
    pub running: usize,
    /// Steps so far.
    pub steps: u64,
    /// Tokens of the prompts of all requests that have begun to run.
    pub prompt_tokens: u64,
    /// Of these, tokens that were spared by what was found in the cache.
    pub cached_tokens: u64,
    /// Tokens that were chosen.
    pub generated_tokens: u64,
    /// How often a request lost its room and was computed again.
    pub preemptions: u64,
    /// Rows through layers that ran.
    pub row_layers: u64,
    /// The same, had no row been dropped.
    pub row_layers_without_replay: u64,
    /// Time in which steps were put together: who runs, on how many tokens, with which pages.
    pub planning: Duration,
    /// Time in which tokens were chosen from logits, and given out.
    pub choosing: Duration,
    /// Pages of the cache that no sequence holds.
    pub free_pages: usize,
    /// Pages of the cache.
    pub pages: usize,
}

impl EngineCore {
    /// An engine with an empty cache.
    ///
    /// # Errors
    /// As [`Runner::new`].
    pub fn new(model: impl Into<Arc<Model>>, options: EngineOptions) -> Result<Self> {
        let runner = Runner::new(model, options.cache, &options.runner)?;
        Ok(Self {
            pages: runner.cache().free_pages(),
            runner,
            options,
            waiting: VecDeque::new(),
            running: Vec::new(),
            next_id: 0,
            refused: None,
            stats: EngineStats::default(),
        })
    }

    /// As [`Runner::capture`].
    ///
    /// # Errors
    /// As there.
    pub fn capture(&mut self, progress: impl FnMut(usize, usize)) -> Result<CaptureReport> {
        self.runner.capture(progress)
    }

    /// As [`Runner::captured`].
    pub fn captured(&self) -> CaptureReport {
        self.runner.captured()
    }

    /// The model.
    pub fn model(&self) -> &Model {
        self.runner.model()
    }

    /// Takes a request in. It begins to run in a later [`Self::step`].
    ///
    /// # Errors
    /// If too many wait, the cache could not hold the request alone, the prompt is empty, exceeds the
    /// model's positions or has an id that the model does not know, the sampling configuration is
    /// refused, a stop text is empty, or there are some and no tokenizer.
    pub fn submit(&mut self, request: EngineRequest) -> Result<RequestId, EngineError> {
        check(self.model(), &self.options, &request, self.fits())?;
        let held = self.waiting.len() + self.running.len();
        if held >= self.options.holds() {
            return Err(self.options.full(held, 1));
        }
        let id = RequestId(self.next_id);
        let job = Job::new(id, request, self.options.tokenizer.clone())?;
        self.waiting.push_back(job);
        self.next_id += 1;
        Ok(id)
    }

    /// Tokens of one sequence that the cache holds.
    pub(super) fn fits(&self) -> usize {
        self.pages * self.runner.cache().page_tokens()
    }

    /// Ends a request; `false` if it has ended before. No update of it follows.
    pub fn cancel(&mut self, id: RequestId) -> bool {
        self.take_out(id).is_some()
    }

    /// Takes a request out, wherever it is.
    fn take_out(&mut self, id: RequestId) -> Option<Job> {
        if let Some(at) = self.waiting.iter().position(|job| job.id == id) {
            return self.waiting.remove(at);
        }
        let at = self.running.iter().position(|r| r.job.id == id)?;
        Some(self.end(at))
    }

    /// Whether no request waits or runs.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// What it has done, and what is in it.
    pub fn stats(&self) -> EngineStats {
        EngineStats {
            waiting: self.waiting.len(),
            running: self.running.len(),
            free_pages: self.runner.cache().free_pages(),
            pages: self.pages,
            ..self.stats
        }
    }

    /// Ends what is past its deadline and runs one step: what came of it, in order. A step that fails
    /// is the end of the requests in it, and of no others. Nothing happens if the engine is idle.
    pub fn step(&mut self) -> Vec<(RequestId, Update)> {
        let mut updates = Vec::new();
        self.end_overdue(Instant::now(), &mut updates);
        let begun = Instant::now();
        let plan = self.plan(&mut updates);
        self.stats.planning += begun.elapsed();
        match plan {
            Ok(plan) if plan.parts.is_empty() => {}
            Ok(plan) => match self.run(&plan.parts) {
                Ok(output) => self.take(&plan.parts, &output, &mut updates),
                Err(error) => self.fail(&plan.parts, error, &mut updates),
            },
            // The cache and the engine disagree about what there is: nothing in it can go on.
            Err(error) => {
                let error = Arc::new(error);
                let waiting = self.waiting.drain(..).map(|job| job.id);
                let ids: Vec<_> = waiting
                    .chain(self.running.iter().map(|r| r.job.id))
                    .collect();
                while !self.running.is_empty() {
                    self.end(0);
                }
                updates.extend(
                    ids.into_iter()
                        .map(|id| (id, Update::Failed(error.clone()))),
                );
            }
        }
        updates
    }

    fn end_overdue(&mut self, now: Instant, updates: &mut Vec<(RequestId, Update)>) {
        let overdue = |job: &Job| job.request.deadline.is_some_and(|deadline| deadline <= now);
        let waiting = self
            .waiting
            .iter()
            .filter(|job| overdue(job))
            .map(|job| job.id);
        let running = self.running.iter().map(|r| &r.job);
        let running = running.filter(|job| overdue(job)).map(|job| job.id);
        let ids: Vec<_> = waiting.chain(running).collect();
        for id in ids {
            let mut job = self.take_out(id).expect("it waits or runs");
            let end = job.finish(EndReason::Deadline);
            let end = end.unwrap_or_else(|error| Update::Failed(Arc::new(error)));
            updates.push((id, end));
        }
    }

    fn run(&mut self, parts: &[Part]) -> Result<StepOutput> {
        let requests: Vec<_> = parts
            .iter()
            .map(|part| {
                let Running { job, sequence } = &self.running[part.index];
                let end = part.start + part.tokens;
                StepRequest {
                    sequence: *sequence,
                    tokens: &job.tokens[part.start..end],
                    logits: job.reads(end),
                }
            })
            .collect();
        self.runner.forward(&requests).map(|(output, _)| output)
    }

    /// Gives each request the logits that it read.
    fn take(
        &mut self,
        parts: &[Part],
        output: &StepOutput,
        updates: &mut Vec<(RequestId, Update)>,
    ) {
        self.stats.steps += 1;
        self.stats.row_layers += output.stats.row_layers() as u64;
        self.stats.row_layers_without_replay += output.stats.row_layers_without_replay() as u64;
        let logits: Vec<Vec<f32>> = match output.logits.to_vec2() {
            Ok(logits) => logits,
            Err(error) => return self.fail(parts, error.into(), updates),
        };
        let begun = Instant::now();
        let max_positions = self.model().config().max_positions;
        // Parts are in the order of those that run.
        let mut parts_left = parts.iter().zip(&output.ranges).peekable();
        let running = self.running.iter_mut().enumerate();
        let jobs: Vec<_> = running
            .filter_map(|(index, running)| {
                let (part, range) = parts_left.next_if(|(part, _)| part.index == index)?;
                Some((&mut running.job, part, &logits[range.clone()]))
            })
            .collect();
        let choose = |(job, part, rows): (&mut Job, &Part, &[Vec<f32>])| {
            let span = (part.start, part.start + part.tokens);
            let came = job.take(span, rows, max_positions);
            let came = came.unwrap_or_else(|error| vec![Update::Failed(Arc::new(error))]);
            (job.id, came)
        };
        let of_parts: Vec<_> = jobs.into_par_iter().map(choose).collect();
        // From the last on: those that end leave the list.
        for (part, (_, came)) in parts.iter().zip(&of_parts).rev() {
            let tokens = came.iter().filter(|u| matches!(u, Update::Token { .. }));
            self.stats.generated_tokens += tokens.count() as u64;
            if came.last().is_some_and(Update::is_last) {
                self.end(part.index);
            }
        }
        for (id, came) in of_parts {
            updates.extend(came.into_iter().map(|update| (id, update)));
        }
        self.stats.choosing += begun.elapsed();
    }

    /// Ends the requests of a step that failed.
    fn fail(&mut self, parts: &[Part], error: Error, updates: &mut Vec<(RequestId, Update)>) {
        let error = Arc::new(error);
        for part in parts {
            let id = self.running[part.index].job.id;
            updates.push((id, Update::Failed(error.clone())));
        }
        for part in parts.iter().rev() {
            self.end(part.index);
        }
    }

    /// Takes a request out of those that run.
    fn end(&mut self, index: usize) -> Job {
        let Running { job, sequence } = self.running.remove(index);
        let removed = self.runner.remove(sequence);
        debug_assert!(removed.is_ok(), "the sequence of a request is in the cache");
        job
    }
}

/// Refuses a request that cannot run, of an engine whose cache holds `fits` tokens of one sequence.
pub(super) fn check(
    model: &Model,
    options: &EngineOptions,
    request: &EngineRequest,
    fits: usize,
) -> Result<(), EngineError> {
    check_prompt(model, &request.prompt)?;
    request.sampling.validate().map_err(Error::from)?;
    if let Some(index) = request.stop_texts.iter().position(String::is_empty) {
        return Err(EngineError::EmptyStopText { index });
    }
    if options.tokenizer.is_none() && !request.stop_texts.is_empty() {
        return Err(EngineError::NoTokenizer);
    }
    // The last token that is chosen is not computed.
    let new = request.max_new_tokens.saturating_sub(1);
    let tokens = request.prompt.len().saturating_add(new);
    let tokens = tokens.min(model.config().max_positions);
    if tokens > fits {
        return Err(EngineError::TooLong { tokens, fits });
    }
    Ok(())
}
