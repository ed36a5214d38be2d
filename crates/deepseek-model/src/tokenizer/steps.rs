//! Steps at which the library fails: it answers a text with a panic.

use serde_json::Value;
use tokenizers::{
    AddedToken, NormalizedString, Normalizer, NormalizerWrapper, normalizer::Range,
    normalizers::Replace,
};

use super::{error::cut, panics::caught, probes::probes, refusal::describe};
use crate::plain::{InQuotes, Plain};

/// A step that is refused.
#[derive(Debug)]
pub(super) struct Failing {
    /// The part of the file, with its type.
    pub(super) part: String,
    /// The step, with what is wrong with it.
    pub(super) step: String,
    /// What would do.
    pub(super) expected: &'static str,
}

/// Finds a step that fails by what the file says of it.
pub(super) fn by_its_keys(file: &Value) -> Option<Failing> {
    ["normalizer", "pre_tokenizer", "decoder"]
        .into_iter()
        .find_map(|name| {
            let part = &file[name];
            let (step, expected) = failing(part)?;
            Some(Failing {
                part: describe(name, part),
                step,
                expected,
            })
        })
}

fn failing(step: &Value) -> Option<(String, &'static str)> {
    let members = [
        &step["normalizers"],
        &step["pretokenizers"],
        &step["decoders"],
    ];
    let mut members = members.into_iter().filter_map(Value::as_array).flatten();
    if let Some(found) = members.find_map(failing) {
        return Some(found);
    }
    if step["prepend"] == "" {
        return Some(("a Prepend of nothing".to_owned(), "a text to prepend"));
    }
    let kind = step["type"].as_str();
    if kind == Some("FixedLength") && step["length"] == 0 {
        return Some(("a FixedLength of 0".to_owned(), "1 or above"));
    }
    // The decoder; it looks for more characters than a token has, or cuts the same ones from both ends.
    let stop = step["stop"].as_u64().filter(|&stop| stop > 0)?;
    (kind == Some("Strip")).then(|| (format!("a Strip with stop {stop}"), "stop 0"))
}

/// Finds a step of a normalizer that fails by trying it, and an added token of which nothing is left.
pub(super) fn by_trying(normalizer: &NormalizerWrapper, added: &[&AddedToken]) -> Option<Failing> {
    if let Some(step) = failing_pattern(normalizer) {
        return Some(Failing::of_pattern(normalizer, step));
    }
    let vanishes = |token: &&&AddedToken| {
        let mut text = NormalizedString::from(token.content.as_str());
        token.normalized && normalizer.normalize(&mut text).is_ok() && text.is_empty()
    };
    added.iter().find(vanishes).map(|token| Failing {
        part: format!("added token {}", InQuotes(&cut(&token.content))),
        step: "nothing left by the normalizer".to_owned(),
        expected: "a character or more",
    })
}

impl Failing {
    /// A pattern of this step of a normalizer.
    pub(super) fn of_pattern(normalizer: &NormalizerWrapper, step: &Replace) -> Self {
        let normalizer = serde_json::to_value(normalizer).unwrap_or_default();
        Self {
            part: describe("normalizer", &normalizer),
            step: format!("a Replace of {}", Plain(&cut(&pattern(step).to_string()))),
            expected: "a pattern that takes a character or more",
        }
    }
}

fn pattern(step: &Replace) -> Value {
    serde_json::to_value(step).unwrap_or_default()["pattern"].take()
}

/// The first step whose pattern is found before a text that it takes nothing of. Whether it can be, only the
/// library's engine of expressions knows; it is shown every character that a keyboard has, some more, and
/// what the pattern itself has in it.
fn failing_pattern(normalizer: &NormalizerWrapper) -> Option<&Replace> {
    match normalizer {
        NormalizerWrapper::Sequence(steps) => steps.as_ref().iter().find_map(failing_pattern),
        NormalizerWrapper::Replace(step) => {
            let letters = (' '..='~').chain("\n\t\u{e9}\u{4e2d}".chars());
            let own = probes(pattern(step)["Regex"].as_str().unwrap_or_default());
            letters
                .map(String::from)
                .chain(own)
                .any(|text| takes_nothing(step, &mut NormalizedString::from(text + "a")))
                .then_some(step)
        }
        _ => None,
    }
}

/// Replaces what a pattern is found at, and says whether that was nothing at the beginning of the text. The
/// library then panics, or leaves a text that does not begin where it came from, at which the next step does.
pub(super) fn takes_nothing(step: &Replace, text: &mut NormalizedString) -> bool {
    let done = caught(|| step.normalize(text));
    let all = 0..text.len();
    done.is_err() || !all.is_empty() && text.convert_offsets(Range::Original(..)) != Some(all)
}
