//! What a generation looks like on stdout, and the summary that goes to stderr.

use std::fmt::Write as _;
use std::time::Duration;

use deepseek_model::{FinishReason, GenerateSummary, Generation, ReplayPolicy};
use indicatif::HumanCount;
use serde::Serialize;

use crate::picture::RowMap;

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
    pub time_to_first_token: Option<f64>,
    /// Rows of the prompt that ran, summed over layers.
    pub prefill_row_layers: usize,
    /// The same had no row been dropped.
    pub prefill_row_layers_without_replay: usize,
    /// Log-probability in nats of each prompt token given those before it; none of the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<Vec<Option<f32>>>,
    /// Log-probability in nats of each token after the prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<&'a [f32]>,
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
            time_to_first_token: result.time_to_first_token.map(|time| time.as_secs_f64()),
            prefill_row_layers: map.prefill_row_layers(),
            prefill_row_layers_without_replay: map.prefill_row_layers_without_replay(),
            prompt_logprobs: logprobs.then(of_prompt),
            logprobs: logprobs.then_some(&result.logprobs),
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
    let mut table = String::new();
    for (token, logprob) in tokens {
        let value = logprob.map_or_else(|| "-".to_owned(), |value| format!("{value:.4}"));
        let _ = writeln!(table, "{value:>10}  {token:?}");
    }
    table
}

/// What a batch cost, for a person.
pub struct Summary<'a> {
    /// Tokens and times.
    pub cost: &'a GenerateSummary,
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
            "prefill  {}",
            pace(cost.prefill_tokens, cost.prefill_time)
        )?;
        match (
            self.first_tokens.iter().min(),
            self.first_tokens.iter().max(),
        ) {
            (Some(first), Some(last)) if first == last => {
                write!(f, "; first token after {}", seconds(*first))?;
            }
            (Some(first), Some(last)) => {
                write!(
                    f,
                    "; first tokens after {} to {}",
                    seconds(*first),
                    seconds(*last)
                )?;
            }
            _ => {}
        }
        writeln!(f)?;
        if cost.decode_tokens > 0 {
            writeln!(f, "decode   {}", pace(cost.decode_tokens, cost.decode_time))?;
        }
        let run: usize = self.maps.iter().map(RowMap::prefill_row_layers).sum();
        let all: usize = self
            .maps
            .iter()
            .map(RowMap::prefill_row_layers_without_replay)
            .sum();
        write!(
            f,
            "replay   {}: {} of {} row-layers of the prefill ran ({:.0} %)",
            self.policy,
            HumanCount(run as u64),
            HumanCount(all as u64),
            100.0 * run as f64 / all.max(1) as f64
        )?;
        if self.logprobs && self.policy != ReplayPolicy::Off {
            write!(f, "; --logprobs reads every row, so none is dropped")?;
        }
        writeln!(f)
    }
}

/// `1,024 tokens in 0.52 s, 1,969 tokens/s`.
fn pace(tokens: usize, time: Duration) -> String {
    let count = HumanCount(tokens as u64);
    let rate = tokens as f64 / time.as_secs_f64();
    if !rate.is_finite() {
        return format!("{count} tokens");
    }
    let rate = if rate < 100.0 {
        format!("{rate:.1}")
    } else {
        HumanCount(rate as u64).to_string()
    };
    format!("{count} tokens in {}, {rate} tokens/s", seconds(time))
}

/// Seconds with two decimals, below one in milliseconds.
fn seconds(time: Duration) -> String {
    if time < Duration::from_secs(1) {
        format!("{} ms", time.as_millis())
    } else {
        format!("{:.2} s", time.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
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
        insta::assert_snapshot!(record(false), @r#"{"index":1,"prompt":"say","prompt_ids":[0,9],"text":"so\n","ids":[5,6],"finish":"length","time_to_first_token":1.5,"prefill_row_layers":0,"prefill_row_layers_without_replay":0}"#);
        insta::assert_snapshot!(record(true), @r#"{"index":1,"prompt":"say","prompt_ids":[0,9],"text":"so\n","ids":[5,6],"finish":"length","time_to_first_token":1.5,"prefill_row_layers":0,"prefill_row_layers_without_replay":0,"prompt_logprobs":[null,-2.0],"logprobs":[-0.5,-1.25]}"#);
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
        ];
        assert_eq!(
            logprob_table(tokens),
            "         -  \"<s>\"\n  -12.3457  \" the\\n\"\n"
        );
    }

    #[test]
    fn the_summary_says_what_it_cost() {
        let cost = GenerateSummary {
            prefill_tokens: 1024,
            prefill_time: Duration::from_millis(520),
            decode_tokens: 63,
            decode_time: Duration::from_secs(2),
            ..Default::default()
        };
        let summary = |first_tokens: &[u64], logprobs| {
            let first_tokens = first_tokens
                .iter()
                .map(|ms| Duration::from_millis(*ms))
                .collect();
            let policy = ReplayPolicy::PromptTail;
            Summary {
                cost: &cost,
                first_tokens,
                maps: &[],
                policy,
                logprobs,
            }
            .to_string()
        };
        insta::assert_snapshot!(summary(&[530], false), @r"
        prefill  1,024 tokens in 520 ms, 1,969 tokens/s; first token after 530 ms
        decode   63 tokens in 2.00 s, 31.5 tokens/s
        replay   prompt-tail: 0 of 0 row-layers of the prefill ran (0 %)
        ");
        insta::assert_snapshot!(summary(&[530, 1530], true), @r"
        prefill  1,024 tokens in 520 ms, 1,969 tokens/s; first tokens after 530 ms to 1.53 s
        decode   63 tokens in 2.00 s, 31.5 tokens/s
        replay   prompt-tail: 0 of 0 row-layers of the prefill ran (0 %); --logprobs reads every row, so none is dropped
        ");
    }
}
