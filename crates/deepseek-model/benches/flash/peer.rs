//! What PyTorch took for the same phases, as `peer_torch.py` has written it.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use deepseek_model::PhaseTimes;
use serde::{Deserialize, Serialize};

use super::{geometry::short, record::Record};

/// Milliseconds, operation by operation and in a CUDA graph.
#[derive(Debug, Clone, Copy, Deserialize, Serialize)]
struct Times {
    eager: Option<f64>,
    graph: Option<f64>,
}

/// Phases of a prompt.
#[derive(Debug, Clone, Deserialize, Serialize)]
struct Prompt {
    rows: usize,
    policy: String,
    phases: std::collections::BTreeMap<String, Times>,
}

/// A decode step.
#[derive(Debug, Clone, Deserialize, Serialize)]
struct Decode {
    batch: usize,
    context: usize,
    step: Times,
}

/// A run of the script.
#[derive(Debug, Clone, Deserialize, Serialize)]
pub(crate) struct Peer {
    device: String,
    torch: String,
    prompts: Vec<Prompt>,
    decode: Vec<Decode>,
}

impl Peer {
    /// Reads what the script wrote.
    pub(crate) fn read(file: &Path) -> Result<Self> {
        let text =
            std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
        let peer = serde_json::from_slice(&text).map_err(anyhow::Error::from);
        let peer = peer.and_then(|peer: Self| peer.check().map(|()| peer));
        peer.with_context(|| format!("{} is not what peer_torch.py writes", file.display()))
    }

    /// Whether it can stand in a table.
    fn check(&self) -> Result<()> {
        let named = self.prompts.iter().flat_map(|prompt| prompt.phases.iter());
        let steps = self.decode.iter().map(|decode| &decode.step);
        for times in named.map(|(_, times)| times).chain(steps) {
            for ms in [times.eager, times.graph].into_iter().flatten() {
                ensure!(ms >= 0.0, "expected times of 0 ms or more, got {ms}");
            }
        }
        let policies = self.prompts.iter().map(|prompt| &prompt.policy);
        for name in policies.chain([&self.device, &self.torch]) {
            let odd = |c: char| c.is_control() || c == '|';
            ensure!(!name.contains(odd), "expected a name, got {name:?}");
        }
        Ok(())
    }

    /// Prints it beside what was measured here of the same.
    pub(crate) fn print(&self, record: &Record, out: &mut dyn Write) -> Result<()> {
        writeln!(
            out,
            "\nBeside PyTorch {} on {}, in ms.\n",
            self.torch, self.device
        )?;
        writeln!(
            out,
            "| what | here, eager | here, graphs | PyTorch, eager | PyTorch, graphs |"
        )?;
        writeln!(out, "|---|---|---|---|---|")?;
        for prompt in &self.prompts {
            for (i, (phase, _)) in PhaseTimes::default().phases().iter().enumerate() {
                let here = [false, true].map(|graphs| here(record, prompt, graphs, i));
                let there = prompt.phases.get(*phase).copied();
                let name = format!("{}, {}: {phase}", short(prompt.rows), prompt.policy);
                line(out, &name, here, there)?;
            }
        }
        for decode in &self.decode {
            let here = [false, true].map(|graphs| {
                let mut measured = record.decode.iter();
                let same = measured.find(|here| {
                    let case = here.case;
                    (case.batch, case.context, case.graphs)
                        == (decode.batch, decode.context, graphs)
                });
                same.map(|here| here.device.median * 1e3)
            });
            let name = format!("decode of {} after {}", decode.batch, short(decode.context));
            line(out, &name, here, Some(decode.step))?;
        }
        Ok(())
    }
}

/// Milliseconds of a phase as it was measured here.
fn here(record: &Record, prompt: &Prompt, graphs: bool, phase: usize) -> Option<f64> {
    let same = record.prefill.iter().find(|here| {
        let case = here.case;
        case.length == prompt.rows
            && case.length <= record.chunk
            && case.graphs == graphs
            && case.policy.to_string() == prompt.policy
    });
    same.map(|here| here.phases[phase].median * 1e3)
}

fn line(
    out: &mut dyn Write,
    name: &str,
    here: [Option<f64>; 2],
    there: Option<Times>,
) -> std::io::Result<()> {
    let there = there.map_or([None; 2], |times| [times.eager, times.graph]);
    write!(out, "| {name} |")?;
    for ms in here.into_iter().chain(there) {
        let text = ms.map_or_else(String::new, |ms| format!("{ms:.2}"));
        write!(out, " {text} |")?;
    }
    writeln!(out)
}
