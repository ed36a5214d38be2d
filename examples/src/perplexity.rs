//! The program `perplexity`: what each replay policy costs in accuracy.

use std::fmt::Display;
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;

use anyhow::{Context, ensure};
use clap::Parser;
use deepseek_model::sampler::log_softmax_at;
use deepseek_model::{
    CacheOptions, Error, KvCache, LogitRows, Model, ReplayPolicy, SequenceOptions, StepRequest,
};

use crate::count;
use crate::flags::{self, Blame, STATUS};
use crate::io::{Io, shown};
use crate::model::{Checkpoint, FLAG, ModelArgs, blame};
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
measured before, and the exit status tells. JSON objects come one by one, each when it is measured.

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

/// What came of one context under one policy.
struct Measured {
    /// Mean over its scored rows.
    nll: f64,
    row_layers: usize,
    row_layers_without_replay: usize,
}

/// Runs the program.
///
/// # Errors
/// Bad input is refused before anything is written to `io.out`, by an error that names the flag,
/// the file or the field. A reader that closed `io.out` gives an error too.
pub fn run(args: &PerplexityArgs, io: &mut Io<'_>) -> anyhow::Result<()> {
    let checkpoint = args.model.checkpoint()?;
    args.check(&checkpoint)?;
    let texts = Texts::load(&args.text, &checkpoint, io.stdin)?;
    let rows = args.last_rows.get() as usize;
    let windows = |len| texts.windows(len, rows, args.windows.get() as usize);
    let windows = args
        .contexts
        .iter()
        .map(|&len| windows(len))
        .collect::<anyhow::Result<Vec<_>>>()?;

    for note in texts.notes(&args.contexts, args.windows.get() as usize) {
        // Beside the result: that nobody can be told is no failure.
        let _ = writeln!(io.err, "{note}");
    }

    let model = args.model.load(args.model.options()?, io.watched)?;
    // Every policy must be able to run before any of them costs time.
    let longest = args.contexts.iter().copied().max().unwrap_or(1);
    for &policy in &args.policies {
        new_cache(&model, policy, longest, args.last_rows)?;
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
    fn check(&self, checkpoint: &Checkpoint) -> anyhow::Result<()> {
        let (rows, positions) = (
            self.last_rows.get() as usize,
            checkpoint.config.max_positions,
        );
        ensure!(
            rows <= positions,
            "--last-rows {rows}: expected at most {positions} (max_position_embeddings)"
        );
        for &len in &self.contexts {
            ensure!(
                (rows..=positions).contains(&len),
                "--contexts {len}: expected {rows} (--last-rows) to {positions} tokens \
                 (max_position_embeddings)"
            );
        }
        ensure_distinct("--contexts", &self.contexts)?;
        ensure_distinct("--policies", &self.policies)
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
                measured.push(measure(model, policy, self.chunk, window).with_context(context)?);
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
}

/// Writes one line.
fn write_json(io: &mut Io<'_>, score: &Score) -> anyhow::Result<()> {
    serde_json::to_writer(&mut *io.out, score).map_err(std::io::Error::from)?;
    writeln!(io.out)?;
    Ok(io.out.flush()?)
}

/// A cache for one context of `len` tokens, the last `rows` of which are scored.
fn new_cache(
    model: &Model,
    policy: ReplayPolicy,
    len: usize,
    rows: NonZeroU32,
) -> anyhow::Result<KvCache> {
    let options = CacheOptions {
        max_sequences: 1,
        max_tokens: len,
        page_tokens: CacheOptions::PAGE_TOKENS,
        policy,
        sampled_rows: rows,
    };
    model.new_cache(options).map_err(|error| {
        let (policy, size) = (format!("--policies {policy}"), format!("--contexts {len}"));
        blame(error, &policy, &size)
    })
}

/// Prefills a context, a chunk at a time, and scores its last rows.
fn measure(
    model: &Model,
    policy: ReplayPolicy,
    chunk: Option<NonZeroUsize>,
    window: &Window<'_>,
) -> anyhow::Result<Measured> {
    let prompt_len = window.context.len();
    let rows = window.targets.len();
    let sampled = NonZeroU32::new(rows as u32).context("no rows to score")?;
    let mut cache = new_cache(model, policy, prompt_len, sampled)?;
    let sequence = cache.add(SequenceOptions {
        prompt_len,
        keeps_rows: false,
    })?;
    let mut measured = Measured {
        nll: 0.0,
        row_layers: 0,
        row_layers_without_replay: 0,
    };
    let blamed = |error: Error| {
        let size = chunk.map_or_else(
            || format!("--contexts {prompt_len} without --chunk"),
            |chunk| format!("--chunk {chunk}"),
        );
        blame(error, &format!("--policies {policy}"), &size)
    };
    let (mut end, mut targets) = (0, window.targets);
    for tokens in window
        .context
        .chunks(chunk.map_or(prompt_len, NonZeroUsize::get))
    {
        end += tokens.len();
        // The scored rows may begin in an earlier chunk than the last.
        let scored = (end + rows).saturating_sub(prompt_len).min(tokens.len());
        let logits = LogitRows::Tail(scored);
        let requests = [StepRequest {
            sequence,
            tokens,
            logits,
        }];
        let output = model.forward(&requests, &mut cache).map_err(blamed)?;
        let (here, later) = targets.split_at(scored);
        let logits: Vec<Vec<f32>> = output.logits.to_vec2()?;
        for ((row, id), position) in logits.iter().zip(here).zip(end - scored..) {
            let nll = -f64::from(log_softmax_at(row, *id).map_err(|error| blamed(error.into()))?);
            ensure!(
                nll.is_finite(),
                "{FLAG}: the negative log-likelihood of token {id} after position {position} is {nll}: \
                 expected a finite number"
            );
            measured.nll += nll / rows as f64;
        }
        targets = later;
        measured.row_layers += output.stats.row_layers();
        measured.row_layers_without_replay += output.stats.row_layers_without_replay();
    }
    Ok(measured)
}

/// Refuses what would be measured twice.
fn ensure_distinct<T: PartialEq + Display>(flag: &str, values: &[T]) -> anyhow::Result<()> {
    for (index, value) in values.iter().enumerate() {
        ensure!(
            !values[..index].contains(value),
            Blame::misuse(format!("{flag}: expected each once, got {value} again"))
        );
    }
    Ok(())
}

/// The mean, and its standard error if there are two values or more.
fn mean_and_error(values: impl ExactSizeIterator<Item = f64> + Clone) -> (f64, Option<f64>) {
    let count = values.len() as f64;
    let mean = values.clone().sum::<f64>() / count;
    let squares: f64 = values.map(|value| (value - mean).powi(2)).sum();
    let error = (squares / (count - 1.0) / count).sqrt();
    (mean, (count > 1.0).then_some(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_have_errors() {
        assert_eq!(mean_and_error([2.0].into_iter()), (2.0, None));
        let (mean, error) = mean_and_error([1.0, 2.0, 3.0, 6.0].into_iter());
        assert!((mean - 3.0).abs() < 1e-12);
        // Variance 14 / 3, over four values.
        assert!((error.unwrap() - (14.0_f64 / 12.0).sqrt()).abs() < 1e-12);
    }
}
