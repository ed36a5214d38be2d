//! What a run may take of its device's memory, and what it took.

use std::fmt;

use anyhow::anyhow;
use candle_core::Device;
use deepseek_model::memory::{Bytes, Demand, MemoryError, MemoryUse};
use deepseek_model::{CaptureReport, Error, device};

use crate::graphs::FEWER;
use crate::model::ModelArgs;
use crate::{count, flags};

/// What a run may take of its device.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct MemoryArgs {
    /// Refuse a run that would take more memory of the device than this: 512MiB, 1.5GiB or a number
    /// of bytes, for instance [default: what is free on a GPU, no limit on the CPU].
    ///
    /// It is decided before the weights are read, and nothing is made smaller to fit. Weights and KV
    /// cache count exactly; on a GPU, CUDA graphs and the tensors of the largest step count too,
    /// estimated from above. On the CPU these two do not. Tables of n-grams stay in their files. What CUDA
    /// takes for itself, some 600 MiB with the code of all kernels, is not counted: on a GPU, it is taken
    /// before its free memory is asked for.
    #[arg(long, value_name = "BYTES", value_parser = flags::text(str::parse::<Bytes>), allow_hyphen_values = true)]
    pub memory_limit: Option<Bytes>,
}

/// Flags of a program that make it take less, as a refusal names them.
pub struct Remedies {
    /// Against too large a cache.
    pub cache: &'static str,
    /// Against a limit that leaves no room for any cache.
    pub no_cache: &'static str,
    /// Against too large a step.
    pub step: &'static str,
}

/// A run that fits its limit.
pub struct Account {
    need: MemoryUse,
    /// Bytes that are held from step to step, once all is loaded.
    held: u64,
}

impl MemoryArgs {
    /// Refuses a run that does not fit the limit, or a GPU's free memory.
    ///
    /// # Errors
    /// Names the flag, what would fit, and what would help.
    pub fn open(
        &self,
        args: &ModelArgs,
        device: &Device,
        demand: &Demand<'_>,
        remedies: &Remedies,
    ) -> anyhow::Result<Account> {
        let free = device::memory(device)?.map(|memory| Bytes(memory.free));
        let (limit, flag) = match (self.memory_limit, free) {
            (Some(limit), free) if free.is_none_or(|free| limit <= free) => {
                (limit, format!("--memory-limit {limit}"))
            }
            (_, Some(free)) => (free, format!("--device {}, {free} free", args.device)),
            (_, None) => {
                return Ok(Account::of(demand.estimate()?));
            }
        };
        match demand.check(limit.0) {
            Ok(need) => Ok(Account::of(need)),
            Err(Error::Memory(error)) => {
                let help = remedies.help(&error, demand.place.gpu);
                Err(anyhow!("{flag}: {error}{help}"))
            }
            Err(other) => Err(other.into()),
        }
    }
}

impl Account {
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

impl Remedies {
    /// What would help against a refusal.
    fn help(&self, error: &MemoryError, gpu: bool) -> String {
        match error {
            MemoryError::Cache { need, fits, .. } => {
                let graphs = if need.graphs > 0 {
                    "--graphs off, and "
                } else {
                    ""
                };
                if *fits == 0 {
                    return format!(" ({graphs}{})", self.no_cache);
                }
                let chunk = if gpu { " or --chunk" } else { "" };
                format!(" ({graphs}{}{chunk})", self.cache)
            }
            // Nothing that makes a step smaller helps where none fits.
            MemoryError::Workspace { fits: 0, .. } => String::new(),
            MemoryError::Workspace { .. } => format!(" ({})", self.step),
            MemoryError::Graphs { .. } => format!(" ({FEWER})"),
            _ => String::new(),
        }
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
        let of_what = if gpu.graphs > 0 {
            " of graphs, and rounding"
        } else {
            " of the engine, and rounding"
        };
        row("buffers", gpu.buffers, of_what)?;
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
        let of_cache = |graphs, fits| MemoryError::Cache {
            limit: 8 << 30,
            need: need(graphs),
            sequences: 1,
            tokens: 70_000,
            fits,
        };
        let cache = |graphs| of_cache(graphs, 30_208);
        let of_step = |fits| MemoryError::Workspace {
            limit: 5 << 30,
            need: need(0),
            rows: 8193,
            fits,
        };
        let remedies = Remedies {
            cache: "shorten the prompts, or lower --max-new-tokens",
            no_cache: "raise the limit, or give fewer prompts",
            step: "lower --chunk, or give fewer prompts",
        };
        let help = |error: &MemoryError, gpu| remedies.help(error, gpu);
        let helps = [
            help(&of_cache(0, 0), false),
            help(&cache(0), false),
            help(&cache(0), true),
            help(&cache(1 << 30), true),
            help(&of_step(100), true),
            help(&of_step(0), true),
            help(
                &MemoryError::Graphs {
                    limit: 9 << 30,
                    need: need(1 << 30),
                },
                true,
            ),
        ];
        insta::assert_snapshot!(helps.join("\n"), @r"
        (raise the limit, or give fewer prompts)
        (shorten the prompts, or lower --max-new-tokens)
        (shorten the prompts, or lower --max-new-tokens or --chunk)
        (--graphs off, and shorten the prompts, or lower --max-new-tokens or --chunk)
        (lower --chunk, or give fewer prompts)

        (--graphs off captures none; --capture-sizes, --replay-capture-sizes and --max-captured-tokens make them fewer or smaller)
        ");
    }
}
