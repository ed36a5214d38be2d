//! Serves a DeepSeek-V4.1 decoder over HTTP, by the interface of OpenAI. See `--help`.

use std::process::ExitCode;

fn main() -> ExitCode {
    // Before anything is set up: chat templates run in processes of this program.
    if replay_examples::serve::is_renderer() {
        return replay_examples::serve::render();
    }
    replay_examples::io::main(replay_examples::serve::run)
}
