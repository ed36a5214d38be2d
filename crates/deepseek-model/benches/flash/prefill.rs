//! Time to first token: from the first step of a prompt to the logits of its last row on the host.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, ensure};
use deepseek_model::{
    CacheOptions, Graphs, LogitRows, Model, PhaseTimes, Runner, RunnerOptions, SequenceOptions,
    StepMode, StepRequest, device,
};
use serde::Serialize;

use super::{
    cost::{Cost, Phases, Step, Work},
    geometry::Geometry,
    model::prompt,
    pace::{Kind, Pace},
    plan,
    record::{Capture, Outcome, capture, peak},
    spread::Spread,
    tasks::PrefillCase,
};

/// Times of one prompt, in seconds.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Prefill {
    #[serde(flatten)]
    pub(crate) case: PrefillCase,
    /// Seconds from the first step to the logits.
    pub(crate) ttft: Spread,
    /// Seconds of each phase on the device, all steps together.
    pub(crate) phases: [Spread; 6],
    /// Work of each phase.
    pub(crate) work: Phases,
    /// How the last step ran.
    pub(crate) mode: String,
    /// Rows that ran, over layers, as a share of all.
    pub(crate) row_layers: f64,
    pub(crate) capture: Option<Capture>,
    /// Most bytes that tensors took at once, the weights among them, graphs' own not.
    pub(crate) peak_bytes: Option<u64>,
}

impl Prefill {
    pub(crate) fn total(&self) -> Work {
        self.work.into_iter().sum()
    }
}

/// Measures a prompt, as often as the budget has room for.
pub(crate) fn measure(
    model: &Arc<Model>,
    geometry: &Geometry,
    case: PrefillCase,
    pace: &Pace,
) -> Result<Outcome> {
    let (config, chunk) = (model.config(), geometry.chunk);
    let cost = Cost::new(config, held(model));
    let planned = plan::work(&cost, config, case.policy, (case.length, chunk))?;
    let once = pace.predict(Kind::Prefill, planned.into_iter().sum());
    // A capture runs all layers once, in each of its sizes.
    let setup = if case.graphs { 2.0 * once } else { 0.0 };
    let Some(runs) = pace.runs(once, setup) else {
        return Ok(Outcome::Skipped { predicted: once });
    };
    device::reset_peak(model.device())?;
    let mut runner = runner(model, case, chunk)?;
    let capture = capture(&mut runner, case.graphs)?;
    let bench = Bench {
        tokens: prompt(config.vocab_size, case.length, 7),
        cost,
        chunk,
        pace,
    };
    let mut passes = Vec::new();
    for run in 0..runs.warm + runs.measured {
        let Some(pass) = bench.pass(&mut runner)? else {
            break;
        };
        if run >= runs.warm {
            passes.push(pass);
        }
    }
    let Some(last) = passes.last() else {
        return Ok(Outcome::Stopped { predicted: once });
    };
    let phase = |i: usize| {
        let times = passes.iter().map(|pass| pass.phases.phases()[i].1);
        Spread::of(times.map(|time| time.as_secs_f64()))
    };
    Ok(Outcome::Prefill(Prefill {
        case,
        ttft: Spread::of(passes.iter().map(|pass| pass.ttft)),
        phases: std::array::from_fn(phase),
        work: last.work,
        mode: last.mode.clone(),
        row_layers: last.row_layers,
        capture,
        peak_bytes: peak(model.device())?,
    }))
}

/// Bytes of an activation of the model.
pub(crate) fn held(model: &Model) -> usize {
    if model.device().is_cpu() { 4 } else { 2 }
}

fn runner(model: &Arc<Model>, case: PrefillCase, chunk: usize) -> Result<Runner> {
    let cache = CacheOptions {
        max_sequences: 1,
        max_tokens: case.length,
        page_tokens: CacheOptions::PAGE_TOKENS,
        policy: case.policy,
        sampled_rows: NonZeroU32::MIN,
    };
    let mut sizes = vec![chunk.min(case.length) as u32];
    let rest = (case.length % chunk) as u32;
    if case.length > chunk && rest > 0 {
        sizes.push(rest);
    }
    let options = RunnerOptions {
        graphs: if case.graphs {
            Graphs::Piecewise
        } else {
            Graphs::Off
        },
        capture_sizes: sizes,
        profile: true,
        ..RunnerOptions::default()
    };
    Ok(Runner::new(model.clone(), cache, &options)?)
}

