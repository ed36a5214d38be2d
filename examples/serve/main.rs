//! Serves a DeepSeek-V4.1 decoder over HTTP, by the interface of OpenAI. See `--help`.

use std::process::ExitCode;

fn main() -> ExitCode {
    replay_examples::io::main(replay_examples::serve::run)
}
