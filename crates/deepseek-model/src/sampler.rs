//! From logits to a token id: greedy, temperature, top-k, top-p.
//!
//! `candle_transformers::generation::LogitsProcessor` does much of this, but it comes with every
//! model that crate has, lets a NaN win or lose silently, and draws from a generator whose stream
//! may change with a release. Here a seed means the same choices from the same logits for good. A
//! model's logits are the same to the last bit only for the same steps on the same machine.

use std::cmp::Ordering;

use crate::pcg::{Pcg64, SeedSequence};

/// Why a sampling configuration or a row of logits is refused.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplerError {
    /// The temperature is negative or no number.
    #[error("temperature is {0}: expected a finite number, 0 (greedy) or above")]
    Temperature(f64),
    /// Top-k would leave no token.
    #[error("top_k is 0: expected 1 or above, or none for all tokens")]
    TopK,
    /// The nucleus' share is not a share.
    #[error("top_p is {0}: expected above 0 and at most 1")]
    TopP(f64),
    /// The row has no logits.
    #[error("there are no logits to sample from")]
    NoLogits,
    /// A token that the row has no logit for.
    #[error("expected a token below {tokens}, one of those with a logit, got {id}")]
    NoLogit {
        /// The token.
        id: u32,
        /// Logits in the row.
        tokens: usize,
    },
    /// A logit is NaN or plus infinity: the model's arithmetic broke down.
    #[error("the logit of token {id} is {value}: expected a number below infinity")]
    BadLogit {
        /// The token.
        id: u32,
        /// Its logit.
        value: f32,
    },
    /// Every logit is minus infinity.
    #[error("the logits of all {tokens} tokens are minus infinity: no token is allowed")]
    NothingAllowed {
        /// Logits in the row.
        tokens: usize,
    },
}

type Result<T, E = SamplerError> = std::result::Result<T, E>;

/// How tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingConfig {
    /// Divides the logits; 0 chooses the highest one always.
    pub temperature: f64,
    /// Keep only so many tokens, those of the highest logits.
    pub top_k: Option<usize>,
    /// Of the tokens that top-k leaves, keep the most probable ones until they make up this share.
    pub top_p: f64,
    /// Seed of the random choices.
    pub seed: u64,
}

impl SamplingConfig {
    /// The highest logit, always.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_k: None,
        top_p: 1.0,
        seed: 0,
    };

    /// Whether the choice is free of chance.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0 || self.top_k == Some(1)
    }

    /// # Errors
    /// A temperature that is negative or not finite, a `top_k` of 0, a `top_p` outside (0, 1].
    pub fn validate(&self) -> Result<()> {
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return Err(SamplerError::Temperature(self.temperature));
        }
        if self.top_k == Some(0) {
            return Err(SamplerError::TopK);
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(SamplerError::TopP(self.top_p));
        }
        Ok(())
    }
}

/// Chooses the tokens of one sequence.
#[derive(Debug, Clone)]
pub struct Sampler {
    config: SamplingConfig,
    random: Pcg64,
    /// Reused from token to token.
    candidates: Vec<Candidate>,
}

/// A token and its weight: first its logit, then its unnormalised probability.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    id: u32,
    weight: f64,
}

impl Candidate {
    /// Heavier first; of equals the lower id.
    fn rank(&self, other: &Self) -> Ordering {
        other
            .weight
            .total_cmp(&self.weight)
            .then(self.id.cmp(&other.id))
    }
}

impl Sampler {
    /// A sampler for a single sequence.
    ///
    /// # Errors
    /// A configuration that [`SamplingConfig::validate`] refuses.
    pub fn new(config: SamplingConfig) -> Result<Self> {
        Self::for_sequence(config, 0)
    }

    /// A sampler for sequence number `sequence` of a batch. Each number has a random stream of its
    /// own, so its random numbers depend neither on its neighbours nor on the order of steps. Its
    /// logits may, a little: see [`Model::forward`](crate::Model::forward).
    ///
    /// # Errors
    /// A configuration that [`SamplingConfig::validate`] refuses.
    pub fn for_sequence(config: SamplingConfig, sequence: u64) -> Result<Self> {
        config.validate()?;
        let random = Pcg64::new(&SeedSequence::stream(config.seed, sequence));
        Ok(Self {
            config,
            random,
            candidates: Vec::new(),
        })
    }

    /// Chooses a token of `logits`, one logit per token id.
    ///
    /// Greedy takes the highest logit and of equals the lowest id. Otherwise top-k keeps the `k`
    /// highest logits, a softmax over what it kept at the given temperature makes them
    /// probabilities, top-p keeps the smallest set of most probable tokens that reaches its share,
    /// and one token is drawn from the rest in proportion.
    ///
    /// # Errors
    /// Logits that are NaN or plus infinity, or that allow no token. A broken model never chooses
    /// silently.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32> {
        let best = argmax(logits)?;
        if self.config.is_greedy() {
            return Ok(best);
        }
        self.candidates.clear();
        // Tokens ruled out by minus infinity count for no filter.
        let allowed = (0..)
            .zip(logits)
            .filter(|(_, logit)| **logit > f32::NEG_INFINITY);
        self.candidates
            .extend(allowed.map(|(id, &logit)| Candidate {
                id,
                // 0 in place of -0, which the order of ranks would put below it.
                weight: f64::from(logit) + 0.0,
            }));
        if let Some(k) = self.config.top_k {
            keep_top_k(&mut self.candidates, k);
        }
        let highest = f64::from(logits[best as usize]);
        for candidate in &mut self.candidates {
            candidate.weight = ((candidate.weight - highest) / self.config.temperature).exp();
        }
        if self.config.top_p < 1.0 {
            keep_top_p(&mut self.candidates, self.config.top_p);
        }
        // In id order, so that a filter that keeps everything changes nothing.
        self.candidates
            .sort_unstable_by_key(|candidate| candidate.id);
        Ok(draw(&self.candidates, self.random.unit()))
    }
}

