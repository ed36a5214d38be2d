//! Measures how well a DeepSeek-V4.1 decoder predicts text under each replay policy. See `--help`.

use std::process::ExitCode;

use clap::Parser;
use replay_examples::perplexity::{PerplexityArgs, run};

fn main() -> ExitCode {
    let args = PerplexityArgs::parse();
    replay_examples::io::main(|io| run(&args, io))
}
