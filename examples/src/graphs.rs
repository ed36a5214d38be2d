//! Flags that say which steps run in CUDA graphs.

use std::num::NonZeroU32;

use deepseek_model::{Error, Graphs, ReplayPolicy, ReplaySizes, RunnerOptions};

use crate::flags::Blame;
use crate::model::DeviceArg;
use crate::{backtraces, flags};

/// How to have fewer graphs.
pub(crate) const FEWER: &str = "--graphs off captures none; --capture-sizes, \
    --replay-capture-sizes and --max-captured-tokens make them fewer or smaller";

/// Which steps run in CUDA graphs. On a CPU, which has none, the flags change nothing, and whoever
/// gives one is told so.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "CUDA graphs (without effect on a CPU)")]
pub struct GraphArgs {
    /// Which steps run in CUDA graphs on a GPU: off (none), full (steps that decode one token of each
    /// prompt), piecewise (any step, in a graph that breaks where rows are dropped) or
    /// full-and-piecewise (full where it can be, else piecewise) [default: full-and-piecewise].
    ///
    /// Graphs that by estimate do not fit the memory are refused before the weights are read. Should a
    /// capture fail nonetheless, its steps run without, and a warning says so.
    #[arg(long, value_name = "MODE", value_enum, allow_hyphen_values = true)]
    pub graphs: Option<GraphsArg>,
    /// Rows of a step to capture graphs for, separated by commas. Without the flag, powers of two for
    /// decode, and for other steps sizes from 1 to --max-captured-tokens.
    ///
    /// A step runs in the smallest graph that holds it, all of whose rows take their time; where none
    /// does, it runs without.
    #[arg(long, value_name = "ROWS", value_parser = flags::text(SizesArg::parse), allow_hyphen_values = true)]
    pub capture_sizes: Option<SizesArg>,
    /// Kept rows to capture graphs of the later layers for, separated by commas; none runs these
    /// layers eagerly. Without the flag, sizes from the window to a window for each prompt.
    ///
    /// Here, too, the smallest that holds the rows takes its full time.
    #[arg(long, value_name = "ROWS", value_parser = flags::text(ReplaySizesArg::parse), allow_hyphen_values = true)]
    pub replay_capture_sizes: Option<ReplaySizesArg>,
    /// Rows from which on a piecewise graph breaks to drop rows, above the sliding window; six
    /// windows without the flag. Smaller graphs run all their rows.
    ///
    /// So chunks below it drop nothing in these graphs, whatever --replay says. That costs time and
    /// changes no text: nothing reads what --replay would have dropped.
    #[arg(long, value_name = "ROWS", value_parser = flags::text(rows), allow_hyphen_values = true)]
    pub trim_threshold: Option<u32>,
    /// Rows of the largest graph. Without the flag, the largest of --capture-sizes, or 2048, and no
    /// more than the prompts need.
    #[arg(long, value_name = "ROWS", value_parser = flags::text(flags::counting::<NonZeroU32>), allow_hyphen_values = true)]
    pub max_captured_tokens: Option<NonZeroU32>,
}

/// `--graphs`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum GraphsArg {
    /// Every step runs operation by operation.
    Off,
    /// Decode steps run as one graph each.
    Full,
    /// Every step runs in a graph that may break.
    Piecewise,
    /// Decode steps run as one graph each, others in graphs that may break.
    #[default]
    FullAndPiecewise,
}

/// `--capture-sizes`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SizesArg(Vec<u32>);

impl SizesArg {
    fn parse(text: &str) -> Result<Self, String> {
        let sizes = text.split(',').map(|size| match flags::counting(size) {
            Ok(size) => Ok(NonZeroU32::get(size)),
            Err(_) => Err(format!(
                "expected whole numbers from 1 to {} with commas between them, got {size:?}",
                u32::MAX
            )),
        });
        Ok(Self(sizes.collect::<Result<_, _>>()?))
    }
}

/// `--replay-capture-sizes`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplaySizesArg(ReplaySizes);

impl ReplaySizesArg {
    fn parse(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self(ReplaySizes::Eager));
        }
        if text.split(',').any(|size| size == "none") {
            return Err("expected none alone, or whole numbers, got none among others".to_owned());
        }
        match SizesArg::parse(text) {
            Ok(sizes) => Ok(Self(ReplaySizes::Of(sizes.0))),
            Err(expected) => Err(expected.replacen("expected", "expected none, or", 1)),
        }
    }
}

