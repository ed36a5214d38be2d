//! The objects of a file that its keys stand in: the decoder's part, and what is around it.

use serde_json::{Map, Value};

use super::Violation;

/// The key of the decoder's part.
const PART: &str = "text_config";

/// Keys that are read around the decoder's part if that has none.
pub(super) const READ_BESIDE: [&str; 2] = ["bos_token_id", "eos_token_id"];

/// The two objects. In a flat file they are the same.
#[derive(Clone, Copy)]
pub(super) struct Parts<'a> {
    /// The whole file.
    pub(super) top: &'a Map<String, Value>,
    /// The decoder's part.
    pub(super) text: &'a Map<String, Value>,
}

impl<'a> Parts<'a> {
    /// Of a file.
    ///
    /// # Errors
    /// The decoder's part is no object.
    pub(super) fn of(top: &'a Map<String, Value>) -> Result<Self, Violation> {
        match top.get(PART) {
            None | Some(Value::Null) => Ok(Self::flat(top)),
            Some(Value::Object(text)) => Ok(Self { top, text }),
            Some(other) => Err(Violation::value(PART, "an object", other)),
        }
    }

    /// Of a flat file.
    pub(super) fn flat(top: &'a Map<String, Value>) -> Self {
        Self { top, text: top }
    }

    /// Whether something is around the decoder's part.
    pub(super) fn are_two(&self) -> bool {
        !std::ptr::eq(self.top, self.text)
    }

    /// The object that `key` is read from: the decoder's, or the one around it.
    pub(super) fn holder(&self, key: &str) -> &'a Map<String, Value> {
        if self.text.get(key).is_some_and(|value| !value.is_null()) {
            self.text
        } else {
            self.top
        }
    }

    /// What was noted of keys of the decoder's part, by their paths in the file.
    pub(super) fn named(self, noted: Vec<Violation>) -> impl Iterator<Item = Violation> {
        noted.into_iter().map(move |violation| {
            if self.is_at_top(&violation.field) {
                return violation;
            }
            Violation {
                field: format!("{PART}.{}", violation.field),
                ..violation
            }
        })
    }

    /// Whether a key that was read stands in no part: also one of those that may stand around it.
    fn is_at_top(&self, field: &str) -> bool {
        let key = field.split(['.', '[']).next().unwrap_or(field);
        let beside = READ_BESIDE.contains(&key) && std::ptr::eq(self.holder(key), self.top);
        !self.are_two() || beside
    }
}
