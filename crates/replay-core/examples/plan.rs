//! What replay saves in a prefill, for every policy: row counts, cost, and a picture of rows against
//! layers.
//!
//!     cargo run -p replay-core --example plan -- --layers 40 --cut 20 --window 128 \
//!         --prompt 32768 --chunk 8192

use std::io::{self, ErrorKind, Write};
use std::num::NonZeroU32;
use std::process::ExitCode;

use clap::error::ErrorKind as Refusal;
use clap::{CommandFactory, Parser};
use replay_core::{
    LayerSchedule, Picture, Planner, PlannerConfig, PrefillCost, ReplayLayers, ReplayPolicy, Share,
    ShareError, Window, WindowError,
};

/// Longest prompt: the picture looks at each position in each layer.
const MAX_PROMPT: i64 = 1 << 24;
/// Most layers.
const MAX_LAYERS: i64 = 1 << 10;
/// Widest picture.
const MAX_COLUMNS: i64 = 1 << 12;
/// Most row-layers: prompt by layers.
const MAX_ROW_LAYERS: u64 = 1 << 27;
/// Most chunks, each of which is planned.
const MAX_CHUNKS: u32 = 1 << 16;

/// Print what replay saves in one prompt's prefill, for every policy.
#[derive(Parser)]
struct Args {
    /// Layers of the model.
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..=MAX_LAYERS))]
    layers: u32,
    /// The last KV-source layer, counted from 0: the first replay layer.
    #[arg(long, default_value_t = 20)]
    cut: u32,
    /// Sliding window, in tokens.
    #[arg(long, default_value = "128", value_parser = window)]
    window: Window,
    /// Length of the prompt, in tokens.
    #[arg(long, default_value_t = 32768, value_parser = clap::value_parser!(u32).range(1..=MAX_PROMPT))]
    prompt: u32,
    /// Length of a prefill chunk, in tokens.
    #[arg(long, default_value = "8192")]
    chunk: NonZeroU32,
    /// Rows at the prompt's end whose outputs are read.
    #[arg(long, default_value = "1")]
    sampled_rows: NonZeroU32,
    /// Part of a row's cost in a layer that writing its KV has, from 0 to 1; measure it for your
    /// model.
    #[arg(long, default_value = "0.02", value_parser = share, allow_hyphen_values = true)]
    kv_share: Share,
    /// Columns of the picture.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=MAX_COLUMNS))]
    columns: u32,
}

impl Args {
    /// The replay layers, and a refusal in clap's words of what the flags say together.
    fn layers(&self) -> Result<ReplayLayers, clap::Error> {
        let refused = |text: String| Args::command().error(Refusal::ValueValidation, text);
        let row_layers = u64::from(self.prompt) * u64::from(self.layers);
        if row_layers > MAX_ROW_LAYERS {
            return Err(refused(format!(
                "invalid value '{}' for '--prompt': expected at most {} tokens for {} layers",
                self.prompt,
                MAX_ROW_LAYERS / u64::from(self.layers),
                self.layers,
            )));
        }
        if self.prompt.div_ceil(self.chunk.get()) > MAX_CHUNKS {
            return Err(refused(format!(
                "invalid value '{}' for '--chunk': expected at most {MAX_CHUNKS} chunks",
                self.chunk,
            )));
        }
        let schedule = LayerSchedule {
            num_layers: self.layers,
            kv_sources: &[self.cut],
            compress_ratios: &[],
            engram_layers: &[],
        };
        ReplayLayers::from_schedule(&schedule)
            .map_err(|error| refused(format!("invalid value '{}' for '--cut': {error}", self.cut)))
    }
}

fn window(text: &str) -> Result<Window, String> {
    let tokens: u32 = text.parse().map_err(|_| "expected a number of tokens")?;
    Window::new(tokens).map_err(|error: WindowError| error.to_string())
}

fn share(text: &str) -> Result<Share, String> {
    let value: f64 = text.parse().map_err(|_| "expected a number from 0 to 1")?;
    Share::new(value).map_err(|error: ShareError| error.to_string())
}

fn main() -> ExitCode {
    let args = Args::parse();
    let layers = args.layers().unwrap_or_else(|error| error.exit());
    let mut out = io::stdout().lock();
    match print(&args, layers, &mut out).and_then(|()| out.flush()) {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever read it has what they wanted.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            // Nobody is left to tell if this fails too.
            let _ = writeln!(io::stderr(), "error: standard output: {error}");
            ExitCode::FAILURE
        }
    }
}

fn print(args: &Args, layers: ReplayLayers, out: &mut impl Write) -> io::Result<()> {
    let (prompt, chunk) = (args.prompt, args.chunk);
    let columns = NonZeroU32::new(args.columns).unwrap_or(NonZeroU32::MIN);
    writeln!(
        out,
        "prompt of {} tokens in chunks of {}; {} layers, of which {}-{} replay; window {}",
        grouped(prompt.into()),
        grouped(chunk.get().into()),
        args.layers,
        args.cut,
        args.layers - 1,
        args.window.get(),
    )?;
    writeln!(out, "{}", Picture::LEGEND)?;

    for policy in ReplayPolicy::ALL {
        let planner = Planner::new(PlannerConfig {
            window: args.window,
            layers,
            policy,
            sampled_rows: args.sampled_rows,
        });
        let cost = PrefillCost::of(&planner, prompt, chunk);
        writeln!(
            out,
            "\n{policy}: {} of {} row-layers run, {} only write KV; projected cost {:.1} %",
            grouped(cost.row_layers()),
            grouped(cost.row_layers_off()),
            grouped(cost.kv_row_layers()),
            100.0 * cost.ratio(args.kv_share),
        )?;
        write!(out, "{}", Picture::of(&planner, prompt, chunk, columns))?;
        writeln!(
            out,
            "rows in the replay layers: {}",
            runs(cost.rows_per_layer())
        )?;
    }
    Ok(())
}

/// A number in groups of three digits.
fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let groups: Vec<&str> = digits
        .as_bytes()
        .rchunks(3)
        .rev()
        .map(|group| std::str::from_utf8(group).expect("digits"))
        .collect();
    groups.join(",")
}

/// Numbers in a line, equal neighbours counted: `20 x 128`.
fn runs(numbers: impl Iterator<Item = u64>) -> String {
    let numbers: Vec<u64> = numbers.collect();
    let runs: Vec<String> = numbers
        .chunk_by(|a, b| a == b)
        .map(|run| match run.len() {
            1 => grouped(run[0]),
            n => format!("{n} x {}", grouped(run[0])),
        })
        .collect();
    runs.join(", ")
}