struct Bench<'a> {
    tokens: Vec<u32>,
    cost: Cost,
    chunk: usize,
    pace: &'a Pace,
}

/// One prompt.
struct Pass {
    ttft: f64,
    phases: PhaseTimes,
    work: Phases,
    mode: String,
    row_layers: f64,
}

impl Bench<'_> {
    /// Runs the prompt; `None` if the budget ended meanwhile.
    fn pass(&self, runner: &mut Runner) -> Result<Option<Pass>> {
        let sequence = runner.add(SequenceOptions {
            prompt_len: self.tokens.len(),
            keeps_rows: false,
        })?;
        let mut steps = Vec::new();
        let mut phases = PhaseTimes::default();
        let mut ttft = None;
        runner.model().device().synchronize()?;
        let begun = Instant::now();
        for (i, tokens) in self.tokens.chunks(self.chunk).enumerate() {
            if self.pace.left() <= 0.0 {
                break;
            }
            let is_last = (i + 1) * self.chunk >= self.tokens.len();
            let logits = if is_last {
                LogitRows::Last
            } else {
                LogitRows::None
            };
            let request = StepRequest {
                sequence,
                tokens,
                logits,
            };
            let (output, mode) = runner.forward(&[request])?;
            if is_last {
                let logits: Vec<Vec<f32>> = output.logits.to_vec2()?;
                ttft = Some(begun.elapsed().as_secs_f64());
                let finite = logits.iter().flatten().all(|x| x.is_finite());
                ensure!(finite, "expected finite logits of the last row");
            }
            if let Some(times) = runner.profile()? {
                phases = phases.plus(&times);
            }
            steps.push((output.stats, mode));
        }
        runner.remove(sequence)?;
        let Some(ttft) = ttft else {
            return Ok(None);
        };
        Ok(Some(self.finished(ttft, phases, &steps)))
    }

    fn finished(
        &self,
        ttft: f64,
        phases: PhaseTimes,
        steps: &[(deepseek_model::StepStats, StepMode)],
    ) -> Pass {
        let mut work = Phases::default();
        for (i, (stats, mode)) in steps.iter().enumerate() {
            let step = self.cost.step(&Step {
                starts: &[i * self.chunk],
                stats,
                read: usize::from(i + 1 == steps.len()),
                mode: *mode,
            });
            for (all, phase) in work.iter_mut().zip(step) {
                *all += phase;
            }
        }
        let sum = |count: fn(&deepseek_model::StepStats) -> usize| -> f64 {
            steps.iter().map(|(stats, _)| count(stats)).sum::<usize>() as f64
        };
        let all = sum(deepseek_model::StepStats::row_layers_without_replay);
        Pass {
            ttft,
            phases,
            work,
            mode: steps
                .last()
                .map_or(String::new(), |(_, mode)| described(*mode)),
            row_layers: sum(deepseek_model::StepStats::row_layers) / all,
        }
    }
}

/// How a step ran, in a word or two.
pub(crate) fn described(mode: StepMode) -> String {
    match mode {
        StepMode::Eager => "eager".into(),
        StepMode::Full { padded_rows } => format!("graph of {padded_rows}"),
        StepMode::Piecewise { padded_rows, broke } => {
            use deepseek_model::ReplayLaunch::{Eager, Graph, Skip};
            let broke = match broke {
                None => String::new(),
                Some(Skip) => ", none kept".into(),
                Some(Eager) => ", then eager".into(),
                Some(Graph { padded_rows }) => format!(", then {}", padded_rows.as_usize()),
            };
            format!("graph of {padded_rows}{broke}")
        }
        _ => "unknown".into(),
    }
}
