//! What a batch cost, for a person.

use std::fmt;
use std::time::Duration;

use deepseek_model::engine::EngineStats;
use indicatif::HumanCount;

use crate::count;
use crate::summary::{pace, range};

/// What a batch cost, over all its engines.
#[derive(Debug, Default)]
pub(super) struct Totals {
    requests: usize,
    /// Results that were there before.
    before: usize,
    /// Those of them that are errors.
    errors_before: usize,
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
    /// Of so many requests, of which some had results before, and some of these are errors.
    pub(super) fn new(requests: usize, before: usize, errors_before: usize) -> Self {
        Self {
            requests,
            before,
            errors_before,
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

    /// How far the batch is, for who watches: with an engine that has run for a while, and of which only the
    /// cache is told alone.
    pub(super) fn live(&self, stats: &EngineStats, time: Duration) -> String {
        let share = |part: f64, of: f64| 100.0 * part / of.max(1.0);
        let generated = self.generated_tokens + stats.generated_tokens;
        let rate = generated as f64 / (self.time + time).as_secs_f64();
        let cached = self.cached_tokens + stats.cached_tokens;
        let prompts = self.prompt_tokens + stats.prompt_tokens;
        let held = stats.pages - stats.free_pages;
        format!(
            "{} waiting, {} running; {} tokens/s; {:.0} % of prompts cached, {:.0} % of KV used",
            HumanCount((self.requests - self.done() - stats.running) as u64),
            stats.running,
            HumanCount(rate as u64),
            share(cached as f64, prompts as f64),
            share(held as f64, stats.pages as f64),
        )
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
        if self.errors_before > 0 {
            write!(f, ", {} of them errors", self.errors_before)?;
        }
        if self.done() < self.requests {
            write!(f, ", {} left", self.requests - self.done())?;
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
            let [least, most] = [least, most].map(Duration::from_secs_f64);
            let after = range(least, most);
            write!(f, "; first tokens {after} after the first step of each")?;
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
        let mut totals = Totals::new(20, 0, 0);
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
        // Times that look the same are one time.
        totals.first_tokens = Some((0.0161, 0.0164));
        let output = totals.to_string();
        insta::assert_snapshot!(output.lines().nth(2).unwrap(), @"output   640 tokens in 3.20 s, 200 tokens/s; first tokens 16 ms after the first step of each");
        totals = Totals::new(20, 17, 3);
        (totals.answered, totals.failed, totals.preemptions) = (1, 2, 1);
        insta::assert_snapshot!(totals, @r"
        batch    20 requests: 1 answered, 2 failed, 17 had results before, 3 of them errors
        prompts  0 tokens, 0 of them found in the cache (0 %)
        output   0 tokens
        replay   0 of 0 row-layers ran (0 %); for lack of room 1 restart
        ");
        insta::assert_snapshot!(Totals::new(20, 20, 0), @"batch    20 requests: 0 answered, 20 had results before");
    }

    /// Policies run one after the other, each in an engine of its own whose counts begin at zero.
    #[test]
    fn the_live_line_counts_all_policies() {
        let mut totals = Totals::new(10, 1, 0);
        let first = EngineStats {
            prompt_tokens: 1000,
            cached_tokens: 500,
            generated_tokens: 300,
            ..EngineStats::default()
        };
        totals.add(&first, Duration::from_secs(2));
        totals.answered = 4;
        let second = EngineStats {
            running: 2,
            waiting: 1,
            prompt_tokens: 1000,
            cached_tokens: 100,
            generated_tokens: 300,
            pages: 40,
            free_pages: 10,
            ..EngineStats::default()
        };
        // 600 tokens in 3 s; 600 of 2,000; 10 requests less 5 that are done and 2 that run.
        insta::assert_snapshot!(totals.live(&second, Duration::from_secs(1)), @"3 waiting, 2 running; 200 tokens/s; 30 % of prompts cached, 75 % of KV used");
    }
}
