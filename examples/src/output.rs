//! What results look like on stdout, and the summary that goes to stderr.

use std::fmt::Write as _;
use std::time::Duration;

use deepseek_model::{FinishReason, GenerateSummary, Generation, ReplayPolicy, StepCounts};
use indicatif::HumanCount;
use serde::Serialize;

use crate::picture::RowMap;
use crate::{count, decimals};

/// Longest part of a prompt that a heading shows, in characters.
const HEADING_CHARS: usize = 40;

/// One request's result: a line of JSON.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Record<'a> {
    /// Number of the prompt, from 0.
    pub index: usize,
    /// The prompt's text.
    pub prompt: &'a str,
    /// Its token ids, the beginning-of-text id included.
    pub prompt_ids: &'a [u32],
    /// The text after the prompt.
    pub text: String,
    /// Its token ids.
    pub ids: &'a [u32],
    /// Why it ended: `stop`, `length` or `positions`.
    pub finish: &'static str,
    /// Seconds from the start of the batch to the first token.
    pub time_to_first_token_s: Option<f64>,
    /// Rows of the prompt that ran, summed over layers.
    pub prefill_row_layers: usize,
    /// The same had no row been dropped.
    pub prefill_row_layers_without_replay: usize,
    /// Log-probability in nats of each prompt token given those before it; none of the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs_nats: Option<Vec<Option<f32>>>,
    /// Log-probability in nats of each token after the prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs_nats: Option<&'a [f32]>,
}

impl<'a> Record<'a> {
    /// Puts together what is known of prompt number `index`. `text` spells out the result's ids.
    pub fn new(
        index: usize,
        (prompt, prompt_ids): (&'a str, &'a [u32]),
        (result, text): (&'a Generation, String),
        map: &RowMap,
        logprobs: bool,
    ) -> Self {
        let of_prompt = || {
            let known = result.prompt_logprobs.iter().copied().map(Some);
            std::iter::once(None).chain(known).collect()
        };
        Self {
            index,
            prompt,
            prompt_ids,
            text,
            ids: &result.ids,
            finish: result.finish.map_or("unfinished", finish_name),
            time_to_first_token_s: result.time_to_first_token.map(|time| time.as_secs_f64()),
            prefill_row_layers: map.prefill_row_layers(),
            prefill_row_layers_without_replay: map.prefill_row_layers_without_replay(),
            prompt_logprobs_nats: logprobs.then(of_prompt),
            logprobs_nats: logprobs.then_some(&result.logprobs),
        }
    }
}

fn finish_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Positions => "positions",
    }
}

/// The line above the result of prompt number `index` of `count`.
pub fn heading(index: usize, count: usize, prompt: &str) -> String {
    let mut shown: String = prompt.chars().take(HEADING_CHARS).collect();
    if shown.len() < prompt.len() {
        shown.push('…');
    }
    format!("=== {} of {count}: {shown:?}", index + 1)
}

/// A table of tokens and their log-probabilities; a token without one is the first of a prompt.
pub fn logprob_table(tokens: impl IntoIterator<Item = (String, Option<f32>)>) -> String {
    let mut table =
        "log-probability, in nats, of each token of prompt and output given those before it:\n"
            .to_owned();
    for (token, logprob) in tokens {
        let value = logprob.map_or_else(|| "-".to_owned(), |value| decimals(value.into()));
        let _ = writeln!(table, "{value:>10}  {token:?}");
    }
    table
}

/// What a batch cost, for a person.
pub struct Summary<'a> {
    /// Tokens and times.
    pub cost: &'a GenerateSummary,
    /// Tokens that were chosen, those that ended a text included.
    pub chosen: usize,
    /// First-token times of the prompts that have one.
    pub first_tokens: Vec<Duration>,
    /// The rows of each prompt.
    pub maps: &'a [RowMap],
    /// The replay policy.
    pub policy: ReplayPolicy,
    /// Whether every prompt row was read, so that none could be dropped.
    pub logprobs: bool,
}

