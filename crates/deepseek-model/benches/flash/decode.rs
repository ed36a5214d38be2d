//! Decode: steps in which each of some sequences goes on by one token, after contexts that nobody
//! computed.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, ensure};
use deepseek_model::{
    CacheOptions, Config, Graphs, LayerStats, LogitRows, Model, ReplayPolicy, Runner,
    RunnerOptions, SequenceId, SequenceOptions, StepMode, StepRequest, StepStats, device,
};
use serde::Serialize;

use super::{
    cost::{Cost, Phases, Step, Work},
    geometry::MOST_STEPS,
    pace::{Kind, Pace, Runs},
    prefill::{described, held},
    record::{Capture, Outcome, capture, peak},
    spread::Spread,
    tasks::DecodeCase,
};

/// Times of a decode step, in seconds.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Decode {
    #[serde(flatten)]
    pub(crate) case: DecodeCase,
    /// Seconds from the call to the next token ids on the host.
    pub(crate) step: Spread,
    /// Seconds of the step on the device.
    pub(crate) device: Spread,
    /// Work of each phase.
    pub(crate) work: Phases,
    /// How the last step ran.
    pub(crate) mode: String,
    pub(crate) capture: Option<Capture>,
    /// Most bytes that tensors took at once, the weights among them, graphs' own not.
    pub(crate) peak_bytes: Option<u64>,
}

impl Decode {
    pub(crate) fn total(&self) -> Work {
        self.work.into_iter().sum()
    }
}

/// Measures a decode step, as often as the budget has room for.
pub(crate) fn measure(model: &Arc<Model>, case: DecodeCase, pace: &Pace) -> Result<Outcome> {
    let config = model.config();
    let cost = Cost::new(config, held(model));
    let work = work(&cost, config, case);
    let kind = Kind::Decode {
        graphs: case.graphs,
    };
    let once = pace.predict(kind, work.into_iter().sum());
    let most = Runs {
        warm: 4,
        measured: 20,
    };
    let all = (most.warm + most.measured) as f64 * once;
    // Memory is taken and filled, and one graph captured.
    let Some(runs) = pace.runs(all, 2.0 * once).map(|_| most) else {
        return Ok(Outcome::Skipped { predicted: all });
    };
    device::reset_peak(model.device())?;
    let mut runner = runner(model, case)?;
    let capture = capture(&mut runner, case.graphs)?;
    runner.fill_random(11)?;
    let mut bench = Bench::new(runner, case)?;
    for run in 0..runs.warm + runs.measured {
        if pace.left() <= 0.0 {
            break;
        }
        bench.step(run >= runs.warm)?;
    }
    if bench.steps.is_empty() {
        return Ok(Outcome::Stopped { predicted: all });
    }
    Ok(Outcome::Decode(Decode {
        case,
        step: Spread::of(bench.steps),
        device: Spread::of(bench.device),
        work,
        mode: described(bench.mode),
        capture,
        peak_bytes: peak(model.device())?,
    }))
}

/// Work of a step, phase by phase.
pub(crate) fn work(cost: &Cost, config: &Config, case: DecodeCase) -> Phases {
    let row = vec![1; case.batch];
    let layer = LayerStats {
        written: row.clone(),
        run: row.clone(),
    };
    let stats = StepStats {
        query_rows: row,
        layers: vec![layer; config.layers.len()],
    };
    cost.step(&Step {
        starts: &vec![case.context; case.batch],
        stats: &stats,
        read: case.batch,
        mode: StepMode::Eager,
    })
}

fn runner(model: &Arc<Model>, case: DecodeCase) -> Result<Runner> {
    let cache = CacheOptions {
        max_sequences: case.batch,
        max_tokens: case.batch * (case.context + MOST_STEPS),
        page_tokens: CacheOptions::PAGE_TOKENS,
        // Every policy runs every decode row.
        policy: ReplayPolicy::PromptTail,
        sampled_rows: NonZeroU32::MIN,
    };
    let options = RunnerOptions {
        graphs: if case.graphs {
            Graphs::Full
        } else {
            Graphs::Off
        },
        capture_sizes: vec![case.batch as u32],
        profile: true,
        ..RunnerOptions::default()
    };
    Ok(Runner::new(model.clone(), cache, &options)?)
}

struct Bench {
    runner: Runner,
    sequences: Vec<SequenceId>,
    /// The last token of each.
    ids: Vec<u32>,
    mode: StepMode,
    steps: Vec<f64>,
    device: Vec<f64>,
}

impl Bench {
    fn new(mut runner: Runner, case: DecodeCase) -> Result<Self> {
        let sequences = (0..case.batch).map(|_| {
            let sequence = runner.add(SequenceOptions {
                prompt_len: case.context,
                keeps_rows: false,
            })?;
            runner.assume(sequence, case.context)?;
            Ok(sequence)
        });
        Ok(Self {
            sequences: sequences.collect::<Result<_>>()?,
            // Rows of one token would choose the same experts.
            ids: (0..case.batch as u32).map(|i| 3 + i).collect(),
            runner,
            mode: StepMode::Eager,
            steps: Vec::new(),
            device: Vec::new(),
        })
    }

    fn step(&mut self, measured: bool) -> Result<()> {
        let requests = self.sequences.iter().zip(&self.ids);
        let requests: Vec<_> = requests
            .map(|(&sequence, id)| StepRequest {
                sequence,
                tokens: std::slice::from_ref(id),
                logits: LogitRows::Last,
            })
            .collect();
        self.runner.model().device().synchronize()?;
        let begun = Instant::now();
        let (output, mode) = self.runner.forward(&requests)?;
        let ids: Vec<u32> = output.logits.argmax(1)?.to_vec1()?;
        let seconds = begun.elapsed().as_secs_f64();
        let vocab = self.runner.model().config().vocab_size;
        ensure!(
            ids.iter().all(|id| (*id as usize) < vocab),
            "no token: {ids:?}"
        );
        self.ids = ids;
        self.mode = mode;
        if measured {
            self.steps.push(seconds);
            let times = self.runner.profile()?.unwrap_or_default();
            self.device.push(times.total().as_secs_f64());
        }
        Ok(())
    }
}
