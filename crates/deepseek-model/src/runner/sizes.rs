//! What graphs are captured for: rows, sequences and their lengths.

use replay_core::{CaptureSizes, ReplayPolicy, TrimThreshold, Window};
use replay_graph::CaptureMode;

use super::{ReplaySizes, RunnerOptions, layout::Limits};
use crate::{CacheOptions, Config, Error, Result, cache::Paging};

/// What is captured: sizes of graphs by rows, and how long sequences in them are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// Decode steps: a row for each request.
    pub(crate) full: Option<CaptureSizes>,
    /// All other steps.
    pub(crate) piecewise: Option<CaptureSizes>,
    /// The replay layers in a break; none where no graph breaks.
    pub(crate) replay: Option<CaptureSizes>,
    threshold: TrimThreshold,
    policy: ReplayPolicy,
    max_sequences: usize,
    paging: Paging,
}

impl Sizes {
    /// The sizes asked for, or the default ones. No step has more rows than the cache has tokens, nor
    /// more requests than it has sequences.
    ///
    /// # Errors
    /// If a size is 0 or above the largest graph, the trim threshold is not above the window, or the
    /// pages of the cache cannot be counted.
    pub(crate) fn new(
        options: &RunnerOptions,
        config: &Config,
        cache: &CacheOptions,
    ) -> Result<Self> {
        let window = Window::new(config.sliding_window as u32)?;
        let [sequences, tokens] =
            [cache.max_sequences, cache.max_tokens].map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        let asked = &options.capture_sizes;
        let max_captured =
            options
                .max_captured_tokens
                .unwrap_or_else(|| match asked.iter().max() {
                    Some(largest) => (*largest).max(1),
                    None => RunnerOptions::MAX_CAPTURED_TOKENS.min(tokens),
                });
        let (full, piecewise) = if asked.is_empty() {
            let full = CaptureSizes::new(&powers(sequences), sequences);
            let mut sizes = powers(window.get().min(max_captured));
            let ladder = CaptureSizes::ladder(window, max_captured);
            sizes.extend(ladder.map_err(Error::CaptureSizes)?.as_slice());
            (full, CaptureSizes::new(&sizes, max_captured))
        } else {
            let all = CaptureSizes::new(asked, max_captured).map_err(Error::CaptureSizes)?;
            // Of sizes that hold all sequences, the smallest serves.
            let mut full = all.as_slice().to_vec();
            let needed = full.partition_point(|size| *size < sequences) + 1;
            full.truncate(needed);
            (CaptureSizes::new(&full, u32::MAX), Ok(all))
        };
        let [full, piecewise] = [full, piecewise].map(|sizes| sizes.map_err(Error::CaptureSizes));
        let (full, piecewise) = (full?, piecewise?);
        let largest = piecewise.largest().get();
        let replay = match &options.replay_sizes {
            ReplaySizes::Eager => None,
            ReplaySizes::Of(sizes) => Some(CaptureSizes::new(sizes, largest)),
            ReplaySizes::Ladder => {
                let bound = CaptureSizes::bound(window, largest, sequences);
                Some(CaptureSizes::ladder(window, bound))
            }
        };
        let replay = replay.transpose().map_err(Error::ReplayCaptureSizes)?;
        let threshold = match options.trim_threshold {
            Some(rows) => TrimThreshold::new(rows, window)?,
            None => TrimThreshold::for_window(window),
        };
        let mut paging = cache.paging(config)?;
        let longest = options.max_sequence_tokens.unwrap_or(usize::MAX);
        paging.sequence_tokens = paging.sequence_tokens.min(longest).max(1);
        // All that was asked for is checked, and then what is of no use left out.
        let has = |mode| options.graphs.has(mode);
        let mut sizes = Self {
            full: has(CaptureMode::Full).then_some(full),
            piecewise: has(CaptureMode::Piecewise).then_some(piecewise),
            replay: None,
            threshold,
            policy: cache.policy,
            max_sequences: cache.max_sequences,
            paging,
        };
        let breaks = sizes.piecewise.is_some() && sizes.breaks(largest);
        sizes.replay = replay.filter(|_| breaks);
        Ok(sizes)
    }

