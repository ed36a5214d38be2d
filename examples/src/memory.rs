//! What a run may take of its device's memory, and what it took.

use std::fmt;

use anyhow::anyhow;
use candle_core::Device;
use deepseek_model::memory::{Bytes, Demand, MemoryError, MemoryUse};
use deepseek_model::{CaptureReport, Error, device};

use crate::count;
use crate::model::ModelArgs;

/// A run that fits its limit.
pub struct Account {
    need: MemoryUse,
}

impl Account {
    /// Refuses a run that does not fit `limit`, or a GPU's free memory.
    ///
    /// # Errors
    /// Names the flag, and what would fit.
    pub fn open(
        args: &ModelArgs,
        limit: Option<Bytes>,
        device: &Device,
        demand: &Demand<'_>,
    ) -> anyhow::Result<Self> {
        let free = device::memory(device)?.map(|memory| Bytes(memory.free));
        let (limit, flag) = match (limit, free) {
            (Some(limit), free) if free.is_none_or(|free| limit <= free) => {
                (limit, format!("--memory-limit {limit}"))
            }
            (_, Some(free)) => (free, format!("--device {}, {free} free", args.device)),
            (_, None) => {
                let need = demand.estimate()?;
                return Ok(Self { need });
            }
        };
        match demand.check(limit.0) {
            Ok(need) => Ok(Self { need }),
            Err(Error::Memory(error)) => {
                let help = match (&error, demand.place.gpu) {
                    (MemoryError::Cache { .. }, true) => {
                        " (shorten the prompts, or lower --max-new-tokens or --chunk)"
                    }
                    (MemoryError::Cache { .. }, false) => {
                        " (shorten the prompts, or lower --max-new-tokens)"
                    }
                    _ => "",
                };
                Err(anyhow!("{flag}: {error}{help}"))
            }
            Err(other) => Err(other.into()),
        }
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
                // Weights and cache are there from the first step to the last.
                workspace: memory.peak.saturating_sub(weights + kv),
                free: memory.free,
                total: memory.total,
            }),
        })
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
        row("workspace", gpu.workspace, " in the step that took most")?;
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
            workspace: 2_000_000_000,
            free: 137 << 30,
            total: 150_000_000_000,
        });
        insta::assert_snapshot!(table, @r"
        weights     10.2 MiB
        KV cache       1 MiB
        graphs       130 MiB, 4 graphs
        workspace    1.9 GiB in the step that took most
        free         137 GiB of 139.7 GiB
        ");
    }
}
