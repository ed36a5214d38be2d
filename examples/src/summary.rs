//! What a batch cost and how its texts ended, for a person.

use std::time::Duration;

use deepseek_model::{GenerateSummary, ReplayPolicy};
use indicatif::HumanCount;

use crate::count;
use crate::picture::RowMap;
use crate::steps::steps;

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
    /// Texts that ended because the model has no more positions.
    pub cut_off: usize,
    /// Positions of the model.
    pub positions: usize,
    /// Whether a prompt is longer than the model's window, so that some of its rows can be dropped.
    pub droppable: bool,
}

impl Summary<'_> {
    /// Steps with prefill rows in graphs that ran them all, where the policy could drop some.
    fn whole_in_graphs(&self) -> usize {
        use ReplayPolicy::{PromptTail, StepTail};
        if self.logprobs || !self.droppable || !matches!(self.policy, StepTail | PromptTail) {
            return 0;
        }
        let steps = &self.cost.steps;
        let kinds = [steps.prefill, steps.mixed].map(|kind| kind.piecewise);
        kinds.iter().map(|count| count.steps - count.trimmed).sum()
    }
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
        let (first, last) = (
            self.first_tokens.iter().min(),
            self.first_tokens.iter().max(),
        );
        if let (Some(&first), Some(&last)) = (first, last) {
            let one = self.first_tokens.len() == 1;
            write!(
                f,
                "; first token{} after {}",
                if one { "" } else { "s" },
                range(first, last)
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
        let whole = self.whole_in_graphs();
        if whole > 0 {
            let steps = count(whole, "step");
            write!(f, "; {steps} in graphs dropped none (--trim-threshold)")?;
        }
        writeln!(f)?;
        if self.cut_off > 0 {
            writeln!(
                f,
                "ended    {} of {} at the last of the model's {} positions \
                 (max_position_embeddings)",
                HumanCount(self.cut_off as u64),
                count(self.maps.len(), "text"),
                HumanCount(self.positions as u64)
            )?;
        }
        writeln!(f, "steps    {}", steps(&cost.steps))
    }
}

/// ` in 0.52 s, 1,969 tokens/s`; nothing of what took no time.
pub(crate) fn pace(tokens: usize, time: Duration) -> String {
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

/// `12 ms to 1.50 s`; times that look the same are one time.
pub(crate) fn range(first: Duration, last: Duration) -> String {
    let (first, last) = (seconds(first), seconds(last));
    if first == last {
        first
    } else {
        format!("{first} to {last}")
    }
}

/// Seconds with two decimals, below one in milliseconds.
fn seconds(time: Duration) -> String {
    if time < Duration::from_micros(999_500) {
        format!("{:.0} ms", time.as_secs_f64() * 1e3)
    } else {
        format!("{:.2} s", time.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use deepseek_model::{ModeCounts, StepCount, StepCounts};

    use super::*;

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
                    piecewise: of(2, 1),
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
                cut_off: 0,
                positions: 4096,
                droppable: true,
            }
            .to_string()
        };
        insta::assert_snapshot!(summary(64, &[530], false), @r"
        prefill  1,024 tokens in 520 ms, 1,969 tokens/s; first token after 530 ms
        decode   63 of 64 tokens in 2.00 s, 31.5 tokens/s; the other came with the prefill
        replay   prompt-tail: 0 of 0 row-layers of the prefill ran (0 %); 1 step in graphs dropped none (--trim-threshold)
        steps    4 prefill: 1 eager, 3 piecewise, 3 dropped rows; 2 mixed: piecewise, 1 dropped rows; 1,063 decode: full
        ");
        insta::assert_snapshot!(summary(1065, &[530, 1530], true), @r"
        prefill  1,024 tokens in 520 ms, 1,969 tokens/s; first tokens after 530 ms to 1.53 s
        decode   63 of 1,065 tokens in 2.00 s, 31.5 tokens/s; the other 1,002 came with the prefill
        replay   prompt-tail: 0 of 0 row-layers of the prefill ran (0 %); --logprobs reads every row, so none is dropped
        steps    4 prefill: 1 eager, 3 piecewise, 3 dropped rows; 2 mixed: piecewise, 1 dropped rows; 1,063 decode: full
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
            cut_off: 0,
            positions: 4096,
            droppable: false,
        };
        insta::assert_snapshot!(one.to_string(), @r"
        prefill  1 token in 10 ms, 100 tokens/s
        replay   off: 0 of 0 row-layers of the prefill ran (0 %)
        steps    1 prefill: eager
        ");
    }
}
