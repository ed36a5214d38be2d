//! What a step takes of the host's memory, from its lengths alone.

use super::{fits::largest_below, host, widths::Widths};
use crate::{Config, StepError, StepRequest};

/// Steps below this many bytes are not looked at: asking the system takes as long as they do.
const SMALL: u64 = 16 << 20;

/// Refuses a step on the CPU whose activations would not fit the memory.
pub(crate) fn check(config: &Config, requests: &[StepRequest<'_>]) -> Result<(), StepError> {
    let rows = requests.iter().map(|r| r.tokens.len()).sum();
    let read = requests.iter().map(|r| r.logits.count(r.tokens.len()));
    check_rows(config, rows, read.sum())
}

/// `rows` rows, `read` of which become logits.
fn check_rows(config: &Config, rows: usize, read: usize) -> Result<(), StepError> {
    let bytes = bytes(config, rows, read);
    if bytes < SMALL {
        return Ok(());
    }
    host::check(bytes).map_err(|shortage| StepError::Memory {
        rows,
        bytes,
        shortage,
        fits: rows_that_fit(config, rows, read, host::fits),
    })
}

/// Rows of a smaller step that fits, of which the same share is read.
fn rows_that_fit(config: &Config, rows: usize, read: usize, fits: impl Fn(u64) -> bool) -> usize {
    largest_below(rows, |fewer| {
        let read = (read as u128 * fewer as u128).div_ceil(rows as u128);
        fits(bytes(config, fewer, read as usize))
    })
}

/// About as many bytes as a step holds at its worst moment: in a layer before the cut, which all rows
/// go through, or at the head. Half as much again as the tensors that are known to be there together,
/// for those that are not counted and what the allocator does not give back: of 30,000 rows of the demo
/// model that is a tenth more than they were seen to take.
fn bytes(config: &Config, rows: usize, read: usize) -> u64 {
    let w = Widths::of(config);
    // The layer's input, normed, goes along to the end of the layer.
    let always = w.streams + w.hidden + w.head + w.engram;
    // Queries before and after their rotation, and what attention makes of them.
    let attention = 3 * w.queries + w.latent;
    // Streams after attention, and every chosen expert's result beside the shared one's.
    let experts = w.streams + (w.choices + 3) * w.hidden + 2 * w.expert;
    // Streams before, between and after the sublayers.
    let mixing = 2 * (w.streams + w.hidden);
    let layer = always + attention.max(experts).max(mixing);
    // A caller that reads the logits copies them.
    let logits = (2 * read as u64).saturating_mul(w.vocab);
    let head = logits.saturating_add((rows as u64).saturating_mul(w.hidden));
    let values = (rows as u64).saturating_mul(layer).saturating_mul(3) / 2;
    values.max(head).saturating_mul(size_of::<f32>() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_refused_by_its_rows_or_by_those_that_are_read() {
        let mut config = Config::load("tests/data/bf16-s1".as_ref()).unwrap();
        check_rows(&config, 1024, 1024).unwrap();
        let refused = |config: &Config, rows, read| {
            let refusal = check_rows(config, rows, read).unwrap_err();
            assert!(
                matches!(refusal, StepError::Memory { rows: of, .. } if of == rows),
                "{refusal}"
            );
        };
        refused(&config, 1 << 50, 0);
        config.vocab_size = 1 << 50;
        check_rows(&config, 1024, 0).unwrap();
        refused(&config, 1024, 1);
    }

    /// What a refusal names must pass, and no row more.
    #[test]
    fn rows_that_are_said_to_fit_fit() {
        let config = Config::load("tests/data/bf16-s1".as_ref()).unwrap();
        let limit = 64 << 20;
        let within = |bytes| bytes <= limit;
        for share in [0, 1, 2] {
            let read = |rows: usize| (rows * share).div_ceil(2);
            let most = rows_that_fit(&config, 1 << 20, read(1 << 20), within);
            assert!(within(bytes(&config, most, read(most))), "{share}");
            assert!(!within(bytes(&config, most + 1, read(most + 1))), "{share}");
        }
        assert_eq!(rows_that_fit(&config, 1 << 20, 1, |_| false), 0);
    }
}
