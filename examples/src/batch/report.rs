//! What a batch cost, for a person.

use std::fmt;
use std::time::Duration;

use deepseek_model::engine::EngineStats;
use indicatif::HumanCount;

use crate::count;
use crate::summary::{pace, seconds};

/// What a batch cost, over all its engines.
#[derive(Debug, Default)]
pub(super) struct Totals {
    requests: usize,
    /// Results that were there before.
    before: usize,
    pub(super) answered: usize,
    pub(super) failed: usize,
    prompt_tokens: u64,
    cached_tokens: u64,
    generated_tokens: u64,
    preemptions: u64,
    row_layers: u64,
    row_layers_without_replay: u64,
    time: Duration,
    /// The shortest and the longest, in seconds.
    first_tokens: Option<(f64, f64)>,
}

impl Totals {
    pub(super) fn new(requests: usize, before: usize) -> Self {
        Self {
            requests,
            before,
            ..Self::default()
        }
    }

    /// Requests that have a result.
    pub(super) fn done(&self) -> usize {
        self.before + self.answered + self.failed
    }

    /// Takes the seconds to a request's first token, if it has one.
    pub(super) fn first_tokens(&mut self, seconds: Option<f64>) {
        if let Some(new) = seconds {
            let (least, most) = self.first_tokens.unwrap_or((new, new));
            self.first_tokens = Some((least.min(new), most.max(new)));
        }
    }

    /// Adds an engine's.
    pub(super) fn add(&mut self, stats: &EngineStats, time: Duration) {
        self.prompt_tokens += stats.prompt_tokens;
        self.cached_tokens += stats.cached_tokens;
        self.generated_tokens += stats.generated_tokens;
        self.preemptions += stats.preemptions;
        self.row_layers += stats.row_layers;
        self.row_layers_without_replay += stats.row_layers_without_replay;
        self.time += time;
    }
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let share = |part: u64, of: u64| 100.0 * part as f64 / of.max(1) as f64;
        write!(
            f,
            "batch    {}: {} answered",
            count(self.requests, "request"),
            self.answered
        )?;
        if self.failed > 0 {
            write!(f, ", {} failed", self.failed)?;
        }
        if self.before > 0 {
            write!(f, ", {} had results before", self.before)?;
        }
        writeln!(f)?;
        if self.answered + self.failed == 0 {
            return Ok(());
        }
        writeln!(
            f,
            "prompts  {}, {} of them found in the cache ({:.0} %)",
            count(self.prompt_tokens as usize, "token"),
            HumanCount(self.cached_tokens),
            share(self.cached_tokens, self.prompt_tokens)
        )?;
        let tokens = self.generated_tokens as usize;
        write!(
            f,
            "output   {}{}",
            count(tokens, "token"),
            pace(tokens, self.time)
        )?;
        if let Some((least, most)) = self.first_tokens {
            let [least, most] = [least, most].map(|s| seconds(Duration::from_secs_f64(s)));
            write!(
                f,
                "; first tokens {least} to {most} after the first step of each"
            )?;
        }
        writeln!(f)?;
        write!(
            f,
            "replay   {} of {} ran ({:.0} %)",
            HumanCount(self.row_layers),
            count(self.row_layers_without_replay as usize, "row-layer"),
            share(self.row_layers, self.row_layers_without_replay)
        )?;
        if self.preemptions > 0 {
            write!(
                f,
                "; for lack of room {}",
                count(self.preemptions as usize, "restart")
            )?;
        }
        writeln!(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_says_what_a_batch_cost() {
        let mut totals = Totals::new(20, 0);
        totals.answered = 20;
        let stats = EngineStats {
            prompt_tokens: 5120,
            cached_tokens: 1024,
            generated_tokens: 640,
            row_layers: 15_462,
            row_layers_without_replay: 30_540,
            ..EngineStats::default()
        };
        totals.add(&stats, Duration::from_millis(3200));
        [0.012, 1.5]
            .iter()
            .for_each(|s| totals.first_tokens(Some(*s)));
        insta::assert_snapshot!(totals, @r"
        batch    20 requests: 20 answered
        prompts  5,120 tokens, 1,024 of them found in the cache (20 %)
        output   640 tokens in 3.20 s, 200 tokens/s; first tokens 12 ms to 1.50 s after the first step of each
        replay   15,462 of 30,540 row-layers ran (51 %)
        ");
        totals = Totals::new(20, 17);
        (totals.answered, totals.failed, totals.preemptions) = (1, 2, 1);
        insta::assert_snapshot!(totals, @r"
        batch    20 requests: 1 answered, 2 failed, 17 had results before
        prompts  0 tokens, 0 of them found in the cache (0 %)
        output   0 tokens
        replay   0 of 0 row-layers ran (0 %); for lack of room 1 restart
        ");
        insta::assert_snapshot!(Totals::new(20, 20), @"batch    20 requests: 0 answered, 20 had results before");
    }
}
