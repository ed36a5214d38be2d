//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use candle_core::Device;
use deepseek_model::ReplayPolicy;

use super::{
    geometry::{Geometry, short},
    tasks::ServingCase,
};

/// Steps of a prompt at most: each is planned before the first runs.
const MOST_CHUNKS: usize = 1 << 14;

/// What `--help` prints.
pub(crate) const HELP: &str = "\
Measures DeepSeek-V4.1-Flash's geometry with random weights on a CUDA device.

What matters most is measured first; what would end after the budget is skipped and listed.

  --budget SECONDS   what the whole run may take, with drawing the weights (default 900)
  --lengths LIST     lengths of prompts, such as 1K,32K, up to 1024K (default 1K,4K,8K,32K,128K)
  --policies LIST    of off, prompt-tail, step-tail, exact (default all)
  --contexts LIST    contexts that are decoded after (default 1K,32K,128K); `none`: no decode
  --batches LIST     sequences that are decoded at once (default 1,8,32)
  --serving LIST     requests that are served at once (default 32,64); `none`: nothing is served
  --graphs LIST      of off, on (default both)
  --chunk ROWS       rows of a prompt that one step takes (default 8K, tiny 128)
  --json FILE        write all figures there, after each measurement
  --svg FILE         draw time to first token there
  --peer FILE        print what peer_torch.py wrote there beside it
  --seed NUMBER      of weights (default 1); prompts are always the same
  --tiny             a model of nine small layers, on the CPU where there is no CUDA device
";

/// What is asked for; empty lists mean the defaults of the model, and so does `None`.
#[derive(Debug, Clone)]
pub(crate) struct Flags {
    pub(crate) budget: Duration,
    lengths: Vec<usize>,
    policies: Vec<ReplayPolicy>,
    contexts: Option<Vec<usize>>,
    batches: Vec<usize>,
    serving: Option<Vec<usize>>,
    graphs: Vec<bool>,
    chunk: Option<usize>,
    pub(crate) json: Option<PathBuf>,
    pub(crate) svg: Option<PathBuf>,
    pub(crate) peer: Option<PathBuf>,
    pub(crate) seed: u64,
    pub(crate) tiny: bool,
    pub(crate) help: bool,
}

impl Flags {
    /// Reads the words after the program's name.
    pub(crate) fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Self> {
        let mut flags = Self {
            budget: Duration::from_secs(900),
            lengths: Vec::new(),
            policies: Vec::new(),
            contexts: None,
            batches: Vec::new(),
            serving: None,
            graphs: Vec::new(),
            chunk: None,
            json: None,
            svg: None,
            peer: None,
            seed: 1,
            tiny: false,
            help: false,
        };
        let mut words = words.into_iter().map(|word| {
            let text = word.into_string();
            text.map_err(|word| anyhow!("expected text in UTF-8, got {}", word.display()))
        });
        while let Some(word) = words.next() {
            let word = word?;
            let mut value = || words.next().context("expected a value, got none")?;
            flags
                .take(&word, &mut value)
                .with_context(|| word.clone())?;
        }
        Ok(flags)
    }

    fn take(&mut self, flag: &str, value: &mut dyn FnMut() -> Result<String>) -> Result<()> {
        match flag {
            "--budget" => self.budget = seconds(&value()?)?,
            "--lengths" => self.lengths = list(&value()?, count)?,
            "--policies" => self.policies = list(&value()?, |text| Ok(text.parse()?))?,
            "--contexts" => self.contexts = Some(list_or_none(&value()?, count)?),
            "--serving" => self.serving = Some(list_or_none(&value()?, count)?),
            "--batches" => self.batches = list(&value()?, count)?,
            "--graphs" => self.graphs = list(&value()?, on_or_off)?,
            "--chunk" => self.chunk = Some(count(&value()?)?),
            "--json" => self.json = Some(value()?.into()),
            "--svg" => self.svg = Some(value()?.into()),
            "--peer" => self.peer = Some(value()?.into()),
            "--seed" => self.seed = value()?.parse().context("expected a number")?,
            "--tiny" => self.tiny = true,
            "--help" | "-h" => self.help = true,
            // Cargo passes it to every bench.
            "--bench" => {}
            _ => bail!("no such flag: --help lists them"),
        }
        Ok(())
    }

    /// What is measured: the defaults of the model, but for what is asked for.
    ///
    /// # Errors
    /// If a prompt would take more steps than anyone waits for.
    pub(crate) fn geometry(&self) -> Result<Geometry> {
        fn or<T: Clone>(asked: &[T], default: &mut Vec<T>) {
            if !asked.is_empty() {
                *default = asked.to_vec();
            }
        }
        let mut geometry = Geometry::new(self.tiny);
        or(&self.lengths, &mut geometry.lengths);
        or(&self.policies, &mut geometry.policies);
        or(&self.batches, &mut geometry.batches);
        or(&self.graphs, &mut geometry.graphs);
        geometry.chunk = self.chunk.unwrap_or(geometry.chunk);
        if let Some(contexts) = &self.contexts {
            geometry.contexts.clone_from(contexts);
        }
        if let (Some(asked), Some(&case)) = (&self.serving, geometry.serving.first()) {
            let of = |&requests| ServingCase { requests, ..case };
            geometry.serving = asked.iter().map(of).collect();
        }
        let chunk = geometry.chunk;
        for &length in &geometry.lengths {
            let steps = length.div_ceil(chunk);
            ensure!(
                steps <= MOST_CHUNKS,
                "a prompt of {} in chunks of {chunk} takes {steps} steps: expected at most \
                 {MOST_CHUNKS} (--lengths, --chunk)",
                short(length)
            );
        }
        Ok(geometry)
    }

    /// The device to measure on.
    pub(crate) fn device(&self) -> Result<Device> {
        if candle_core::utils::cuda_is_available() {
            match deepseek_model::device::open_cuda(0) {
                Ok(device) => return Ok(device),
                Err(error) if !self.tiny => return Err(error.into()),
                Err(_) => {}
            }
        }
        ensure!(
            self.tiny,
            "expected a build with the feature cuda, or --tiny, which runs on the cpu"
        );
        Ok(Device::Cpu)
    }
}

/// What is there twice is measured once.
fn list<T: PartialEq>(text: &str, parse: impl Fn(&str) -> Result<T>) -> Result<Vec<T>> {
    let mut list = Vec::new();
    for item in text.split(',') {
        let item = parse(item)?;
        if !list.contains(&item) {
            list.push(item);
        }
    }
    Ok(list)
}

fn list_or_none<T: PartialEq>(text: &str, parse: impl Fn(&str) -> Result<T>) -> Result<Vec<T>> {
    match text {
        "none" => Ok(Vec::new()),
        _ => list(text, parse),
    }
}

fn seconds(text: &str) -> Result<Duration> {
    let seconds = text.parse().ok();
    let budget = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    budget.with_context(|| format!("expected seconds, 0 or more, got {text:?}"))
}

/// A number above 0, such as `8192` or `8K`.
fn count(text: &str) -> Result<usize> {
    let (digits, unit) = match text.strip_suffix(['k', 'K']) {
        Some(digits) => (digits, 1024),
        None => (text, 1),
    };
    let number: Option<usize> = digits.parse().ok();
    let number = number.and_then(|number| number.checked_mul(unit));
    number
        .filter(|number| (1..=1 << 20).contains(number))
        .with_context(|| format!("expected a number from 1 to 1024K, got {text:?}"))
}

fn on_or_off(text: &str) -> Result<bool> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => bail!("expected on or off, got {text:?}"),
    }
}
