//! Flags that say which steps run in CUDA graphs.

use std::str::FromStr;

use deepseek_model::{Error, Graphs, ReplaySizes, RunnerOptions};

use crate::{parse_count, parse_whole};

/// Which steps run in CUDA graphs. On a CPU, which has none, the flags change nothing.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "CUDA graphs")]
pub struct GraphArgs {
    /// Which steps run in CUDA graphs on a GPU: off (none), full (steps that decode one token of each
    /// prompt), piecewise (any step, in a graph that breaks where rows are dropped) or
    /// full-and-piecewise (full where it can be, else piecewise).
    #[arg(long, value_name = "MODE", value_enum, default_value_t)]
    pub graphs: GraphsArg,
    /// Rows of a step to capture graphs for, separated by commas. Without the flag, powers of two for
    /// decode, and for other steps sizes from 1 to --max-captured-tokens.
    #[arg(long, value_name = "ROWS", value_delimiter = ',', value_parser = parse_count::<std::num::NonZeroU32>, allow_negative_numbers = true)]
    pub capture_sizes: Vec<std::num::NonZeroU32>,
    /// Kept rows to capture graphs of the later layers for, separated by commas; none runs these
    /// layers eagerly. Without the flag, sizes from the window to a window for each prompt.
    #[arg(long, value_name = "ROWS")]
    pub replay_capture_sizes: Option<ReplaySizesArg>,
    /// Rows from which on a piecewise graph breaks to drop rows, above the sliding window; six
    /// windows without the flag. Smaller graphs run all their rows.
    #[arg(long, value_name = "ROWS", value_parser = parse_whole::<u32>, allow_negative_numbers = true)]
    pub trim_threshold: Option<u32>,
    /// Rows of the largest graph. Without the flag, the largest of --capture-sizes, or 2048, and no
    /// more than the prompts need.
    #[arg(long, value_name = "ROWS", value_parser = parse_count::<std::num::NonZeroU32>, allow_negative_numbers = true)]
    pub max_captured_tokens: Option<std::num::NonZeroU32>,
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

/// `--replay-capture-sizes`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplaySizesArg(ReplaySizes);

impl FromStr for ReplaySizesArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self(ReplaySizes::Eager));
        }
        let sizes = text.split(',').map(|size| match size.parse() {
            Ok(size) if size > 0 => Ok(size),
            _ => Err(format!(
                "expected none, or whole numbers from 1 on with commas between them, got {size:?}"
            )),
        });
        Ok(Self(ReplaySizes::Of(sizes.collect::<Result<_, _>>()?)))
    }
}

impl GraphArgs {
    /// What a runner is asked for, with a profile or not.
    pub fn options(&self, profile: bool) -> RunnerOptions {
        RunnerOptions {
            graphs: match self.graphs {
                GraphsArg::Off => Graphs::Off,
                GraphsArg::Full => Graphs::Full,
                GraphsArg::Piecewise => Graphs::Piecewise,
                GraphsArg::FullAndPiecewise => Graphs::FullAndPiecewise,
            },
            capture_sizes: self.capture_sizes.iter().map(|size| size.get()).collect(),
            replay_sizes: self
                .replay_capture_sizes
                .as_ref()
                .map_or(ReplaySizes::Ladder, |sizes| sizes.0.clone()),
            trim_threshold: self.trim_threshold,
            max_captured_tokens: self.max_captured_tokens.map(std::num::NonZeroU32::get),
            profile,
        }
    }

    /// The flag that is to blame for an error, if it is one of these.
    pub(crate) fn to_blame(&self, error: &Error) -> Option<String> {
        match error {
            Error::CaptureSizes(_) => Some("--capture-sizes, --max-captured-tokens".to_owned()),
            Error::ReplayCaptureSizes(_) => Some("--replay-capture-sizes".to_owned()),
            Error::Threshold(_) => {
                let rows = self.trim_threshold?;
                Some(format!("--trim-threshold {rows}"))
            }
            _ => None,
        }
    }
}
