//! Progress bars, on stderr, for a person who watches.

use std::fmt::Write;
use std::time::Duration;

use indicatif::{HumanBytes, ProgressBar, ProgressState, ProgressStyle};

use crate::threads;

/// How often a bar moves although nothing is counted: a chunk may take long.
const TICK: Duration = Duration::from_millis(120);

/// Bytes of a checkpoint; none are counted before it is known how many there are.
pub fn loading(watched: bool) -> ProgressBar {
    bar(watched, "loading {wide_bar} {loaded}", 0)
}

/// Graphs of decode steps, likewise.
pub fn capture(watched: bool) -> ProgressBar {
    bar(watched, "capturing {wide_bar} {captured}", 0)
}

/// Tokens of all prompts together.
pub fn prefill(watched: bool, tokens: usize) -> ProgressBar {
    bar(
        watched,
        "{spinner} prefill {wide_bar} tokens {human_pos}/{human_len}",
        tokens,
    )
}

/// Requests of a batch, and below what the engine does.
pub fn requests(watched: bool, requests: usize) -> ProgressBar {
    bar(
        watched,
        "{spinner} {wide_bar} requests {pos}/{len}\n  {wide_msg}",
        requests,
    )
}

/// Contexts of a perplexity measurement.
pub fn contexts(watched: bool, contexts: usize) -> ProgressBar {
    bar(
        watched,
        "{spinner} {msg} {wide_bar} contexts {pos}/{len}",
        contexts,
    )
}

fn bar(watched: bool, template: &str, length: usize) -> ProgressBar {
    if !watched {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template(template).expect("the template is well-formed");
    let style = style
        .with_key("loaded", |state: &ProgressState, out: &mut dyn Write| {
            if let Some(total) = state.len() {
                let _ = write!(out, "{}/{}", HumanBytes(state.pos()), HumanBytes(total));
            }
        })
        .with_key("captured", |state: &ProgressState, out: &mut dyn Write| {
            if let Some(total) = state.len() {
                let _ = write!(out, "graphs {}/{total}", state.pos());
            }
        });
    // A length of 0 is one not known yet, which would draw as a full bar.
    let bar = match length {
        0 => ProgressBar::no_length(),
        length => ProgressBar::new(length as u64),
    };
    let bar = bar.with_style(style);
    // It takes a thread, and a panic where there is none.
    if threads::check_more(1).is_ok() {
        bar.enable_steady_tick(TICK);
    }
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_exist_only_where_someone_watches() {
        for bar in [
            loading(false),
            capture(false),
            prefill(false, 5),
            requests(false, 5),
            contexts(false, 5),
        ] {
            assert!(bar.is_hidden());
        }
        // Building one checks its template; the test's stderr is no terminal, so none is drawn.
        for bar in [
            loading(true),
            capture(true),
            prefill(true, 5),
            requests(true, 5),
            contexts(true, 5),
        ] {
            bar.finish_and_clear();
        }
    }
}
