//! The sizes that graphs are captured for.

use replay_core::{CaptureSizes, Window};

use super::{ReplaySizes, RunnerOptions};
use crate::{Error, Result};

/// What is captured: sizes of graphs by rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// Decode steps: a row for each request.
    pub(crate) full: CaptureSizes,
    /// All other steps.
    pub(crate) piecewise: CaptureSizes,
    /// The replay layers in a break.
    pub(crate) replay: Option<CaptureSizes>,
}

impl Sizes {
    /// The sizes asked for, or the default ones. No step has more than `max_tokens` rows, nor
    /// requests than `max_sequences`.
    ///
    /// # Errors
    /// If a size is 0 or above the largest graph.
    pub(crate) fn new(
        options: &RunnerOptions,
        window: Window,
        max_sequences: usize,
        max_tokens: usize,
    ) -> Result<Self> {
        let [sequences, tokens] =
            [max_sequences, max_tokens].map(|n| u32::try_from(n).unwrap_or(u32::MAX));
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
        Ok(Self {
            full,
            piecewise,
            replay,
        })
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
    use super::*;

    fn sizes(options: &RunnerOptions, sequences: usize, tokens: usize) -> Result<[Vec<u32>; 3]> {
        let sizes = Sizes::new(options, Window::new(32).unwrap(), sequences, tokens)?;
        let list = |sizes: CaptureSizes| sizes.as_slice().to_vec();
        let replay = sizes.replay.map_or_else(Vec::new, list);
        Ok([list(sizes.full), list(sizes.piecewise), replay])
    }

    #[test]
    fn by_default_as_many_as_steps_can_need() {
        let options = RunnerOptions::default();
        let [full, piecewise, replay] = sizes(&options, 6, 100).unwrap();
        assert_eq!(full, [1, 2, 4, 6]);
        assert_eq!(piecewise, [1, 2, 4, 8, 16, 32, 64, 96, 100]);
        assert_eq!(replay, [32, 64, 96, 100]);
        let [full, piecewise, replay] = sizes(&options, 1, 5).unwrap();
        assert_eq!(
            [full, piecewise, replay],
            [vec![1], vec![1, 2, 4, 5], vec![5]]
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
            replay_sizes: ReplaySizes::Eager,
            max_captured_tokens: Some(64),
            ..RunnerOptions::default()
        };
        let [_, piecewise, replay] = sizes(&eager, 6, 100).unwrap();
        assert_eq!(piecewise, [1, 2, 4, 8, 16, 32, 64]);
        assert!(replay.is_empty());
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
        ];
        insta::assert_snapshot!(texts.join("\n"));
    }
}
