//! What results look like on stdout.

use std::fmt::Write as _;

use deepseek_model::tokenizer::{Tokenizer, TokenizerError};
use deepseek_model::{FinishReason, Generation};
use serde::Serialize;

use crate::io::{is_dash, shown};
use crate::picture::RowMap;
use crate::prompts::{Prompt, Source};
use crate::{count, decimals};

/// What `--help` says of a [`Record`].
pub(crate) const FIELDS: &str = "\
The fields of a JSON object of --json:
  index                              number of the prompt, from 0
  prompt, prompt_ids                 its text, and its token ids from the beginning-of-text id on
  text, ids                          the text after it, and its token ids
  finish                             why it ended: stop (the model said so), length
                                     (--max-new-tokens), positions (the model has no more) or
                                     unfinished (the run was interrupted)
  time_to_first_token_s              seconds from the first step of the batch to the first token;
                                     null if there is none
  prefill_row_layers                 rows of the prompt that ran, summed over layers
  prefill_row_layers_without_replay  the same had no row been dropped
  prompt_logprobs_nats               with --logprobs, log-probability of each prompt token given
                                     those before it; null for the first
  logprobs_nats                      with --logprobs, the same of each token of the text after it";

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
    /// Why it ended: `stop`, `length`, `positions` or, of a run that was interrupted, `unfinished`.
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

/// The line above the result of prompt number `index` of `count`: texts may begin alike, files do not
/// have one name.
pub fn heading(index: usize, count: usize, prompt: &Prompt) -> String {
    let text = &prompt.text;
    let mut beginning: String = text.chars().take(HEADING_CHARS).collect();
    if beginning.len() < text.len() {
        beginning.push('…');
    }
    let file = match &prompt.source {
        Source::Flag(_) => String::new(),
        Source::File(path) if is_dash(path) => ", standard input".to_owned(),
        Source::File(path) => format!(", {}", shown(path)),
    };
    format!("=== {} of {count}{file}: {beginning:?}", index + 1)
}

/// A token as a table shows it: quoted, or as `b"..."` if it is only a part of a character.
///
/// # Errors
/// The tokenizer fails on the id.
pub fn spelled(tokenizer: &Tokenizer, id: u32) -> Result<String, TokenizerError> {
    let text = tokenizer.decode(&[id])?;
    if !text.contains(char::REPLACEMENT_CHARACTER) {
        return Ok(format!("{text:?}"));
    }
    Ok(match tokenizer.bytes(id).map(String::from_utf8) {
        // The token for U+FFFD itself.
        Some(Ok(text)) => format!("{text:?}"),
        Some(Err(part)) => format!("b\"{}\"", part.as_bytes().escape_ascii()),
        None => format!("{text:?}, token {id}"),
    })
}

/// A table of tokens, as [`spelled`] gives them, and their log-probabilities; a token without one is the first of a prompt.
pub fn logprob_table(tokens: impl IntoIterator<Item = (String, Option<f32>)>) -> String {
    let mut table =
        "log-probability, in nats, of each token of prompt and output given those before it:\n"
            .to_owned();
    for (token, logprob) in tokens {
        let value = logprob.map_or_else(|| "-".to_owned(), |value| decimals(value.into()));
        let _ = writeln!(table, "{value:>10}  {token}");
    }
    table
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
    use std::path::Path;
    use std::time::Duration;

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
        let heading = |index, source, text: &str| {
            let text = text.to_owned();
            heading(index, 2, &Prompt { source, text })
        };
        assert_eq!(heading(0, Source::Flag(1), "a\nb"), r#"=== 1 of 2: "a\nb""#);
        let long = heading(1, Source::Flag(2), &"é".repeat(50));
        assert_eq!(long, format!("=== 2 of 2: \"{}…\"", "é".repeat(40)));
        // Texts that begin alike.
        let file = Source::File("acts/3.txt".into());
        let act = heading(1, file, &"ACT ".repeat(20));
        insta::assert_snapshot!(act, @r#"=== 2 of 2, acts/3.txt: "ACT ACT ACT ACT ACT ACT ACT ACT ACT ACT …""#);
    }

    /// U+FFFD stands for any part of any character: two such tokens would look alike.
    #[test]
    fn a_part_of_a_character_is_told_by_its_bytes() {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/v41-demo");
        let tokenizer = Tokenizer::load(demo).unwrap();
        let spelled = |text: &str| {
            let ids = tokenizer.encode(text).unwrap();
            let tokens = ids.iter().map(|&id| spelled(&tokenizer, id).unwrap());
            tokens.collect::<Vec<_>>().join(" ")
        };
        insta::assert_snapshot!(spelled("a\n✓<｜end▁of▁sentence｜>"), @r#""a" "\n" b"\xe2" b"\x9c" b"\x93" "<｜end▁of▁sentence｜>""#);
        insta::assert_snapshot!(spelled("\u{fffd}"), @r#"b"\xef" b"\xbf" b"\xbd""#);
    }

    #[test]
    fn log_probabilities_line_up() {
        let tokens = [
            (r#""<s>""#.to_owned(), None),
            (r#"" the\n""#.to_owned(), Some(-12.345_67)),
            (r#""!""#.to_owned(), Some(-0.000_01)),
        ];
        insta::assert_snapshot!(logprob_table(tokens), @r#"
        log-probability, in nats, of each token of prompt and output given those before it:
                 -  "<s>"
          -12.3457  " the\n"
            0.0000  "!"
        "#);
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
