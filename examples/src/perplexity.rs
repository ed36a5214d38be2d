//! The program `perplexity`: what each replay policy costs in accuracy.

use std::num::NonZeroU32;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use clap::Parser;
use deepseek_model::sampler::log_softmax_at;
use deepseek_model::{
    CacheOptions, KvCache, LogitRows, Model, ReplayPolicy, SequenceOptions, StepRequest,
};
use serde::Serialize;

use crate::io::Io;
use crate::model::{Checkpoint, ModelArgs, blame};
use crate::progress;
use crate::windows::{Texts, Window};

/// Measures how well a DeepSeek-V4.1 decoder predicts held-out text under each replay policy.
///
/// Each context is computed as one prefill, and the outputs of its last rows are scored: the mean
/// negative log-likelihood, in nats, of the tokens that really follow. Its exponential is the
/// perplexity.
#[derive(Debug, Parser)]
#[command(name = "perplexity", version)]
pub struct PerplexityArgs {
    /// Which model runs, and how.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Texts that the model was not trained on.
    #[arg(
        long,
        value_name = "FILE",
        num_args = 1..,
        default_values = ["examples/perplexity/data/macbeth.txt", "examples/perplexity/data/tempest.txt"],
    )]
    pub text: Vec<PathBuf>,
    /// Lengths of contexts, in tokens.
    #[arg(
        long,
        value_name = "N",
        value_delimiter = ',',
        default_value = "128,512,1024,2048",
        allow_negative_numbers = true
    )]
    pub contexts: Vec<usize>,
    /// Policies to compare; differences are from the first.
    #[arg(
        long,
        value_name = "POLICY",
        value_delimiter = ',',
        default_value = "off,prompt-tail,exact"
    )]
    pub policies: Vec<ReplayPolicy>,
    /// Rows at the end of a context to score.
    #[arg(
        long,
        value_name = "N",
        default_value = "8",
        allow_negative_numbers = true
    )]
    pub last_rows: NonZeroU32,
    /// Contexts per text and length, spread evenly over the text.
    #[arg(
        long,
        value_name = "N",
        default_value = "8",
        allow_negative_numbers = true
    )]
    pub windows: NonZeroU32,
    /// Print one JSON object per length and policy instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// What a policy scores on contexts of one length.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Score {
    /// Length of the contexts, in tokens.
    pub context: usize,
    /// The policy.
    pub policy: String,
    /// Mean negative log-likelihood over all scored rows, in nats.
    pub mean_nll: f64,
    /// Its difference from the first policy's.
    pub difference: f64,
    /// Standard error of that difference, from the spread between contexts.
    pub difference_error: f64,
    /// Scored rows.
    pub rows: usize,
    /// Share of the row-layers that ran, of those of all rows in all layers.
    pub row_layers_share: f64,
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
    let texts = Texts::load(&args.text, &checkpoint)?;
    let rows = args.last_rows.get() as usize;
    let windows = |len| texts.windows(len, rows, args.windows.get() as usize);
    let windows = args
        .contexts
        .iter()
        .map(|&len| windows(len))
        .collect::<anyhow::Result<Vec<_>>>()?;

    let model = args.model.load(io.watched)?;
    // Every policy must be able to run before any of them costs time.
    let longest = args.contexts.iter().copied().max().unwrap_or(1);
    for &policy in &args.policies {
        new_cache(&model, policy, longest, args.last_rows)?;
    }
    let mut head = (!args.json).then(table_head);
    for windows in windows {
        for score in args.scores(&model, &windows, io.watched)? {
            // Only now: a model that fails on its first contexts leaves nothing half-written.
            if let Some(head) = head.take() {
                writeln!(io.out, "{head}")?;
            }
            if args.json {
                serde_json::to_writer(&mut *io.out, &score).map_err(std::io::Error::from)?;
                writeln!(io.out)?;
            } else {
                writeln!(io.out, "{}", table_line(&score))?;
            }
        }
        io.out.flush()?;
    }
    Ok(())
}

impl PerplexityArgs {
    fn check(&self, checkpoint: &Checkpoint) -> anyhow::Result<()> {
        let (rows, positions) = (
            self.last_rows.get() as usize,
            checkpoint.config.max_positions,
        );
        for &len in &self.contexts {
            ensure!(
                (rows..=positions).contains(&len),
                "--contexts {len}: expected {rows} (--last-rows) to {positions} tokens \
                 (max_position_embeddings)"
            );
        }
        Ok(())
    }

