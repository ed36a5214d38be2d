//! An engine that runs a group of requests, and what each of them gets.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use deepseek_model::Model;
use deepseek_model::engine::{EndReason, EngineCore, EngineOptions, RequestId, Update};
use indicatif::ProgressBar;

use super::file::Results;
use super::record::{Outcome, Record};
use super::report::Totals;
use super::request::Request;
use crate::interrupt::Interrupt;
use crate::{backtraces, progress};

/// A request on its way.
#[derive(Default)]
struct Job {
    index: usize,
    text: String,
    ids: Vec<u32>,
    cached: usize,
    started: Option<Instant>,
    /// Seconds.
    first_token: Option<f64>,
    prompt_logprobs: Vec<f32>,
    logprobs: Vec<f32>,
}

/// An engine with the requests that are in it.
pub(super) struct Server<'a> {
    engine: EngineCore,
    /// Requests that may wait in it.
    places: usize,
    requests: &'a [Request],
    jobs: HashMap<RequestId, Job>,
}

impl<'a> Server<'a> {
    /// # Errors
    /// As [`EngineCore::new`].
    pub(super) fn new(
        model: Arc<Model>,
        options: EngineOptions,
        requests: &'a [Request],
    ) -> deepseek_model::Result<Self> {
        Ok(Self {
            places: options.max_waiting,
            engine: EngineCore::new(model, options)?,
            requests,
            jobs: HashMap::new(),
        })
    }

    /// Captures the graphs, behind a progress bar if someone watches.
    ///
    /// # Errors
    /// They cannot be captured; the steps run without.
    pub(super) fn capture(&mut self, watched: bool) -> deepseek_model::Result<()> {
        let bar = progress::capture(watched);
        let captured = self.engine.capture(|done, total| {
            bar.set_length(total as u64);
            bar.set_position(done as u64);
        });
        bar.finish_and_clear();
        captured.map(|_| ())
    }

    /// Runs requests to their ends, or to an interrupt.
    ///
    /// # Errors
    /// A result cannot be written. A request that fails is a result.
    pub(super) fn serve(
        mut self,
        indices: &[usize],
        results: &mut Results<'_>,
        totals: &mut Totals,
        bar: &ProgressBar,
        interrupt: Option<&Interrupt>,
    ) -> anyhow::Result<()> {
        let begun = Instant::now();
        let mut indices = indices.iter();
        loop {
            let places = self.places.saturating_sub(self.engine.stats().waiting);
            for &index in indices.by_ref().take(places) {
                let request = self.requests[index].engine.clone();
                match self.engine.submit(request) {
                    Ok(id) => {
                        let job = Job {
                            index,
                            ..Job::default()
                        };
                        self.jobs.insert(id, job);
                    }
                    Err(error) => {
                        totals.failed += 1;
                        let error = backtraces::told(error);
                        let line = self.record(index, Outcome::Error { error })?;
                        bar.suspend(|| results.give(index, line))?;
                    }
                }
            }
            let interrupted = interrupt.and_then(Interrupt::came).is_some();
            if interrupted || self.engine.is_idle() {
                break;
            }
            let step = Instant::now();
            for (id, update) in self.engine.step() {
                if let Some((index, line)) = self.take(id, update, step, totals)? {
                    // Both may be on one terminal, where the bar would draw over a result.
                    bar.suspend(|| results.give(index, line))?;
                }
            }
            bar.set_position(totals.done() as u64);
            bar.set_message(totals.live(&self.engine.stats(), begun.elapsed()));
        }
        totals.add(&self.engine.stats(), begun.elapsed());
        Ok(())
    }

    /// Takes what happened to a request in the step that began at `step`: its result, if it has ended.
    fn take(
        &mut self,
        id: RequestId,
        update: Update,
        step: Instant,
        totals: &mut Totals,
    ) -> anyhow::Result<Option<(usize, Vec<u8>)>> {
        let job = self.jobs.get_mut(&id).context("an update of no request")?;
        match update {
            Update::Started { cached } => {
                job.started = Some(step);
                job.cached = cached.start;
            }
            Update::Prompt { logprobs } => {
                let known = logprobs.into_iter().map(|token| token.logprob);
                job.prompt_logprobs = known.collect();
            }
            Update::Token { id, logprob, text } => {
                if let (Some(started), None) = (job.started, job.first_token) {
                    job.first_token = Some(started.elapsed().as_secs_f64());
                }
                job.ids.push(id);
                job.logprobs.extend(logprob.map(|token| token.logprob));
                job.text.push_str(&text);
            }
            Update::Finished { reason, text } => {
                job.text.push_str(&text);
                totals.first_tokens(job.first_token);
                totals.answered += 1;
                return Ok(Some(
                    self.end(id, |job, request| job.answer(request, reason))?,
                ));
            }
            Update::Failed(error) => {
                totals.failed += 1;
                let error = backtraces::told(error);
                return Ok(Some(self.end(id, |_, _| Outcome::Error { error })?));
            }
        }
        Ok(None)
    }

    /// The result of a request that has ended.
    fn end(
        &mut self,
        id: RequestId,
        outcome: impl for<'j> FnOnce(&'j Job, &'j Request) -> Outcome<'j>,
    ) -> anyhow::Result<(usize, Vec<u8>)> {
        let job = self.jobs.remove(&id).expect("it ran");
        let request = &self.requests[job.index];
        let line = self.record(job.index, outcome(&job, request))?;
        Ok((job.index, line))
    }

    fn record(&self, index: usize, outcome: Outcome<'_>) -> anyhow::Result<Vec<u8>> {
        let record = Record::new(&self.requests[index], outcome);
        Ok(serde_json::to_vec(&record)?)
    }
}

impl Job {
    fn answer<'j>(&'j self, request: &'j Request, reason: EndReason) -> Outcome<'j> {
        let asked = &request.engine;
        let of_prompt = || {
            let known = self.prompt_logprobs.iter().copied().map(Some);
            std::iter::once(None).chain(known).collect()
        };
        let stop = match reason {
            EndReason::StopText { index } => Some(asked.stop_texts[index].as_str()),
            _ => None,
        };
        Outcome::Answer {
            text: &self.text,
            ids: &self.ids,
            finish: reason.into(),
            stop,
            prompt_tokens: asked.prompt.len(),
            cached_tokens: self.cached,
            time_to_first_token_s: self.first_token,
            prompt_logprobs_nats: asked.logprobs.map(|_| of_prompt()),
            logprobs_nats: asked.logprobs.map(|_| &self.logprobs[..]),
        }
    }
}
