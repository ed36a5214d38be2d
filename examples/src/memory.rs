//! What a run may take of its device's memory, and what it took.

use std::fmt;

use anyhow::anyhow;
use candle_core::Device;
use deepseek_model::memory::{Bytes, Demand, MemoryError, MemoryUse};
use deepseek_model::{CaptureReport, Error, device};

use crate::count;
use crate::graphs::FEWER;
use crate::model::ModelArgs;

/// What a run can have less of, so that it takes less memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remedy {
    /// Prompts, which all run at once.
    Prompts,
    /// Requests of a batch that run at once.
    Batch,
}

/// A run that fits its limit.
pub struct Account {
    need: MemoryUse,
    /// Bytes that are held from step to step, once all is loaded.
    held: u64,
}

impl Account {
    /// Refuses a run that does not fit `limit`, or a GPU's free memory; `remedy` says what it can have less
    /// of.
    ///
    /// # Errors
    /// Names the flag, and what would fit.
    pub fn open(
        args: &ModelArgs,
        limit: Option<Bytes>,
        device: &Device,
        demand: &Demand<'_>,
        remedy: Remedy,
    ) -> anyhow::Result<Self> {
        let free = device::memory(device)?.map(|memory| Bytes(memory.free));
        let (limit, flag) = match (limit, free) {
            (Some(limit), free) if free.is_none_or(|free| limit <= free) => {
                (limit, format!("--memory-limit {limit}"))
            }
            (_, Some(free)) => (free, format!("--device {}, {free} free", args.device)),
            (_, None) => {
                return Ok(Self::of(demand.estimate()?));
            }
        };
        match demand.check(limit.0) {
            Ok(need) => Ok(Self::of(need)),
            Err(Error::Memory(error)) => {
                let help = help(&error, demand.place.gpu, remedy);
                Err(anyhow!("{flag}: {error}{help}"))
            }
            Err(other) => Err(other.into()),
        }
    }

    fn of(need: MemoryUse) -> Self {
        Self {
            need,
            held: need.weights + need.kv,
        }
    }

    /// Told when all is loaded and no step has run: what loading took for a while counts no longer.
    pub fn loaded(&mut self, device: &Device) -> anyhow::Result<()> {
        device::reset_peak(device)?;
        if let Some(memory) = device::memory(device)? {
            self.held = self.held.max(memory.peak);
        }
        Ok(())
    }

    /// What was taken, after the run; `None` if the device does not say.
    pub fn close(&self, device: &Device, captured: CaptureReport) -> Option<MemoryTable> {
        let memory = device::memory(device).ok()?;
        let (weights, kv) = (self.need.weights, self.need.kv);
        Some(MemoryTable {
            weights,
            kv,
            on_gpu: memory.map(|memory| GpuRows {
                graphs: captured.captured + captured.already,
                graph_bytes: captured.memory.bytes(),
                buffers: self.held.saturating_sub(weights + kv),
                workspace: memory.peak.saturating_sub(self.held),
                free: memory.free,
                total: memory.total,
            }),
        })
    }
}

/// What would help against a refusal.
fn help(error: &MemoryError, gpu: bool, remedy: Remedy) -> String {
    match error {
        MemoryError::Cache { need, .. } => {
            let graphs = if need.graphs > 0 {
                "--graphs off, and "
            } else {
                ""
            };
            let chunk = if gpu { " or --chunk" } else { "" };
            let less = match remedy {
                Remedy::Prompts => "shorten the prompts, or lower --max-new-tokens",
                Remedy::Batch => "lower --max-running or max_new_tokens",
            };
            format!(" ({graphs}{less}{chunk})")
        }
        MemoryError::Workspace { .. } => match remedy {
            Remedy::Prompts => " (lower --chunk, or give fewer prompts)".to_owned(),
            Remedy::Batch => " (lower --chunk or --max-running)".to_owned(),
        },
        MemoryError::Graphs { .. } => format!(" ({FEWER})"),
        _ => String::new(),
    }
}

/// Who took which memory of the device.
pub struct MemoryTable {
    weights: u64,
    kv: u64,
    on_gpu: Option<GpuRows>,
}

/// What only a GPU has.
struct GpuRows {
    graphs: usize,
    graph_bytes: u64,
    /// Beside weights and cache there from the first step to the last.
    buffers: u64,
    workspace: u64,
    free: u64,
    total: u64,
}

impl fmt::Display for MemoryTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut row = |name: &str, bytes: u64, more: &str| {
            writeln!(f, "{name:<9}  {:>9}{more}", Bytes(bytes).to_string())
        };
        row("weights", self.weights, "")?;
        row("KV cache", self.kv, "")?;
        let Some(gpu) = &self.on_gpu else {
            return Ok(());
        };
        let graphs = format!(", {}", count(gpu.graphs, "graph"));
        row("graphs", gpu.graph_bytes, &graphs)?;
        row("buffers", gpu.buffers, " of graphs, and rounding")?;
        row(
            "workspace",
            gpu.workspace,
            " in the step or capture that took most",
        )?;
        row("free", gpu.free, &format!(" of {}", Bytes(gpu.total)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_lines_up() {
        let mut table = MemoryTable {
            weights: 10_708_532,
            kv: 1 << 20,
            on_gpu: None,
        };
        insta::assert_snapshot!(table, @r"
        weights     10.2 MiB
        KV cache       1 MiB
        ");
        table.on_gpu = Some(GpuRows {
            graphs: 4,
            graph_bytes: 130 << 20,
            buffers: 3 << 20,
            workspace: 2_000_000_000,
            free: 137 << 30,
            total: 150_000_000_000,
        });
        insta::assert_snapshot!(table, @r"
        weights     10.2 MiB
        KV cache       1 MiB
        graphs       130 MiB, 4 graphs
        buffers        3 MiB of graphs, and rounding
        workspace    1.9 GiB in the step or capture that took most
        free         137 GiB of 139.7 GiB
        ");
    }

    #[test]
    fn refusals_name_the_flags_that_help() {
        let need = |graphs| MemoryUse {
            weights: 5 << 30,
            kv: 3 << 30,
            graphs,
            workspace: 1 << 30,
        };
        let cache = |graphs| MemoryError::Cache {
            limit: 8 << 30,
            need: need(graphs),
            sequences: 1,
            tokens: 70_000,
            fits: 30_208,
        };
        let helps = [
            help(&cache(0), true, Remedy::Batch),
            help(&cache(0), false, Remedy::Prompts),
            help(&cache(0), true, Remedy::Prompts),
            help(&cache(1 << 30), true, Remedy::Prompts),
            help(
                &MemoryError::Workspace {
                    limit: 5 << 30,
                    need: need(0),
                    rows: 8193,
                },
                true,
                Remedy::Prompts,
            ),
            help(
                &MemoryError::Graphs {
                    limit: 9 << 30,
                    need: need(1 << 30),
                },
                true,
                Remedy::Prompts,
            ),
        ];
        insta::assert_snapshot!(helps.join("\n"), @r"
        (lower --max-running or max_new_tokens or --chunk)
        (shorten the prompts, or lower --max-new-tokens)
        (shorten the prompts, or lower --max-new-tokens or --chunk)
        (--graphs off, and shorten the prompts, or lower --max-new-tokens or --chunk)
        (lower --chunk, or give fewer prompts)
        (--graphs off captures none; --capture-sizes, --replay-capture-sizes and --max-captured-tokens make them fewer or smaller)
        ");
    }
}