impl std::fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let cost = self.cost;
        write!(
            f,
            "prefill  {}{}",
            count(cost.prefill_tokens, "token"),
            pace(cost.prefill_tokens, cost.prefill_time)
        )?;
        let first = self.first_tokens.iter().min().copied().map(seconds);
        let last = self.first_tokens.iter().max().copied().map(seconds);
        if let (Some(first), Some(last)) = (first, last) {
            let one = self.first_tokens.len() == 1;
            let range = if first == last {
                first
            } else {
                format!("{first} to {last}")
            };
            write!(
                f,
                "; first token{} after {range}",
                if one { "" } else { "s" }
            )?;
        }
        writeln!(f)?;
        if cost.decode_tokens > 0 {
            // The step that ends a prefill gives a token too, and so may its decode rows.
            let others = match self.chosen.saturating_sub(cost.decode_tokens) {
                0 => String::new(),
                1 => "; the other came with the prefill".to_owned(),
                n => format!("; the other {} came with the prefill", HumanCount(n as u64)),
            };
            writeln!(
                f,
                "decode   {} of {}{}{others}",
                HumanCount(cost.decode_tokens as u64),
                count(self.chosen, "token"),
                pace(cost.decode_tokens, cost.decode_time)
            )?;
        }
        let run: usize = self.maps.iter().map(RowMap::prefill_row_layers).sum();
        let all: usize = self
            .maps
            .iter()
            .map(RowMap::prefill_row_layers_without_replay)
            .sum();
        write!(
            f,
            "replay   {}: {} of {} of the prefill ran ({:.0} %)",
            self.policy,
            HumanCount(run as u64),
            count(all, "row-layer"),
            100.0 * run as f64 / all.max(1) as f64
        )?;
        if self.logprobs && self.policy != ReplayPolicy::Off {
            write!(f, "; --logprobs reads every row, so none is dropped")?;
        }
        writeln!(f)?;
        writeln!(f, "steps    {}", steps(&cost.steps))
    }
}

/// Where the time of prefill and decode steps went, phase by phase; nothing if it was not measured.
pub fn phase_table(cost: &GenerateSummary) -> String {
    let (prefill, decode) = (cost.prefill_phases, cost.decode_phases);
    if prefill.or(decode).is_none() {
        return String::new();
    }
    let [prefill, decode] = [prefill, decode].map(Option::unwrap_or_default);
    let ms = |time: Duration| format!("{:.3}", time.as_secs_f64() * 1e3);
    let mut table = format!("{:<16}{:>12}{:>12}\n", "phase, ms", "prefill", "decode");
    let phases = prefill.phases().into_iter().zip(decode.phases());
    let sums = [("total", prefill.total(), decode.total())];
    let rows = phases.map(|((name, prefill), (_, decode))| (name, prefill, decode));
    for (name, prefill, decode) in rows.chain(sums) {
        let _ = writeln!(table, "{name:<16}{:>12}{:>12}", ms(prefill), ms(decode));
    }
    table
}

/// `1 prefill: eager, dropped rows; 127 decode: 2 eager, 125 full`, without what there was none of.
fn steps(counts: &StepCounts) -> String {
    let kinds = [
        ("prefill", counts.prefill),
        ("mixed", counts.mixed),
        ("decode", counts.decode),
    ];
    let kinds = kinds.iter().filter(|(_, modes)| modes.total().steps > 0);
    let kinds = kinds.map(|(kind, modes)| {
        let total = modes.total();
        let named = [
            ("eager", modes.eager),
            ("piecewise", modes.piecewise),
            ("full", modes.full),
        ];
        let named = named.iter().filter(|(_, count)| count.steps > 0);
        let named = named.map(|(mode, count)| {
            if count.steps == total.steps {
                return (*mode).to_owned();
            }
            format!("{} {mode}", HumanCount(count.steps as u64))
        });
        let named = named.collect::<Vec<_>>().join(", ");
        let trimmed = match total.trimmed {
            0 => String::new(),
            n if n == total.steps => ", dropped rows".to_owned(),
            n => format!(", {} dropped rows", HumanCount(n as u64)),
        };
        format!(
            "{} {kind}: {named}{trimmed}",
            HumanCount(total.steps as u64)
        )
    });
    kinds.collect::<Vec<_>>().join("; ")
}

/// ` in 0.52 s, 1,969 tokens/s`; nothing of what took no time.
fn pace(tokens: usize, time: Duration) -> String {
    let rate = tokens as f64 / time.as_secs_f64();
    if !rate.is_finite() {
        return String::new();
    }
    let rate = if rate < 100.0 {
        format!("{rate:.1}")
    } else {
        HumanCount(rate as u64).to_string()
    };
    format!(" in {}, {rate} tokens/s", seconds(time))
}

/// Seconds with two decimals, below one in milliseconds.
fn seconds(time: Duration) -> String {
    if time < Duration::from_secs(1) {
        format!("{} ms", time.as_millis())
    } else {
        format!("{:.2} s", time.as_secs_f64())
    }
}