    /// Whether a piecewise graph of so many rows breaks at the cut.
    pub(crate) fn breaks(&self, rows: u32) -> bool {
        self.replays() && rows >= self.threshold.get()
    }

    /// Whether rows are dropped at all.
    pub(crate) fn replays(&self) -> bool {
        self.policy != ReplayPolicy::Off
    }

    /// Rows of each graph of a mode, and how large its steps can be; `None` if there is none.
    pub(crate) fn of_mode(&self, mode: CaptureMode) -> Option<(&CaptureSizes, Limits)> {
        let sizes = match mode {
            CaptureMode::Full => &self.full,
            CaptureMode::Piecewise => &self.piecewise,
        };
        let sizes = sizes.as_ref()?;
        let rows = sizes.largest().as_usize();
        let requests = match mode {
            CaptureMode::Full => rows,
            CaptureMode::Piecewise => self.max_sequences,
        };
        let limits = Limits {
            rows,
            requests,
            tokens: self.paging.sequence_tokens,
            page_tokens: self.paging.page_tokens,
        };
        Some((sizes, limits))
    }
}

/// The powers of two below `most`, and `most`.
fn powers(most: u32) -> Vec<u32> {
    let powers = (0..32).map(|power| 1 << power);
    let below = powers.take_while(|size| *size < most);
    below.chain([most]).collect()
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;
    use crate::Graphs;

    fn cache(max_sequences: usize, max_tokens: usize) -> CacheOptions {
        CacheOptions {
            max_sequences,
            max_tokens,
            page_tokens: CacheOptions::PAGE_TOKENS,
            policy: ReplayPolicy::PromptTail,
            sampled_rows: NonZeroU32::MIN,
        }
    }

    /// Sizes for a model whose window is 32, so that graphs break from 192 rows on.
    fn of(options: &RunnerOptions, cache: &CacheOptions) -> Result<Sizes> {
        let mut config = Config::load("tests/data/bf16-s1".as_ref()).unwrap();
        (config.sliding_window, config.max_positions) = (32, 4000);
        Sizes::new(options, &config, cache)
    }

    fn sizes(options: &RunnerOptions, sequences: usize, tokens: usize) -> Result<[Vec<u32>; 3]> {
        let sizes = of(options, &cache(sequences, tokens))?;
        let list = |sizes: Option<CaptureSizes>| {
            sizes.map_or_else(Vec::new, |sizes| sizes.as_slice().to_vec())
        };
        Ok([list(sizes.full), list(sizes.piecewise), list(sizes.replay)])
    }

    #[test]
    fn by_default_as_many_as_steps_can_need() {
        let options = RunnerOptions {
            trim_threshold: Some(33),
            ..RunnerOptions::default()
        };
        let [full, piecewise, replay] = sizes(&options, 6, 100).unwrap();
        assert_eq!(full, [1, 2, 4, 6]);
        assert_eq!(piecewise, [1, 2, 4, 8, 16, 32, 64, 96, 100]);
        assert_eq!(replay, [32, 64, 96, 100]);
        let [full, piecewise, replay] = sizes(&options, 1, 5).unwrap();
        assert_eq!(
            [full, piecewise, replay],
            [vec![1], vec![1, 2, 4, 5], vec![]]
        );
        let [_, piecewise, replay] = sizes(&options, 2, 1 << 20).unwrap();
        assert_eq!(piecewise.last(), Some(&2048));
        assert_eq!(replay, [32, 64]);
    }

    #[test]
    fn asked_for() {
        let options = RunnerOptions {
            capture_sizes: vec![256, 4, 16, 64],
            replay_sizes: ReplaySizes::Of(vec![128]),
            ..RunnerOptions::default()
        };
        let [full, piecewise, replay] = sizes(&options, 6, 100).unwrap();
        // A decode step of 6 requests runs in the graph of 16 rows; no larger one is needed.
        assert_eq!(full, [4, 16]);
        assert_eq!(piecewise, [4, 16, 64, 256]);
        assert_eq!(replay, [128]);
        let eager = RunnerOptions {
            trim_threshold: Some(33),
            replay_sizes: ReplaySizes::Eager,
            max_captured_tokens: Some(64),
            ..RunnerOptions::default()
        };
        let [_, piecewise, replay] = sizes(&eager, 6, 100).unwrap();
        assert_eq!(piecewise, [1, 2, 4, 8, 16, 32, 64]);
        assert!(replay.is_empty());
    }

    /// Graphs of the replay layers are launched in breaks only.
    #[test]
    fn replay_graphs_are_there_for_graphs_that_break() {
        let replay = |options: &RunnerOptions, policy| {
            let cache = CacheOptions {
                policy,
                ..cache(6, 4000)
            };
            of(options, &cache).unwrap().replay
        };
        let default = RunnerOptions::default;
        let captured = |graphs, largest, policy| {
            let options = RunnerOptions {
                graphs,
                max_captured_tokens: Some(largest),
                replay_sizes: ReplaySizes::Of(vec![64]),
                ..default()
            };
            replay(&options, policy).is_some()
        };
        let (both, tail) = (Graphs::FullAndPiecewise, ReplayPolicy::PromptTail);
        assert!(captured(both, 192, tail) && captured(Graphs::Piecewise, 192, tail));
        assert!(!captured(both, 191, tail), "below the threshold");
        assert!(!captured(both, 192, ReplayPolicy::Off), "drops nothing");
        assert!(!captured(Graphs::Full, 192, tail), "cannot break");
        assert!(!captured(Graphs::Off, 192, tail));
    }

    /// Page tables and index scores of graphs are as long as the longest sequence is.
    #[test]
    fn sequences_are_as_long_as_they_can_get() {
        let tokens = |options: &RunnerOptions, cache| {
            let sizes = of(options, &cache).unwrap();
            sizes.of_mode(CaptureMode::Full).unwrap().1.tokens
        };
        let default = RunnerOptions::default();
        // Two pages, and one more for the second sequence.
        assert_eq!(tokens(&default, cache(2, 200)), 384);
        assert_eq!(tokens(&default, cache(64, 100_000)), 4000);
        let of_prompts = RunnerOptions {
            max_sequence_tokens: Some(150),
            ..RunnerOptions::default()
        };
        assert_eq!(tokens(&of_prompts, cache(64, 100_000)), 150);
        let sizes = of(&of_prompts, &cache(64, 100_000)).unwrap();
        let (full, limits) = sizes.of_mode(CaptureMode::Full).unwrap();
        assert_eq!(full.as_slice().last(), Some(&64));
        assert_eq!((limits.requests, limits.pages()), (64, 2));
        let (_, limits) = sizes.of_mode(CaptureMode::Piecewise).unwrap();
        assert_eq!(
            (limits.rows, limits.requests, limits.tokens),
            (2048, 64, 150)
        );
    }

    #[test]
    fn refused() {
        let refuse = |options: RunnerOptions| sizes(&options, 6, 100).unwrap_err().to_string();
        let of = |capture_sizes: &[u32], max_captured_tokens| RunnerOptions {
            capture_sizes: capture_sizes.to_vec(),
            max_captured_tokens,
            ..RunnerOptions::default()
        };
        let texts = [
            refuse(of(&[0, 4], None)),
            refuse(of(&[0], None)),
            refuse(of(&[8, 64], Some(32))),
            refuse(of(&[], Some(0))),
            refuse(RunnerOptions {
                replay_sizes: ReplaySizes::Of(vec![101]),
                ..RunnerOptions::default()
            }),
            refuse(RunnerOptions {
                trim_threshold: Some(32),
                ..RunnerOptions::default()
            }),
        ];
        insta::assert_snapshot!(texts.join("\n"));
    }
}
