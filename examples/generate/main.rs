//! Continues texts with a DeepSeek-V4.1 decoder. See `--help`.

use std::process::ExitCode;

fn main() -> ExitCode {
    replay_examples::io::main(replay_examples::generate::run)
}
