//! The models that are measured, and at which lengths.

use std::path::Path;

use anyhow::Result;
use deepseek_model::{Config, ReplayPolicy};

use super::tasks::ServingCase;

/// Decode steps after a context, warm-up included, for which the cache has room.
pub(crate) const MOST_STEPS: usize = 32;

/// What is measured.
#[derive(Debug, Clone)]
pub(crate) struct Geometry {
    pub(crate) name: &'static str,
    json: &'static str,
    pub(crate) chunk: usize,
    pub(crate) lengths: Vec<usize>,
    pub(crate) policies: Vec<ReplayPolicy>,
    pub(crate) contexts: Vec<usize>,
    pub(crate) batches: Vec<usize>,
    pub(crate) graphs: Vec<bool>,
    pub(crate) serving: Vec<ServingCase>,
}

impl Geometry {
    pub(crate) fn new(tiny: bool) -> Self {
        let k = |lengths: &[usize]| lengths.iter().map(|n| n * 1024).collect();
        // First the one that all others are compared with.
        let policies = vec![
            ReplayPolicy::Off,
            ReplayPolicy::PromptTail,
            ReplayPolicy::StepTail,
            ReplayPolicy::Exact,
        ];
        let graphs = vec![false, true];
        if tiny {
            return Self {
                name: "tiny",
                json: include_str!("tiny.json"),
                chunk: 128,
                lengths: vec![64, 128, 512],
                policies,
                contexts: vec![64, 512],
                batches: vec![1, 4],
                graphs,
                serving: [4, 8].map(|n| requests(n, [256, 64, 8])).into(),
            };
        }
        Self {
            name: "flash-slice",
            json: include_str!("flash-slice.json"),
            chunk: 8192,
            lengths: k(&[1, 4, 8, 32, 128]),
            policies,
            contexts: k(&[1, 32, 128]),
            batches: vec![1, 8, 32],
            graphs,
            serving: [32, 64]
                .map(|n| requests(n, [32 * 1024, 4 * 1024, 64]))
                .into(),
        }
    }

    /// The configuration, with no more positions than are measured: that is how a server is told its
    /// longest context, and graphs of decode steps are as wide as it.
    pub(crate) fn config(&self) -> Result<Config> {
        let mut config = Config::from_json(self.json, Path::new(self.name))?;
        let served = |case: &ServingCase| case.shared + case.own + case.new;
        let others = self.lengths.iter().chain(&self.contexts).copied();
        let longest = others.chain(self.serving.iter().map(served)).max();
        let positions = longest.unwrap_or(1) + MOST_STEPS;
        config.max_positions = positions.max(config.sliding_window);
        Ok(config)
    }
}

/// So many requests, with shared, own and new tokens.
pub(crate) fn requests(requests: usize, [shared, own, new]: [usize; 3]) -> ServingCase {
    ServingCase {
        requests,
        shared,
        own,
        new,
    }
}

/// A length as it is written in tables.
pub(crate) fn short(length: usize) -> String {
    match length % 1024 {
        0 if length > 0 => format!("{}K", length / 1024),
        _ => length.to_string(),
    }
}
