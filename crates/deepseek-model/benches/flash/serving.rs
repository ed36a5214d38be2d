//! Serving: requests that share a long beginning, one after the other and all at once, in the engine.

use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use deepseek_model::engine::{
    EngineCore, EngineOptions, EngineRequest, EngineStats, RequestId, Update,
};
use deepseek_model::{CacheOptions, Graphs, Model, ReplayPolicy, RunnerOptions};
use serde::Serialize;

use super::{
    cost::{Cost, Phases, Work},
    decode,
    geometry::Geometry,
    model::prompt,
    pace::{Kind, Pace},
    plan,
    prefill::held,
    record::Outcome,
    spread::Spread,
    tasks::{DecodeCase, ServingCase},
};

/// Requests whose time to first token is measured alone, and of those that are served one by one.
const HITS: usize = 3;
const SERIAL: usize = 4;

/// Times of requests, in seconds.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Serving {
    #[serde(flatten)]
    pub(crate) case: ServingCase,
    /// To the first token of the first prompt, of which nothing is in the cache.
    pub(crate) cold: f64,
    /// The same of prompts whose beginning is.
    pub(crate) hit: Spread,
    /// Of a request that is alone, from its submission to its end; its beginning is in the cache.
    pub(crate) alone: Spread,
    /// Of all at once, to the end of the last.
    pub(crate) together: f64,
    /// Their first tokens, from the submission of all.
    pub(crate) together_ttft: Spread,
    /// Steps of all at once.
    pub(crate) steps: u64,
    /// Of each of these steps: deciding what runs in it.
    pub(crate) planning: Spread,
    /// And choosing tokens.
    pub(crate) choosing: Spread,
    /// Of planning: steps that only decode, in which nobody begins.
    pub(crate) decode_planning: Spread,
}

impl Serving {
    /// Tokens that were chosen in a second, one request after the other and all at once.
    pub(crate) fn rates(&self) -> [f64; 2] {
        let new = self.case.new as f64;
        [
            new / self.alone.median,
            new * self.case.requests as f64 / self.together,
        ]
    }
}

/// Measures the requests, if the budget has room for them.
pub(crate) fn measure(
    model: &Arc<Model>,
    geometry: &Geometry,
    case: ServingCase,
    pace: &Pace,
) -> Result<Outcome> {
    let predicted = predicted(model, geometry, case, pace)?;
    if pace.runs(predicted, 0.0).is_none() {
        return Ok(Outcome::Skipped { predicted });
    }
    let mut bench = Bench::new(model, geometry, case)?;
    let cold = bench.first_token(0)?;
    let hits = (1..=HITS).map(|i| bench.first_token(i));
    let hit = Spread::of(hits.collect::<Result<Vec<_>>>()?);
    let alone = (0..SERIAL).map(|i| {
        let begun = Instant::now();
        bench.serve(&[1 + HITS + i], case.new)?;
        Ok(begun.elapsed().as_secs_f64())
    });
    let alone = Spread::of(alone.collect::<Result<Vec<_>>>()?);
    let all: Vec<usize> = (0..case.requests).map(|i| 1 + HITS + SERIAL + i).collect();
    let before = bench.engine.stats();
    let served = bench.serve(&all, case.new)?;
    let after = bench.engine.stats();
    Ok(Outcome::Serving(Serving {
        case,
        cold,
        hit,
        alone,
        together: served.seconds,
        together_ttft: Spread::of(served.first_tokens),
        steps: after.steps - before.steps,
        planning: Spread::of(served.steps.iter().map(|step| step.planning)),
        choosing: Spread::of(served.steps.iter().map(|step| step.choosing)),
        decode_planning: {
            let decode = served.steps.iter().filter(|step| step.decodes);
            Spread::of(decode.map(|step| step.planning))
        },
    }))
}

fn predicted(model: &Model, geometry: &Geometry, case: ServingCase, pace: &Pace) -> Result<f64> {
    let (config, cost) = (model.config(), Cost::new(model.config(), held(model)));
    let prompt = |length| -> Result<f64> {
        let work = plan::work(
            &cost,
            config,
            ReplayPolicy::PromptTail,
            (length, geometry.chunk),
        )?;
        Ok(pace.predict(Kind::Prefill, total(work)))
    };
    let step = |batch| {
        let work = decode::work(
            &cost,
            config,
            DecodeCase {
                batch,
                context: case.shared + case.own,
                graphs: true,
            },
        );
        pace.predict(Kind::Decode { graphs: true }, total(work))
    };
    let own = (HITS + SERIAL + case.requests) as f64 * prompt(case.own)?;
    let steps = SERIAL as f64 * step(1) + step(case.requests);
    Ok(prompt(case.shared + case.own)? + own + case.new as f64 * steps)
}

