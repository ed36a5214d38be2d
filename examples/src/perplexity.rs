//! The program `perplexity`: what each replay policy costs in accuracy.

use std::fmt::Display;
use std::num::{NonZeroU32, NonZeroUsize};
use std::ops::ControlFlow;
use std::path::PathBuf;

use anyhow::{Context, bail, ensure};
use clap::Parser;
use deepseek_model::{Model, ReplayPolicy};

use crate::count;
use crate::flags::{self, Blame, STATUS};
use crate::interrupt::{Interrupt, Interrupted, Signal};
use crate::io::{Io, is_dash, shown};
use crate::measure::{mean_and_error, measure, new_cache};
use crate::model::ModelArgs;
use crate::output::{Score, score_table};
use crate::progress;
use crate::windows::{Texts, Window};

const AFTER_HELP: &str = "\
The fields of a JSON object:
  context_tokens         length of the contexts, in tokens
  policy                 the policy
  chunk_tokens           tokens of a chunk of a context at most
  contexts               how many contexts were measured
  rows                   how many rows were scored, over all contexts
  mean_nll_nats          mean negative log-likelihood of these rows, in nats
  difference_nats        its difference from the first policy's, in nats
  difference_error_nats  standard error of that difference, in nats; null of a single context
  row_layers_share       share of the row-layers (a row through a layer) that ran

The table comes when all is measured. Where a measurement fails, as for lack of memory, it has what was
measured before, and the exit status tells. So it does after an interrupt from the keyboard, with status
130, and after SIGTERM, with 143; a second one ends the program at once. JSON objects come one by one,
each when it is measured.

RAYON_NUM_THREADS sets how many threads compute: 0, the default, is one for each core; at most 256,
or four for each core where that is more.";

/// Measures how well a DeepSeek-V4.1 decoder predicts held-out text under each replay policy.
///
/// Each context is prefilled, and the outputs of its last rows are scored: the mean negative
/// log-likelihood, in nats, of the tokens that really follow. Its exponential is the perplexity.
///
/// The difference is that of a policy's mean from the first policy's on the same contexts, and ± its
/// standard error: how far chance alone takes it, by the spread of the difference from context to
/// context. A single context has none. Contexts of one text overlap where there are more of them than it
/// has room for, and texts can be mostly the same; contexts then say less than their number, and the
/// error is larger than it seems. A note on standard error names texts of which more than half is shared.
#[derive(Debug, Parser)]
#[command(name = "perplexity", version, after_long_help = format!("{AFTER_HELP}\n\n{STATUS}"))]
pub struct PerplexityArgs {
    /// Which model runs, and how.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Texts that the model was not trained on, separated by blanks; - is standard input, and relative
    /// paths start at the current directory. A byte-order mark before a text is left out.
    #[arg(
        long,
        value_name = "FILE",
        num_args = 1..,
        default_values = ["examples/perplexity/data/macbeth.txt", "examples/perplexity/data/tempest.txt"],
    )]
    pub text: Vec<PathBuf>,
    /// Lengths of contexts, in tokens, separated by commas.
    #[arg(
        long,
        value_name = "N",
        value_delimiter = ',',
        default_value = "128,512,1024,2048",
        value_parser = flags::text(flags::one_of_positive),
        allow_hyphen_values = true
    )]
    pub contexts: Vec<usize>,
    /// Policies to compare, separated by commas; differences are from the first.
    #[arg(
        long,
        value_name = "POLICY",
        alias = "replay",
        value_delimiter = ',',
        default_value = "off,prompt-tail,exact",
        value_parser = flags::text(flags::one_of_policies),
        allow_hyphen_values = true
    )]
    pub policies: Vec<ReplayPolicy>,
    /// Tokens of a context to compute at a time at most, 1 or above [default: the whole context].
    ///
    /// Which rows run depends on it under step-tail only: it keeps the last rows of each chunk, so that
    /// over a context in one chunk it is prompt-tail. Sums in another order move the last bits under
    /// every policy, and rounding of cached values, or a choice between scores that all but tie, can make
    /// more of that.
    #[arg(
        long,
        value_name = "N",
        value_parser = flags::text(flags::counting::<NonZeroUsize>),
        allow_hyphen_values = true
    )]
    pub chunk: Option<NonZeroUsize>,
    /// Rows at the end of a context to score, 1 or above.
    #[arg(
        long,
        value_name = "N",
        default_value = "8",
        value_parser = flags::text(flags::counting::<NonZeroU32>),
        allow_hyphen_values = true
    )]
    pub last_rows: NonZeroU32,
    /// Contexts per text and length, 1 or above, spread evenly over the text.
    #[arg(
        long,
        value_name = "N",
        default_value = "8",
        value_parser = flags::text(flags::counting::<NonZeroU32>),
        allow_hyphen_values = true
    )]
    pub windows: NonZeroU32,
    /// Print one JSON object per length and policy instead of a table; --help lists its fields.
    #[arg(long)]
    pub json: bool,
}