/// What a policy scores on contexts of one length: a line of a table or of JSON.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Score {
    /// Length of the contexts, in tokens.
    pub context_tokens: usize,
    /// The policy.
    pub policy: String,
    /// Tokens of a chunk at most.
    pub chunk_tokens: usize,
    /// Contexts measured.
    pub contexts: usize,
    /// Scored rows.
    pub rows: usize,
    /// Mean negative log-likelihood over all scored rows, in nats.
    pub mean_nll_nats: f64,
    /// Its difference from the first policy's.
    pub difference_nats: f64,
    /// Standard error of that difference, from the spread between contexts; one context has none.
    pub difference_error_nats: Option<f64>,
    /// Share of the row-layers that ran, of those of all rows in all layers.
    pub row_layers_share: f64,
}

/// A table of scores, with what its columns mean below.
pub fn score_table(scores: &[Score]) -> String {
    let mut table = format!(
        "{:>7}  {:<11}  {:>8}  {:>10}  {:>18}  {:>10}\n",
        "context", "policy", "mean nll", "perplexity", "difference", "row-layers"
    );
    for score in scores {
        let error = score.difference_error_nats;
        let error = error.map_or_else(|| "n/a   ".to_owned(), decimals);
        let plus = if score.difference_nats >= 5e-5 {
            "+"
        } else {
            ""
        };
        let _ = writeln!(
            table,
            "{:>7}  {:<11}  {:>8}  {:>10.2}  {:>18}  {:>8.1} %",
            score.context_tokens,
            score.policy,
            decimals(score.mean_nll_nats),
            score.mean_nll_nats.exp(),
            format!("{plus}{} ± {error}", decimals(score.difference_nats)),
            100.0 * score.row_layers_share
        );
    }
    if let Some(first) = scores.first() {
        let error = match first.contexts {
            1 => "n/a, as one context has no standard error".to_owned(),
            n => format!("its standard error over {}", count(n, "context")),
        };
        let from = &first.policy;
        let _ = writeln!(
            table,
            "mean nll: mean negative log-likelihood, in nats; difference: from {from}, ± {error}"
        );
    }
    table
}

#[cfg(test)]
mod tests {
    use deepseek_model::{ModeCounts, StepCount};

    use super::*;

    fn generation() -> Generation {
        Generation {
            ids: vec![5, 6],
            logprobs: vec![-0.5, -1.25],
            prompt_logprobs: vec![-2.0],
            finish: Some(FinishReason::Length),
            time_to_first_token: Some(Duration::from_millis(1500)),
        }
    }

