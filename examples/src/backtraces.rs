//! Backtraces in the texts of errors.
//!
//! With `RUST_BACKTRACE` set candle puts one in the middle of what an error displays: for whoever
//! debugs candle. A message is for whoever runs the program.

/// Number and symbol of the first frame, as the standard library prints them.
const FIRST: &str = "   0: ";

/// An error with its causes, on one line where their texts are, without backtraces.
pub(crate) fn told(error: impl Into<anyhow::Error>) -> String {
    cut(&format!("{:#}", error.into()))
}

/// The text without backtraces: each is its first frame's line and all that are of such a shape.
pub(crate) fn cut(text: &str) -> String {
    let mut within = false;
    let kept: Vec<&str> = text
        .lines()
        .filter(|line| {
            within = line.starts_with(FIRST) || (within && is_frame(line));
            !within
        })
        .collect();
    kept.join("\n")
}

/// Whether a line is one of a backtrace: ` 12: symbol`, or below it an inlined symbol or `at file`.
fn is_frame(line: &str) -> bool {
    let numbered = line.split_once(": ").is_some_and(|(number, _)| {
        let number = number.trim_start();
        !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    });
    numbered || line.starts_with("      ") || line.is_empty()
}

#[cfg(test)]
mod tests {
    use std::backtrace::Backtrace;

    use candle_core::Error;

    use super::*;

    fn traced(inner: Error) -> Error {
        let backtrace = Box::new(Backtrace::force_capture());
        let inner = Box::new(inner);
        Error::WithBacktrace { inner, backtrace }
    }

    #[test]
    fn a_message_has_no_backtrace_wherever_it_stood() {
        let error = traced(Error::Msg("no such device".into()));
        let shown = format!(
            "{:#}",
            anyhow::Error::from(error).context("--device cuda:7")
        );
        assert!(shown.lines().count() > 3, "{shown}");
        assert_eq!(cut(&shown), "--device cuda:7: no such device");

        let cause = traced(traced(Error::Msg("index scores".into())));
        let error = deepseek_model::Error::from(deepseek_model::ModelError::DType {
            got: format!("{cause}"),
        });
        let shown = cut(&format!("{error:#}"));
        assert_eq!(shown, "expected f32 or bf16 activations, got index scores");
    }

    /// Lists of problems have indented lines of their own.
    #[test]
    fn other_lines_stay() {
        let text = "the checkpoint has 2 problems:\n  1: one\n      at x\n\nand more";
        assert_eq!(cut(text), text);
    }
}