/// Runs the program.
///
/// # Errors
/// Bad input is refused before anything is written to `io.out`, by an error that names the flag,
/// the file or the field. A reader that closed `io.out` gives an error too.
pub fn run(args: &PerplexityArgs, io: &mut Io<'_>) -> anyhow::Result<()> {
    args.check()?;
    let checkpoint = args.model.checkpoint()?;
    args.check_positions(checkpoint.config.max_positions)?;
    let texts = Texts::load(&args.text, &checkpoint, io.stdin)?;
    let rows = args.last_rows.get() as usize;
    let longest = args.contexts.iter().copied().max().unwrap_or(1);
    let each = args.windows.get() as usize;
    texts.check(longest, rows, each)?;
    let windows = args.contexts.iter();
    let windows: Vec<_> = windows.map(|&len| texts.windows(len, rows, each)).collect();

    for note in texts.notes(&args.contexts, each) {
        // Beside the result: that nobody can be told is no failure.
        let _ = writeln!(io.err, "{note}");
    }

    let model = args.model.load(args.model.options()?, io.watched)?;
    // Every policy must be able to run before any of them costs time.
    for &policy in &args.policies {
        new_cache(&model, policy, longest, args.last_rows)?;
    }
    if let Some(interrupt) = &io.interrupt {
        interrupt.watch().context("cannot watch for interrupts")?;
    }
    let mut scores = Vec::new();
    let measured = windows
        .iter()
        .try_for_each(|windows| args.measure(&model, windows, io, &mut scores));
    // What went well took its time, and holds whatever failed behind it.
    if !args.json && !scores.is_empty() {
        write!(io.out, "{}", score_table(&scores))?;
    }
    io.out.flush()?;
    measured
}

impl PerplexityArgs {
    /// Refuses what no model and no file makes right.
    fn check(&self) -> anyhow::Result<()> {
        let rows = self.last_rows.get() as usize;
        if let Some(len) = self.contexts.iter().find(|len| **len < rows) {
            bail!(Blame::misuse(format!(
                "--contexts {len}: expected at least {}, as many as --last-rows scores",
                count(rows, "token")
            )));
        }
        let of_stdin = self.text.iter().filter(|file| is_dash(file)).count();
        ensure!(
            of_stdin <= 1,
            Blame::misuse("--text -: standard input can be read only once")
        );
        ensure_distinct("--text", self.text.iter().map(|file| shown(file)))?;
        ensure_distinct("--contexts", &self.contexts)?;
        ensure_distinct("--policies", &self.policies)
    }

    fn check_positions(&self, positions: usize) -> anyhow::Result<()> {
        let rows = self.last_rows.get() as usize;
        ensure!(
            rows <= positions,
            "--last-rows {rows}: expected at most {positions} (max_position_embeddings)"
        );
        for len in &self.contexts {
            ensure!(
                *len <= positions,
                "--contexts {len}: expected {rows} (--last-rows) to {positions} tokens \
                 (max_position_embeddings)"
            );
        }
        Ok(())
    }

    /// Adds one score per policy on contexts of one length; as JSON it is written at once.
    fn measure(
        &self,
        model: &Model,
        windows: &[Window<'_>],
        io: &mut Io<'_>,
        scores: &mut Vec<Score>,
    ) -> anyhow::Result<()> {
        let len = windows[0].context.len();
        let bar = progress::contexts(io.watched, windows.len() * self.policies.len());
        let interrupt = io.interrupt.clone();
        let signal = || interrupt.as_ref().and_then(Interrupt::came);
        let mut first: Option<Vec<f64>> = None;
        for &policy in &self.policies {
            let mut measured = Vec::with_capacity(windows.len());
            for window in windows {
                bar.set_message(format!("{policy} {len}"));
                let context = || {
                    let tokens = count(window.context.len(), "token");
                    let (file, start) = (shown(window.file), window.start);
                    format!("--text {file}, {tokens} from token {start} on, policy {policy}")
                };
                let one = measure(model, policy, self.chunk, window, signal);
                match one.with_context(context)? {
                    ControlFlow::Continue(one) => measured.push(one),
                    ControlFlow::Break(by) => return Err(self.cut_off(by, scores.len()).into()),
                }
                bar.inc(1);
            }
            let nlls: Vec<f64> = measured.iter().map(|context| context.nll).collect();
            let differences = first
                .as_ref()
                .unwrap_or(&nlls)
                .iter()
                .zip(&nlls)
                .map(|(a, b)| b - a);
            let (difference, difference_error) = mean_and_error(differences);
            let run: usize = measured.iter().map(|context| context.row_layers).sum();
            let all: usize = measured
                .iter()
                .map(|context| context.row_layers_without_replay)
                .sum();
            let score = Score {
                context_tokens: len,
                policy: policy.to_string(),
                chunk_tokens: self.chunk.map_or(len, |chunk| len.min(chunk.get())),
                contexts: windows.len(),
                mean_nll_nats: mean_and_error(nlls.iter().copied()).0,
                difference_nats: difference,
                difference_error_nats: difference_error,
                rows: windows.iter().map(|window| window.targets.len()).sum(),
                row_layers_share: run as f64 / all as f64,
            };
            if self.json {
                bar.suspend(|| write_json(io, &score))?;
            }
            scores.push(score);
            first.get_or_insert(nlls);
        }
        bar.finish_and_clear();
        Ok(())
    }

    /// Why no more than `done` scores came.
    fn cut_off(&self, by: Signal, done: usize) -> Interrupted {
        let all = self.contexts.len() * self.policies.len();
        let (left, all) = (all - done, count(all, "measurement"));
        let left = format!("{left} of {all} had not come to an end");
        Interrupted { by, left }
    }
}

/// Writes one line.
fn write_json(io: &mut Io<'_>, score: &Score) -> anyhow::Result<()> {
    serde_json::to_writer(&mut *io.out, score).map_err(std::io::Error::from)?;
    writeln!(io.out)?;
    Ok(io.out.flush()?)
}

/// Refuses what would be measured twice.
fn ensure_distinct<T: PartialEq + Display>(
    flag: &str,
    values: impl IntoIterator<Item = T>,
) -> anyhow::Result<()> {
    let mut known = Vec::new();
    for value in values {
        ensure!(
            !known.contains(&value),
            Blame::misuse(format!("{flag}: expected each once, got {value} again"))
        );
        known.push(value);
    }
    Ok(())
}
