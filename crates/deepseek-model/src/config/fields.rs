//! Reads a JSON object key by key, noting each bad key instead of stopping at the first.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::{error::Violation, json};

/// Largest number of repeated parts (heads, experts, iterations).
///
/// With [`MAX_WIDTH`] it keeps every product of sizes that names a tensor's shape within 64 bits.
pub(super) const MAX_COUNT: usize = 4096;
/// Largest extent of a tensor axis, in elements.
pub(super) const MAX_WIDTH: usize = i32::MAX as usize;

/// A JSON object, and where its bad keys are noted.
///
/// A reader returns `None` exactly when it has noted a violation; a key that holds `null` counts as
/// absent.
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// The object's own key; empty for that of the file.
    path: String,
    violations: &'a mut Vec<Violation>,
    /// Keys that were looked at, found or not.
    read: BTreeSet<String>,
}

impl<'a> Fields<'a> {
    pub(super) fn new(map: &'a Map<String, Value>, violations: &'a mut Vec<Violation>) -> Self {
        Self {
            map,
            path: String::new(),
            violations,
            read: BTreeSet::new(),
        }
    }

    /// The keys that were looked at, found or not. Those of objects in it are not among them.
    pub(super) fn into_read(self) -> BTreeSet<String> {
        self.read
    }

    /// The object under `key`, its keys noted as `key.name`; `None` if absent or empty.
    ///
    /// The one reader whose `None` need not be a violation: the objects read this way are optional.
    pub(super) fn object(&mut self, key: &str) -> Option<Fields<'_>> {
        match self.get(key)? {
            Value::Object(map) if map.is_empty() => None,
            Value::Object(map) => {
                let path = self.name(key);
                Some(Fields {
                    map,
                    path,
                    violations: self.violations,
                    read: BTreeSet::new(),
                })
            }
            other => {
                self.note(Violation::value(&self.name(key), "an object", other));
                None
            }
        }
    }

    /// All keys that are there, whatever they hold.
    pub(super) fn names(&self) -> impl Iterator<Item = &'a String> + use<'a> {
        self.map.keys()
    }

    /// Whether the key holds an object.
    pub(super) fn holds_object(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(Value::is_object)
    }

    /// The object's own key, dotted if nested; empty for that of the file.
    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// Whether the key is there and not `null`.
    pub(super) fn has(&mut self, key: &str) -> bool {
        self.get(key).is_some()
    }

    /// A key that must be there, as `parse` understands it.
    pub(super) fn required<T>(
        &mut self,
        key: &str,
        expected: &str,
        parse: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Option<T> {
        let Some(value) = self.get(key) else {
            // Absent either way, but who wrote `null` would look for the key in vain.
            self.note(match self.map.get(key) {
                Some(null) => Violation::value(&self.name(key), expected, null),
                None => Violation::absent(&self.name(key), expected),
            });
            return None;
        };
        let parsed = parse(value);
        if parsed.is_none() {
            self.note(Violation::value(&self.name(key), expected, value));
        }
        parsed
    }

    /// A key that may be absent and then means `default`.
    pub(super) fn optional<T>(
        &mut self,
        key: &str,
        expected: &str,
        default: T,
        parse: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Option<T> {
        if self.has(key) {
            self.required(key, expected, parse)
        } else {
            Some(default)
        }
    }

    /// A number of repeated parts: 1 to [`MAX_COUNT`].
    pub(super) fn count(&mut self, key: &str) -> Option<usize> {
        self.up_to(key, MAX_COUNT)
    }

    /// A whole number from 1 to `max`.
    pub(super) fn up_to(&mut self, key: &str, max: usize) -> Option<usize> {
        let expected = format!("a whole number from 1 to {max}");
        self.required(key, &expected, |v| {
            whole(v).filter(|n| (1..=max).contains(n))
        })
    }

    /// The extent of a tensor axis, or a number of tokens: 1 to [`MAX_WIDTH`].
    pub(super) fn width(&mut self, key: &str) -> Option<usize> {
        self.up_to(key, MAX_WIDTH)
    }

    /// A list of whole numbers, none above [`MAX_WIDTH`].
    pub(super) fn list(&mut self, key: &str) -> Option<Vec<usize>> {
        let item = format!("a whole number from 0 to {MAX_WIDTH}");
        let values = self.required(key, "a list of whole numbers", Value::as_array)?;
        self.items(key, values, &item, |v| whole(v).filter(|&n| n <= MAX_WIDTH))
    }

    /// One token id or a list of them, of which there may be none.
    pub(super) fn token_ids(&mut self, key: &str) -> Option<Vec<u32>> {
        let expected = format!("a token id or a list of at most {MAX_COUNT}");
        let listed = self.optional(key, &expected, &[][..], |v| match v {
            Value::Array(ids) => Some(&ids[..]).filter(|ids| ids.len() <= MAX_COUNT),
            id => token_id(id).map(|_| std::slice::from_ref(id)),
        })?;
        self.items(key, listed, "a token id", token_id)
    }

    /// The items of the list under `key`; the first bad one is noted, by its place.
    fn items<T>(
        &mut self,
        key: &str,
        values: &[Value],
        expected: &str,
        parse: impl Fn(&Value) -> Option<T>,
    ) -> Option<Vec<T>> {
        let mut items = Vec::with_capacity(values.len());
        for (at, value) in values.iter().enumerate() {
            let Some(item) = parse(value) else {
                let name = format!("{}[{at}]", self.name(key));
                self.note(Violation::value(&name, expected, value));
                return None;
            };
            items.push(item);
        }
        Some(items)
    }

    /// A token id.
    pub(super) fn token_id(&mut self, key: &str) -> Option<u32> {
        self.required(key, "a token id", token_id)
    }

    /// A number that passes `accept`, and that f32, which the decoder computes in, takes neither for
    /// infinite nor for 0.
    pub(super) fn number(
        &mut self,
        key: &str,
        expected: &str,
        accept: fn(f64) -> bool,
    ) -> Option<f64> {
        let accepted = self.required(key, expected, |v| v.as_f64().filter(|&x| accept(x)))?;
        let in_f32 = accepted as f32;
        if in_f32.is_finite() && (in_f32 == 0.0) == (accepted == 0.0) {
            return Some(accepted);
        }
        let reason = if in_f32.is_finite() {
            "not so small that it is 0 in f32"
        } else {
            "finite in f32"
        };
        let expected = format!("{expected}, {reason}");
        self.note(Violation::new(
            &self.name(key),
            expected,
            format!("{accepted:e}"),
        ));
        None
    }

    pub(super) fn note(&mut self, violation: Violation) {
        self.violations.push(violation);
    }

    /// Notes every key that is not `known`, since it would be passed over. `why` is an end of "expected
    /// no such key".
    pub(super) fn only(&mut self, known: impl Fn(&str) -> bool, why: &str) {
        let expected = format!("no such key {why}");
        for (key, value) in self.map {
            if !value.is_null() && !known(key) {
                self.note(Violation::value(&self.name(key), &expected, value));
            }
        }
    }

    /// The key as violations name it.
    pub(super) fn name(&self, key: &str) -> String {
        json::dotted(&self.path, key)
    }

    fn get(&mut self, key: &str) -> Option<&'a Value> {
        self.read.insert(key.to_owned());
        self.map.get(key).filter(|value| !value.is_null())
    }
}

fn whole(value: &Value) -> Option<usize> {
    usize::try_from(value.as_u64()?).ok()
}

pub(super) fn token_id(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok()
}