    #[test]
    fn a_record_is_one_line_of_json() {
        let (result, map) = (generation(), RowMap::new(2, 3));
        let record = |logprobs| {
            let result = (&result, "so\n".to_owned());
            serde_json::to_string(&Record::new(1, ("say", &[0, 9]), result, &map, logprobs))
                .unwrap()
        };
        insta::assert_snapshot!(record(false), @r#"{"index":1,"prompt":"say","prompt_ids":[0,9],"text":"so\n","ids":[5,6],"finish":"length","time_to_first_token_s":1.5,"prefill_row_layers":0,"prefill_row_layers_without_replay":0}"#);
        insta::assert_snapshot!(record(true), @r#"{"index":1,"prompt":"say","prompt_ids":[0,9],"text":"so\n","ids":[5,6],"finish":"length","time_to_first_token_s":1.5,"prefill_row_layers":0,"prefill_row_layers_without_replay":0,"prompt_logprobs_nats":[null,-2.0],"logprobs_nats":[-0.5,-1.25]}"#);
    }

    #[test]
    fn headings_are_short_and_on_one_line() {
        assert_eq!(heading(0, 2, "a\nb"), r#"=== 1 of 2: "a\nb""#);
        let long = heading(1, 2, &"é".repeat(50));
        assert_eq!(long, format!("=== 2 of 2: \"{}…\"", "é".repeat(40)));
    }

    #[test]
    fn log_probabilities_line_up() {
        let tokens = [
            ("<s>".to_owned(), None),
            (" the\n".to_owned(), Some(-12.345_67)),
            ("!".to_owned(), Some(-0.000_01)),
        ];
        insta::assert_snapshot!(logprob_table(tokens), @r#"
        log-probability, in nats, of each token of prompt and output given those before it:
                 -  "<s>"
          -12.3457  " the\n"
            0.0000  "!"
        "#);
    }

    #[test]
    fn the_summary_says_what_it_cost() {
        let of = |steps, trimmed| StepCount { steps, trimmed };
        let cost = GenerateSummary {
            prefill_tokens: 1024,
            prefill_time: Duration::from_millis(520),
            decode_tokens: 63,
            decode_time: Duration::from_secs(2),
            steps: StepCounts {
                prefill: ModeCounts {
                    piecewise: of(3, 3),
                    eager: of(1, 0),
                    ..Default::default()
                },
                mixed: ModeCounts {
                    piecewise: of(2, 2),
                    ..Default::default()
                },
                decode: ModeCounts {
                    full: of(1063, 0),
                    ..Default::default()
                },
            },
            ..Default::default()
        };
        let summary = |chosen, first_tokens: &[u64], logprobs| {
            let first_tokens = first_tokens.iter().copied().map(Duration::from_millis);
            Summary {
                cost: &cost,
                chosen,
                first_tokens: first_tokens.collect(),
                maps: &[],
                policy: ReplayPolicy::PromptTail,
                logprobs,
            }
            .to_string()
        };
        insta::assert_snapshot!(summary(64, &[530], false), @r"
        prefill  1,024 tokens in 520 ms, 1,969 tokens/s; first token after 530 ms
        decode   63 of 64 tokens in 2.00 s, 31.5 tokens/s; the other came with the prefill
        replay   prompt-tail: 0 of 0 row-layers of the prefill ran (0 %)
        steps    4 prefill: 1 eager, 3 piecewise, 3 dropped rows; 2 mixed: piecewise, dropped rows; 1,063 decode: full
        ");
        insta::assert_snapshot!(summary(1065, &[530, 1530], true), @r"
        prefill  1,024 tokens in 520 ms, 1,969 tokens/s; first tokens after 530 ms to 1.53 s
        decode   63 of 1,065 tokens in 2.00 s, 31.5 tokens/s; the other 1,002 came with the prefill
        replay   prompt-tail: 0 of 0 row-layers of the prefill ran (0 %); --logprobs reads every row, so none is dropped
        steps    4 prefill: 1 eager, 3 piecewise, 3 dropped rows; 2 mixed: piecewise, dropped rows; 1,063 decode: full
        ");
        // Times that look the same are one time.
        insta::assert_snapshot!(summary(65, &[1530, 1531], false).lines().next().unwrap(), @"prefill  1,024 tokens in 520 ms, 1,969 tokens/s; first tokens after 1.53 s");
        let cost = GenerateSummary {
            prefill_tokens: 1,
            prefill_time: Duration::from_millis(10),
            steps: StepCounts {
                prefill: ModeCounts {
                    eager: of(1, 0),
                    ..Default::default()
                },
                ..Default::default()
            },
            ..Default::default()
        };
        let one = Summary {
            cost: &cost,
            chosen: 0,
            first_tokens: vec![],
            maps: &[],
            policy: ReplayPolicy::Off,
            logprobs: false,
        };
        insta::assert_snapshot!(one.to_string(), @r"
        prefill  1 token in 10 ms, 100 tokens/s
        replay   off: 0 of 0 row-layers of the prefill ran (0 %)
        steps    1 prefill: eager
        ");
    }

    #[test]
    fn the_table_of_scores_lines_up() {
        let score = |policy: &str, difference, error| Score {
            context_tokens: 2048,
            policy: policy.into(),
            chunk_tokens: 2048,
            contexts: 8,
            rows: 64,
            mean_nll_nats: 3.5 + difference,
            difference_nats: difference,
            difference_error_nats: error,
            row_layers_share: 0.507,
        };
        insta::assert_snapshot!(score_table(&[
            score("off", 0.0, Some(0.0)),
            score("prompt-tail", -0.012, Some(0.0034)),
            score("step-tail", 0.25, Some(0.0625)),
            score("exact", -0.000_01, Some(0.000_02)),
        ]), @r"
        context  policy       mean nll  perplexity          difference  row-layers
           2048  off            3.5000       33.12     0.0000 ± 0.0000      50.7 %
           2048  prompt-tail    3.4880       32.72    -0.0120 ± 0.0034      50.7 %
           2048  step-tail      3.7500       42.52    +0.2500 ± 0.0625      50.7 %
           2048  exact          3.5000       33.12     0.0000 ± 0.0000      50.7 %
        mean nll: mean negative log-likelihood, in nats; difference: from off, ± its standard error over 8 contexts
        ");
        let mut single = score("exact", 0.25, None);
        single.contexts = 1;
        insta::assert_snapshot!(score_table(&[single]), @r"
        context  policy       mean nll  perplexity          difference  row-layers
           2048  exact          3.7500       42.52    +0.2500 ± n/a         50.7 %
        mean nll: mean negative log-likelihood, in nats; difference: from exact, ± n/a, as one context has no standard error
        ");
    }
}
