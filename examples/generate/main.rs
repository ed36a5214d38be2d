//! Continues texts with a DeepSeek-V4.1 decoder. See `--help`.

use std::process::ExitCode;

use clap::Parser;
use replay_examples::generate::{GenerateArgs, run};

fn main() -> ExitCode {
    let args = GenerateArgs::parse();
    replay_examples::io::main(|io| run(&args, io))
}
