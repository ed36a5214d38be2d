//! All that was measured, and what was not.

use std::io::Write;
use std::path::Path;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use candle_core::Device;
use deepseek_model::{Config, Runner, device};
use serde::Serialize;
use tempfile::NamedTempFile;

use super::{
    decode::Decode,
    flags::Flags,
    geometry::Geometry,
    model::Built,
    note,
    pace::{Kind, Pace},
    prefill::Prefill,
    rates::{self, Rates},
    serving::Serving,
    tasks::Task,
};

/// What came of a task.
#[derive(Debug, Clone)]
pub(crate) enum Outcome {
    Prefill(Prefill),
    Decode(Decode),
    Serving(Serving),
    /// Not begun: once would have taken so many seconds.
    Skipped {
        predicted: f64,
    },
    /// Begun, and the budget ended before one was done.
    Stopped {
        predicted: f64,
    },
}

/// What graphs of a task cost.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Capture {
    pub(crate) graphs: usize,
    pub(crate) seconds: f64,
    /// Bytes of the device that capturing took.
    pub(crate) device_bytes: i64,
    /// Bytes among them that graphs allocate from.
    pub(crate) graph_bytes: i64,
}

/// A run of this program.
#[derive(Debug, Serialize)]
pub(crate) struct Record {
    /// Seconds since 1970.
    pub(crate) date: u64,
    pub(crate) name: &'static str,
    pub(crate) device: String,
    pub(crate) chunk: usize,
    pub(crate) layers: usize,
    pub(crate) rates: Rates,
    pub(crate) model: Built,
    pub(crate) prefill: Vec<Prefill>,
    pub(crate) decode: Vec<Decode>,
    pub(crate) serving: Vec<Serving>,
    /// What the budget had no room for, and why.
    pub(crate) skipped: Vec<String>,
    /// What went wrong, and how.
    pub(crate) failed: Vec<String>,
    /// Seconds that the run took so far, and may take.
    pub(crate) seconds: f64,
    pub(crate) budget: f64,
}

impl Record {
    pub(crate) fn new(
        flags: &Flags,
        geometry: &Geometry,
        config: &Config,
        device: &Device,
        rates: Rates,
    ) -> Result<Self> {
        Ok(Self {
            date: SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs(),
            name: geometry.name,
            device: rates::name(device)?,
            chunk: geometry.chunk,
            layers: config.layers.len(),
            rates,
            model: Built::default(),
            prefill: Vec::new(),
            decode: Vec::new(),
            serving: Vec::new(),
            skipped: Vec::new(),
            failed: Vec::new(),
            seconds: 0.0,
            budget: flags.budget.as_secs_f64(),
        })
    }

    /// Keeps what came of a task, and says it in a line on standard error.
    pub(crate) fn take(&mut self, task: Task, outcome: Result<Outcome>, pace: &mut Pace) {
        let line = match outcome {
            Ok(Outcome::Prefill(prefill)) => {
                let seconds = prefill.ttft.median;
                pace.learn(Kind::Prefill, prefill.total(), seconds);
                self.prefill.push(prefill);
                format!("{task}: {:.1} ms", seconds * 1e3)
            }
            Ok(Outcome::Decode(decode)) => {
                let graphs = decode.case.graphs;
                let seconds = decode.step.median;
                pace.learn(Kind::Decode { graphs }, decode.total(), seconds);
                self.decode.push(decode);
                format!("{task}: {:.2} ms a step", seconds * 1e3)
            }
            Ok(Outcome::Serving(serving)) => {
                let seconds = serving.together;
                self.serving.push(serving);
                format!("{task}: {seconds:.2} s")
            }
            Ok(Outcome::Skipped { predicted }) => {
                let left = pace.left();
                let why = format!("{task}: about {predicted:.0} s, {left:.0} s were left");
                self.skipped.push(why.clone());
                format!("skipped {why}")
            }
            Ok(Outcome::Stopped { predicted }) => {
                let why = format!(
                    "{task}: stopped at the end of the budget, about {predicted:.0} s predicted"
                );
                self.skipped.push(why.clone());
                why
            }
            Err(error) => {
                let why = format!("{task}: {error:#}");
                self.failed.push(why.clone());
                format!("FAILED {why}")
            }
        };
        self.seconds = pace.spent();
        note(format_args!("[{:6.1} s] {line}", self.seconds));
    }

    /// Writes everything so far.
    pub(crate) fn save(&self, file: Option<&Path>) -> Result<()> {
        let Some(file) = file else {
            return Ok(());
        };
        write(file, &serde_json::to_string_pretty(self)?)
    }
}

/// A file that takes the place of `file` once it is written.
fn beside(file: &Path) -> std::io::Result<NamedTempFile> {
    if file.is_dir() {
        return Err(std::io::ErrorKind::IsADirectory.into());
    }
    let folder = file
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    NamedTempFile::new_in(folder.unwrap_or(Path::new(".")))
}

/// Whether a file can be written; leaves it as it is.
pub(crate) fn check(file: &Path) -> Result<()> {
    let made = beside(file).map(|_| ());
    made.with_context(|| format!("cannot write {}", file.display()))
}

/// Writes a file whole or not at all: what was there before is lost to no interruption.
pub(crate) fn write(file: &Path, text: &str) -> Result<()> {
    let written = || -> std::io::Result<()> {
        let mut beside = beside(file)?;
        beside.write_all(text.as_bytes())?;
        beside.persist(file)?;
        Ok(())
    };
    written().with_context(|| format!("cannot write {}", file.display()))
}

/// Most bytes that tensors have taken since [`device::reset_peak`], graphs' own left out.
pub(crate) fn peak(of: &Device) -> Result<Option<u64>> {
    Ok(device::memory(of)?.map(|memory| memory.peak))
}

/// Captures the graphs of a runner that has some.
pub(crate) fn capture(runner: &mut Runner, graphs: bool) -> Result<Option<Capture>> {
    if !graphs {
        return Ok(None);
    }
    let begun = Instant::now();
    let report = runner.capture(|_, _| {})?;
    runner.model().device().synchronize()?;
    Ok(Some(Capture {
        graphs: report.captured,
        seconds: begun.elapsed().as_secs_f64(),
        device_bytes: report.memory.device,
        graph_bytes: report.memory.graphs,
    }))
}
