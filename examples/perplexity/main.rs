//! Measures how well a DeepSeek-V4.1 decoder predicts text under each replay policy. See `--help`.

use std::process::ExitCode;

fn main() -> ExitCode {
    replay_examples::io::main(replay_examples::perplexity::run)
}