/// Rows of a graph that breaks: 0 exceed no window.
fn rows(text: &str) -> Result<u32, String> {
    flags::counting(text).map(NonZeroU32::get)
}

impl GraphArgs {
    /// What a runner is asked for, with a profile or not.
    pub fn options(&self, profile: bool) -> RunnerOptions {
        RunnerOptions {
            graphs: match self.graphs.unwrap_or_default() {
                GraphsArg::Off => Graphs::Off,
                GraphsArg::Full => Graphs::Full,
                GraphsArg::Piecewise => Graphs::Piecewise,
                GraphsArg::FullAndPiecewise => Graphs::FullAndPiecewise,
            },
            capture_sizes: self
                .capture_sizes
                .clone()
                .map_or_else(Vec::new, |sizes| sizes.0),
            replay_sizes: self
                .replay_capture_sizes
                .as_ref()
                .map_or(ReplaySizes::Ladder, |sizes| sizes.0.clone()),
            trim_threshold: self.trim_threshold,
            max_captured_tokens: self.max_captured_tokens.map(NonZeroU32::get),
            max_sequence_tokens: None,
            profile,
        }
    }

    /// What to tell of flags that were given and change nothing on `device`, or beside `--graphs` or
    /// `--replay`, if that is one policy; `off` asks for what is so.
    pub(crate) fn idle(&self, device: DeviceArg, policy: Option<ReplayPolicy>) -> Option<String> {
        let of_breaks = [
            (
                "--replay-capture-sizes",
                self.replay_capture_sizes.is_some(),
            ),
            ("--trim-threshold", self.trim_threshold.is_some()),
        ];
        let of_sizes = [
            ("--capture-sizes", self.capture_sizes.is_some()),
            of_breaks[0],
            of_breaks[1],
            ("--max-captured-tokens", self.max_captured_tokens.is_some()),
        ];
        let asks = self.graphs.is_some_and(|mode| mode != GraphsArg::Off);
        let (flags, beside) = if device == DeviceArg::Cpu {
            let all = [("--graphs", asks)].into_iter().chain(of_sizes);
            (all.collect(), "--device cpu, which has no CUDA graphs")
        } else if self.graphs == Some(GraphsArg::Off) {
            (of_sizes.to_vec(), "--graphs off")
        } else if self.graphs == Some(GraphsArg::Full) {
            (
                of_breaks.to_vec(),
                "--graphs full, whose graphs never break",
            )
        } else if policy == Some(ReplayPolicy::Off) {
            (of_breaks.to_vec(), "--replay off, which drops nothing")
        } else {
            return None;
        };
        let flags: Vec<(&str, bool)> = flags;
        let names = flags.iter().filter(|(_, given)| *given);
        let names: Vec<&str> = names.map(|(name, _)| *name).collect();
        let verb = match names.len() {
            0 => return None,
            1 => "changes",
            _ => "change",
        };
        Some(format!(
            "note: {} {verb} nothing with {beside}",
            names.join(", ")
        ))
    }

    /// What to tell of graphs that could not be captured.
    pub(crate) fn warning(error: Error) -> String {
        format!(
            "warning: {}\nThese steps run without graphs, more slowly. {FEWER}.",
            backtraces::told(error)
        )
    }