/// The highest logit's id, of equals the lowest.
///
/// # Errors
/// As [`Sampler::sample`].
pub fn argmax(logits: &[f32]) -> Result<u32> {
    // In blocks, whose logits the compiler compares many at a time; one by one only where that matters.
    const BLOCK: usize = 64;
    let mut best: Option<(u32, f32)> = None;
    for (block, first) in logits.chunks(BLOCK).zip((0..).step_by(BLOCK)) {
        let highest = best.map_or(f32::NEG_INFINITY, |(_, highest)| highest);
        let matters = |value: f32| (value > highest) | value.is_nan();
        let any = block.iter().fold(false, |any, &value| any | matters(value));
        if !any && best.is_some() {
            continue;
        }
        for (id, &value) in (first..).zip(block) {
            if value.is_nan() || value == f32::INFINITY {
                return Err(SamplerError::BadLogit { id, value });
            }
            if best.is_none_or(|(_, highest)| value > highest) {
                best = Some((id, value));
            }
        }
    }
    match best {
        None => Err(SamplerError::NoLogits),
        Some((_, f32::NEG_INFINITY)) => Err(SamplerError::NothingAllowed {
            tokens: logits.len(),
        }),
        Some((id, _)) => Ok(id),
    }
}

/// Keeps the `k` first by rank, in no particular order.
fn keep_top_k(candidates: &mut Vec<Candidate>, k: usize) {
    if k < candidates.len() {
        candidates.select_nth_unstable_by(k, Candidate::rank);
        candidates.truncate(k);
    }
}

/// Keeps the first by rank whose weights add up to `share` of all, at least one.
fn keep_top_p(candidates: &mut Vec<Candidate>, share: f64) {
    let total: f64 = candidates.iter().map(|candidate| candidate.weight).sum();
    // Candidates below an equal part of what may be left out cannot be needed: even all of them
    // together do not reach it. That spares sorting nearly the whole vocabulary.
    let negligible = total * (1.0 - share) / candidates.len() as f64;
    candidates.retain(|candidate| candidate.weight >= negligible);
    candidates.sort_unstable_by(Candidate::rank);
    let mut sum = 0.0;
    let reached = candidates.iter().position(|candidate| {
        sum += candidate.weight;
        sum >= share * total
    });
    candidates.truncate(reached.map_or(candidates.len(), |last| last + 1));
}

/// The candidate at `unit`, in `[0, 1)`, along the weights laid end to end.
fn draw(candidates: &[Candidate], unit: f64) -> u32 {
    let total: f64 = candidates.iter().map(|candidate| candidate.weight).sum();
    let target = unit * total;
    let mut sum = 0.0;
    let hit = candidates.iter().find(|candidate| {
        sum += candidate.weight;
        sum > target
    });
    // Rounding may leave the sum a hair short of the target: then it is the last that can be drawn.
    let last = || {
        candidates
            .iter()
            .rev()
            .find(|candidate| candidate.weight > 0.0)
    };
    hit.or_else(last).map_or(0, |candidate| candidate.id)
}

/// The log-probability (nats) of token `id` under a plain softmax of `logits`.
///
/// # Errors
/// Logits that are NaN or plus infinity, or that allow no token: a broken model has no
/// log-probabilities. Or `id` has no logit.
pub fn log_softmax_at(logits: &[f32], id: u32) -> Result<f32> {
    argmax(logits)?;
    let tokens = logits.len();
    let logit = logits.get(id as usize);
    let logit = *logit.ok_or(SamplerError::NoLogit { id, tokens })?;
    Ok((f64::from(logit) - log_sum_exp(logits)) as f32)
}

/// The `k` most probable tokens under a plain softmax of `logits` with their log-probabilities
/// (nats), most probable first, of equals the lower id.
///
/// # Errors
/// Logits that are NaN or plus infinity, or that allow no token.
pub fn top_logprobs(logits: &[f32], k: usize) -> Result<Vec<(u32, f32)>> {
    argmax(logits)?;
    let total = log_sum_exp(logits);
    let log_probability = |(id, &logit)| Candidate {
        id,
        weight: f64::from(logit) - total,
    };
    let mut candidates: Vec<Candidate> = (0..).zip(logits).map(log_probability).collect();
    keep_top_k(&mut candidates, k);
    candidates.sort_unstable_by(Candidate::rank);
    let pairs = candidates.into_iter();
    let pairs = pairs.map(|candidate| (candidate.id, candidate.weight as f32));
    Ok(pairs.collect())
}

/// `ln(sum(exp(logit)))`, summed in f64: a vocabulary of small terms adds up.
fn log_sum_exp(logits: &[f32]) -> f64 {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let highest = f64::from(highest);
    let sum: f64 = logits
        .iter()
        .map(|&logit| (f64::from(logit) - highest).exp())
        .sum();
    highest + sum.ln()
}
