//! What replay saves in a prefill, for every policy: row counts, cost, and a picture of rows against
//! layers.
//!
//!     cargo run -p replay-core --example plan -- --layers 40 --cut 20 --window 128 \
//!         --prompt 32768 --chunk 8192

use std::error::Error;
use std::num::NonZeroU32;

use clap::Parser;
use replay_core::{
    LayerSchedule, Picture, Planner, PlannerConfig, PrefillCost, ReplayLayers, ReplayPolicy, Share,
    Window,
};

/// Print what replay saves in one prompt's prefill, for every policy.
#[derive(Parser)]
struct Args {
    /// Layers of the model.
    #[arg(long, default_value_t = 40)]
    layers: u32,
    /// The last KV-source layer, counted from 0: the first replay layer.
    #[arg(long, default_value_t = 20)]
    cut: u32,
    /// Sliding window, in tokens.
    #[arg(long, default_value_t = 128)]
    window: u32,
    /// Length of the prompt, in tokens.
    #[arg(long, default_value = "32768")]
    prompt: NonZeroU32,
    /// Length of a prefill chunk, in tokens.
    #[arg(long, default_value = "8192")]
    chunk: NonZeroU32,
    /// Rows at the prompt's end whose outputs are read.
    #[arg(long, default_value = "1")]
    sampled_rows: NonZeroU32,
    /// Part of a row's cost in a layer that writing its KV has, from 0 to 1; measure it for your
    /// model.
    #[arg(long, default_value_t = 0.02)]
    kv_share: f64,
    /// Columns of the picture.
    #[arg(long, default_value = "64")]
    columns: NonZeroU32,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let layers = ReplayLayers::from_schedule(&LayerSchedule {
        num_layers: args.layers,
        kv_sources: &[args.cut],
        compress_ratios: &[],
        engram_layers: &[],
    })?;
    let kv_write = Share::new(args.kv_share)?;
    let (prompt, chunk) = (args.prompt.get(), args.chunk);

    println!(
        "prompt of {} tokens in chunks of {}; {} layers, of which {}-{} replay; window {}",
        grouped(prompt.into()),
        grouped(chunk.get().into()),
        args.layers,
        args.cut,
        args.layers - 1,
        args.window,
    );
    println!("{}", Picture::LEGEND);

    for policy in ReplayPolicy::ALL {
        let planner = Planner::new(PlannerConfig {
            window: Window::new(args.window)?,
            layers,
            policy,
            sampled_rows: args.sampled_rows,
        });
        let cost = PrefillCost::of(&planner, prompt, chunk);
        println!(
            "\n{policy}: {} of {} row-layers run, {} only write KV; projected cost {:.1} %",
            grouped(cost.row_layers()),
            grouped(cost.row_layers_off()),
            grouped(cost.kv_row_layers()),
            100.0 * cost.ratio(kv_write),
        );
        print!("{}", Picture::of(&planner, prompt, chunk, args.columns));
        println!("rows in the replay layers: {}", runs(cost.rows_per_layer()));
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
