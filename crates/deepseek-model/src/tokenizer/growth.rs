//! How much longer than a text its normalized form can be: parts of the file replace text by text of
//! any length.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use serde_json::Value;
use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper};

use super::{
    charsmap,
    steps::{self, Failing},
};

/// Bytes that the steps of a normalizer or decoder may make of one, all of them together: they work on
/// words of the file and tokens, or step by step ([`Bounded`]). The longest of known files is below 200,
/// but several steps that replace different things count as if each took what the one before gives.
pub(super) const MAX_GROWTH: usize = 1 << 16;
/// The same of a pre-tokenizer, which works on whole texts. Known files have 8 at most.
pub(super) const MAX_PRE_GROWTH: usize = 64;
/// Bytes of a normalized text that are never too many. The library takes about 130 times as much.
const ALWAYS: usize = 8 << 20;
/// Times a text's own length that are never too many. Blanks become three bytes in known files.
const TIMES: usize = 8;

/// Bytes that a part can make of one byte, or more: those of the steps multiplied. Unicode forms and
/// lower case do not count: done again they change nothing.
pub(super) fn growth(part: &Value) -> usize {
    let steps = [
        &part["normalizers"],
        &part["pretokenizers"],
        &part["decoders"],
    ];
    let steps = steps.into_iter().filter_map(Value::as_array).flatten();
    let product = steps.map(growth).fold(1, usize::saturating_mul);
    product.saturating_mul(growth_of_step(part))
}

/// The library knows some steps by their keys alone, so the type is not asked for.
fn growth_of_step(step: &Value) -> usize {
    let bytes = |key: &str| step[key].as_str().map_or(0, str::len);
    let replaced = match (step["content"].as_str(), &step["pattern"]["String"]) {
        (Some(content), Value::String(pattern)) if !pattern.is_empty() => {
            content.len().div_ceil(pattern.len()).max(1)
        }
        // An expression may match what is empty, so beside every byte.
        (Some(content), _) => content.len().saturating_add(1),
        (None, _) => 1,
    };
    let by_itself = match step["type"].as_str() {
        // A character for each byte, of two bytes where it is no ASCII; and an empty delimiter becomes
        // a blank between any two bytes.
        Some("ByteLevel" | "CTC") => 2,
        // For blanks, and before each piece.
        Some("Metaspace") => bytes("replacement").max(1) + 1,
        _ => 1,
    };
    let table = step["precompiled_charsmap"].as_str();
    let longest = table.and_then(charsmap::longest_replacement).unwrap_or(1);
    replaced
        .saturating_mul(by_itself)
        .saturating_mul(bytes("prepend").saturating_add(1))
        .saturating_mul(longest.max(1))
}

/// A normalizer that stops before a step whose result could be too long.
pub(super) struct Bounded<'a> {
    normalizer: &'a NormalizerWrapper,
    max: usize,
    /// Bytes of the parts of the text that are done.
    done: AtomicUsize,
    /// Bytes that were one step away; 0 while none is refused.
    refused: AtomicUsize,
    /// The step at which the library failed.
    failed: OnceLock<Failing>,
}

impl<'a> Bounded<'a> {
    /// For a text of so many bytes.
    pub(super) fn new(normalizer: &'a NormalizerWrapper, text_bytes: usize) -> Self {
        Self {
            normalizer,
            max: text_bytes.saturating_mul(TIMES).max(ALWAYS),
            done: AtomicUsize::new(0),
            refused: AtomicUsize::new(0),
            failed: OnceLock::new(),
        }
    }

    /// The step at which the library failed, if it did.
    pub(super) fn failed(&self) -> Option<&Failing> {
        self.failed.get()
    }

    /// Whether the text was given up, for either reason.
    pub(super) fn is_given_up(&self) -> bool {
        self.refused().is_some() || self.failed().is_some()
    }

    /// Bytes that the text could have had, and the most it may have, if it was given up.
    pub(super) fn refused(&self) -> Option<(usize, usize)> {
        let could = self.refused.load(Relaxed);
        (could > 0).then_some((could, self.max))
    }

    fn step(
        &self,
        step: &NormalizerWrapper,
        text: &mut NormalizedString,
    ) -> tokenizers::Result<()> {
        if let NormalizerWrapper::Sequence(steps) = step {
            return steps.as_ref().iter().try_for_each(|s| self.step(s, text));
        }
        if self.is_given_up() {
            return Ok(());
        }
        let bytes = text.get().len();
        let most = match step {
            NormalizerWrapper::Replace(step) => {
                let places = places(&serde_json::to_value(step)?, text.get());
                places.saturating_mul(step.content.len())
            }
            NormalizerWrapper::Prepend(step) => step.prepend.len(),
            NormalizerWrapper::ByteLevel(_) => bytes,
            _ => 0,
        };
        let could = self
            .done
            .load(Relaxed)
            .saturating_add(bytes)
            .saturating_add(most);
        if could > self.max {
            self.refused.store(could, Relaxed);
            return Ok(());
        }
        if let NormalizerWrapper::Replace(replace) = step {
            if steps::takes_nothing(replace, text) {
                let failing = Failing::of_pattern(self.normalizer, replace);
                self.failed.get_or_init(|| failing);
            }
            return Ok(());
        }
        step.normalize(text)
    }
}

impl Normalizer for Bounded<'_> {
    fn normalize(&self, text: &mut NormalizedString) -> tokenizers::Result<()> {
        self.step(self.normalizer, text)?;
        self.done.fetch_add(text.get().len(), Relaxed);
        Ok(())
    }
}

/// How often a pattern can be found in a text at most: an expression before, between and after all bytes.
fn places(replace: &Value, text: &str) -> usize {
    match replace["pattern"]["String"].as_str() {
        Some(pattern) if !pattern.is_empty() => text.matches(pattern).count(),
        _ => text.len().saturating_add(1),
    }
}