    /// One score per policy on contexts of one length.
    fn scores(
        &self,
        model: &Model,
        windows: &[Window<'_>],
        watched: bool,
    ) -> anyhow::Result<Vec<Score>> {
        let bar = progress::contexts(watched, windows.len() * self.policies.len());
        let mut scores = Vec::with_capacity(self.policies.len());
        let mut first: Option<Vec<f64>> = None;
        for &policy in &self.policies {
            let mut measured = Vec::with_capacity(windows.len());
            for window in windows {
                bar.set_message(format!("{policy} {}", window.context.len()));
                measured.push(measure(model, policy, window)?);
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
            scores.push(Score {
                context: windows[0].context.len(),
                policy: policy.to_string(),
                mean_nll: mean_and_error(nlls.iter().copied()).0,
                difference,
                difference_error,
                rows: windows.iter().map(|window| window.targets.len()).sum(),
                row_layers_share: run as f64 / all as f64,
            });
            first.get_or_insert(nlls);
        }
        bar.finish_and_clear();
        Ok(scores)
    }
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
        policy,
        sampled_rows: rows,
    };
    model
        .new_cache(options)
        .map_err(|error| blame(error, || format!("--policies {policy}")))
}

/// Prefills a context in one step and scores its last rows.
fn measure(model: &Model, policy: ReplayPolicy, window: &Window<'_>) -> anyhow::Result<Measured> {
    let prompt_len = window.context.len();
    let rows = window.targets.len();
    let sampled = NonZeroU32::new(rows as u32).context("no rows to score")?;
    let mut cache = new_cache(model, policy, prompt_len, sampled)?;
    let sequence = cache.add(SequenceOptions {
        prompt_len,
        keeps_rows: false,
    })?;
    let requests = [StepRequest {
        sequence,
        tokens: &window.context,
        logits: LogitRows::Tail(rows),
    }];
    let output = model.forward(&requests, &mut cache)?;
    let logits: Vec<Vec<f32>> = output.logits.to_vec2()?;
    let mut nll = 0.0;
    for (row, id) in logits.iter().zip(window.targets) {
        nll -= f64::from(log_softmax_at(row, *id)?);
    }
    Ok(Measured {
        nll: nll / rows as f64,
        row_layers: output.stats.row_layers(),
        row_layers_without_replay: output.stats.row_layers_without_replay(),
    })
}

/// The mean, and its standard error: 0 of a single value.
fn mean_and_error(values: impl ExactSizeIterator<Item = f64> + Clone) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.clone().sum::<f64>() / count;
    let squares: f64 = values.map(|value| (value - mean).powi(2)).sum();
    (mean, (squares / (count - 1.0).max(1.0) / count).sqrt())
}

fn table_head() -> String {
    format!(
        "{:>7}  {:<11}  {:>8}  {:>10}  {:>18}  {:>10}",
        "context", "policy", "mean nll", "perplexity", "difference", "row-layers"
    )
}

fn table_line(score: &Score) -> String {
    format!(
        "{:>7}  {:<11}  {:>8.4}  {:>10.2}  {:>+8.4} ± {:.4}  {:>8.1} %",
        score.context,
        score.policy,
        score.mean_nll,
        score.mean_nll.exp(),
        score.difference,
        score.difference_error,
        100.0 * score.row_layers_share
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_have_errors() {
        assert_eq!(mean_and_error([2.0].into_iter()), (2.0, 0.0));
        let (mean, error) = mean_and_error([1.0, 2.0, 3.0, 6.0].into_iter());
        assert!((mean - 3.0).abs() < 1e-12);
        // Variance 14 / 3, over four values.
        assert!((error - (14.0_f64 / 12.0).sqrt()).abs() < 1e-12);
    }

    #[test]
    fn the_table_lines_up() {
        let score = Score {
            context: 2048,
            policy: "prompt-tail".into(),
            mean_nll: 3.5,
            difference: -0.012,
            difference_error: 0.0034,
            rows: 64,
            row_layers_share: 0.507,
        };
        insta::assert_snapshot!(format!("{}\n{}", table_head(), table_line(&score)), @r"
        context  policy       mean nll  perplexity          difference  row-layers
           2048  prompt-tail    3.5000       33.12   -0.0120 ± 0.0034      50.7 %
        ");
    }
}