    /// The flag that is to blame for an error, if it is one of these. Of sizes that contradict each other
    /// no model matters; the window that a threshold must exceed is the model's.
    pub(crate) fn to_blame(&self, error: &Error) -> Option<Blame> {
        match error {
            Error::CaptureSizes(_) => Some(Blame::misuse("--capture-sizes, --max-captured-tokens")),
            Error::GraphLists { .. } | Error::Capture { .. } => {
                Some(Blame::here("--graphs (off captures none)"))
            }
            Error::ReplayCaptureSizes(_) => Some(Blame::misuse("--replay-capture-sizes")),
            Error::Threshold(_) => {
                let rows = self.trim_threshold?;
                Some(Blame::here(format!("--trim-threshold {rows}")))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use deepseek_model::CaptureMode;

    use super::*;

    #[test]
    fn sizes_in_a_list_or_none() {
        assert_eq!(SizesArg::parse("8,64,16"), Ok(SizesArg(vec![8, 64, 16])));
        let of = |sizes| Ok(ReplaySizesArg(sizes));
        assert_eq!(ReplaySizesArg::parse("none"), of(ReplaySizes::Eager));
        assert_eq!(ReplaySizesArg::parse("8"), of(ReplaySizes::Of(vec![8])));
        let refuse = |text| ReplaySizesArg::parse(text).unwrap_err();
        let refusals = ["", "8 16", "8,,16", "0", "-1", "8;16"].map(refuse);
        insta::assert_snapshot!(refusals.join("\n"), @r#"
        expected none, or whole numbers from 1 to 4294967295 with commas between them, got ""
        expected none, or whole numbers from 1 to 4294967295 with commas between them, got "8 16"
        expected none, or whole numbers from 1 to 4294967295 with commas between them, got ""
        expected none, or whole numbers from 1 to 4294967295 with commas between them, got "0"
        expected none, or whole numbers from 1 to 4294967295 with commas between them, got "-1"
        expected none, or whole numbers from 1 to 4294967295 with commas between them, got "8;16"
        "#);
        insta::assert_snapshot!(SizesArg::parse("0").unwrap_err(), @r#"expected whole numbers from 1 to 4294967295 with commas between them, got "0""#);
        insta::assert_snapshot!(SizesArg::parse("8,4294967296").unwrap_err(), @r#"expected whole numbers from 1 to 4294967295 with commas between them, got "4294967296""#);
    }

    #[test]
    fn flags_that_change_nothing_are_told() {
        let on = |device, flags: &GraphArgs| flags.idle(device, Some(ReplayPolicy::Exact));
        let all = GraphArgs {
            graphs: Some(GraphsArg::Full),
            capture_sizes: Some(SizesArg(vec![8])),
            replay_capture_sizes: Some(ReplaySizesArg(ReplaySizes::Eager)),
            trim_threshold: Some(200),
            max_captured_tokens: NonZeroU32::new(64),
        };
        let with = |graphs| GraphArgs {
            graphs: Some(graphs),
            ..all.clone()
        };
        let gpu = DeviceArg::Cuda(None);
        assert_eq!(on(gpu, &with(GraphsArg::Piecewise)), None);
        let notes = [
            on(gpu, &with(GraphsArg::Off)),
            on(gpu, &with(GraphsArg::Full)),
            with(GraphsArg::Piecewise).idle(gpu, Some(ReplayPolicy::Off)),
        ];
        insta::assert_snapshot!(notes.map(Option::unwrap).join("\n"), @r"
        note: --capture-sizes, --replay-capture-sizes, --trim-threshold, --max-captured-tokens change nothing with --graphs off
        note: --replay-capture-sizes, --trim-threshold change nothing with --graphs full, whose graphs never break
        note: --replay-capture-sizes, --trim-threshold change nothing with --replay off, which drops nothing
        ");
        insta::assert_snapshot!(on(DeviceArg::Cpu, &all).unwrap(), @"note: --graphs, --capture-sizes, --replay-capture-sizes, --trim-threshold, --max-captured-tokens change nothing with --device cpu, which has no CUDA graphs");
        let silent = |graphs| GraphArgs {
            graphs,
            ..GraphArgs::default()
        };
        assert_eq!(on(DeviceArg::Cpu, &silent(None)), None, "a default");
        assert_eq!(on(DeviceArg::Cpu, &silent(Some(GraphsArg::Off))), None);
        let asked = silent(Some(GraphsArg::FullAndPiecewise));
        insta::assert_snapshot!(on(DeviceArg::Cpu, &asked).unwrap(), @"note: --graphs changes nothing with --device cpu, which has no CUDA graphs");
    }

    #[test]
    fn a_failed_capture_is_told_with_flags() {
        let failed = |mode, source, other: Option<Error>| Error::Capture {
            mode,
            source: Box::new(source),
            other: other.map(Box::new),
        };
        let modes = [CaptureMode::Full, CaptureMode::Piecewise];
        let stopped = failed(modes[1], Error::EngineStopped, None);
        let both = failed(modes[0], Error::NoPrompts, Some(stopped));
        insta::assert_snapshot!(GraphArgs::warning(both), @r"
        warning: graphs of decode steps cannot be captured (and graphs of mixed steps cannot be captured: the engine has stopped): expected at least 1 prompt, got none
        These steps run without graphs, more slowly. --graphs off captures none; --capture-sizes, --replay-capture-sizes and --max-captured-tokens make them fewer or smaller.
        ");
        let error = failed(modes[1], Error::NoPrompts, None);
        insta::assert_snapshot!(GraphArgs::warning(error), @r"
        warning: graphs of mixed steps cannot be captured: expected at least 1 prompt, got none
        These steps run without graphs, more slowly. --graphs off captures none; --capture-sizes, --replay-capture-sizes and --max-captured-tokens make them fewer or smaller.
        ");
    }
}