fn total(work: Phases) -> Work {
    work.into_iter().sum()
}

struct Bench {
    engine: EngineCore,
    case: ServingCase,
    /// The beginning of all prompts.
    shared: Vec<u32>,
}

/// A step of the engine, in seconds.
struct EngineStep {
    planning: f64,
    choosing: f64,
    decodes: bool,
}

struct Served {
    seconds: f64,
    /// From the submission of all to the first token of each.
    first_tokens: Vec<f64>,
    steps: Vec<EngineStep>,
}

impl Bench {
    fn new(model: &Arc<Model>, geometry: &Geometry, case: ServingCase) -> Result<Self> {
        let page_tokens = CacheOptions::PAGE_TOKENS;
        let own = (case.own + case.new).next_multiple_of(page_tokens) + page_tokens;
        let options = EngineOptions {
            cache: CacheOptions {
                max_sequences: case.requests,
                max_tokens: case.shared + case.requests * own,
                page_tokens,
                policy: ReplayPolicy::PromptTail,
                sampled_rows: NonZeroU32::MIN,
            },
            runner: RunnerOptions {
                graphs: if geometry.graphs.contains(&true) {
                    Graphs::Full
                } else {
                    Graphs::Off
                },
                ..RunnerOptions::default()
            },
            max_step_tokens: NonZeroUsize::new(geometry.chunk).context("a chunk has rows")?,
            max_waiting: case.requests,
            prefix_cache: true,
            tokenizer: None,
        };
        let vocab = model.config().vocab_size;
        let mut engine = EngineCore::new(model.clone(), options)?;
        engine.capture(|_, _| {})?;
        Ok(Self {
            engine,
            case,
            shared: prompt(vocab, case.shared, 7),
        })
    }

    /// The prompt of that number: the shared beginning, and an end of its own.
    fn prompt(&self, number: usize) -> Vec<u32> {
        let vocab = self.engine.model().config().vocab_size;
        let own = prompt(vocab, self.case.own, 1000 + number as u64);
        [self.shared.as_slice(), &own].concat()
    }

    fn first_token(&mut self, number: usize) -> Result<f64> {
        let served = self.serve(&[number], 1)?;
        served.first_tokens.first().copied().context("one token")
    }

    /// Serves the prompts of those numbers, all at once, to their ends.
    fn serve(&mut self, numbers: &[usize], new: usize) -> Result<Served> {
        let prompts: Vec<_> = numbers.iter().map(|&number| self.prompt(number)).collect();
        self.engine.model().device().synchronize()?;
        let begun = Instant::now();
        let mut waiting: Vec<RequestId> = Vec::new();
        for prompt in prompts {
            waiting.push(self.engine.submit(EngineRequest::greedy(prompt, new))?);
        }
        let mut served = Served {
            seconds: 0.0,
            first_tokens: Vec::new(),
            steps: Vec::new(),
        };
        while !self.engine.is_idle() {
            let before = self.engine.stats();
            let updates = self.engine.step();
            let now = begun.elapsed().as_secs_f64();
            for (id, update) in &updates {
                match update {
                    Update::Failed(error) => bail!("{id}: {error}"),
                    Update::Token { .. } if waiting.contains(id) => {
                        waiting.retain(|other| other != id);
                        served.first_tokens.push(now);
                    }
                    _ => {}
                }
            }
            served.steps.push(step(&before, &self.engine.stats()));
        }
        served.seconds = begun.elapsed().as_secs_f64();
        Ok(served)
    }
}

fn step(before: &EngineStats, after: &EngineStats) -> EngineStep {
    EngineStep {
        planning: after.planning.as_secs_f64() - before.planning.as_secs_f64(),
        choosing: after.choosing.as_secs_f64() - before.choosing.as_secs_f64(),
        decodes: before.waiting == 0
            && after.generated_tokens - before.generated_tokens == before.running as u64,
    }
}
