//! Steps at which the library fails: it answers a text with a panic.

use serde_json::Value;
use tokenizers::{AddedToken, NormalizedString, Normalizer, NormalizerWrapper};

use super::{error::cut, panics::caught, refusal::describe};
use crate::plain::Plain;

/// A step that is refused.
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
pub(super) fn by_trying(
    file: &Value,
    normalizer: &NormalizerWrapper,
    added: &[&AddedToken],
) -> Option<Failing> {
    if let Some(pattern) = failing_pattern(normalizer) {
        return Some(Failing {
            part: describe("normalizer", &file["normalizer"]),
            step: format!("a Replace of {}", Plain(&cut(&pattern))),
            expected: "a pattern that takes a character or more",
        });
    }
    let vanishes = |token: &&&AddedToken| {
        let mut text = NormalizedString::from(token.content.as_str());
        token.normalized && normalizer.normalize(&mut text).is_ok() && text.is_empty()
    };
    added.iter().find(vanishes).map(|token| Failing {
        part: format!("added token {:?}", cut(&token.content)),
        step: "nothing left by the normalizer".to_owned(),
        expected: "a character or more",
    })
}

/// The first pattern that is found before a text that it takes nothing of. Whether it can be, only the
/// library's engine of expressions knows; it is shown every character that a keyboard has, and some more.
fn failing_pattern(normalizer: &NormalizerWrapper) -> Option<String> {
    match normalizer {
        NormalizerWrapper::Sequence(steps) => steps.as_ref().iter().find_map(failing_pattern),
        NormalizerWrapper::Replace(step) => {
            let fails = |c: char| {
                let mut text = NormalizedString::from(format!("{c}a"));
                let done = caught(|| {
                    step.normalize(&mut text)?;
                    // What is left can be out of step with where it came from, and the step that comes
                    // next fails.
                    let same: Vec<_> = text.get().chars().map(|c| (c, 0)).collect();
                    text.transform(same, 0);
                    Ok::<_, tokenizers::Error>(())
                });
                done.is_err()
            };
            let pattern = || serde_json::to_value(step).unwrap_or_default()["pattern"].to_string();
            (' '..='~')
                .chain("\n\t\u{e9}\u{4e2d}".chars())
                .any(fails)
                .then(pattern)
        }
        _ => None,
    }
}
