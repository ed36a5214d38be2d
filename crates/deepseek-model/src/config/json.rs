//! Reads JSON and says what `serde_json` alone does not: under which key it stopped, and which keys
//! an object holds more than once.

use std::fmt::{self, Write};

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::error::{MAX_QUOTED, Violation};
use crate::plain::InQuotes;

/// A JSON text that was read to its end.
#[derive(Debug)]
pub(crate) struct Json {
    pub(crate) value: Value,
    /// Keys that an object holds more than once; `value` has the last.
    pub(crate) repeated: Vec<Repeated>,
}

/// A key that an object holds more than once.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Repeated {
    /// The key of the whole text's object that it is or stands under, as the text has it.
    pub(crate) outer: String,
    /// The same key below that one, dotted; empty if it is that one.
    pub(crate) inner: String,
    /// The key and both of its values.
    pub(crate) violation: Violation,
}

/// Why and where a text could not be read to its end.
#[derive(Debug)]
pub(crate) struct Stopped {
    /// Dotted; empty if the text broke off outside of any key.
    pub(crate) key: String,
    /// Has line and column.
    pub(crate) source: serde_json::Error,
}

/// Reads a whole text.
pub(crate) fn parse(text: &[u8]) -> Result<Json, Stopped> {
    let mut reader = Reader::default();
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let value = reader
        .deserialize(&mut deserializer)
        .and_then(|value| deserializer.end().map(|()| value));
    match value {
        Ok(value) => Ok(Json {
            value,
            repeated: reader.repeated,
        }),
        Err(source) => Err(Stopped {
            key: shortened(&reader.key),
            source,
        }),
    }
}

/// The key `name` of the object at `key`: dotted, and quoted where a dot or anything else in it
/// could be taken for something else. No longer than a message shows.
pub(crate) fn dotted(key: &str, name: &str) -> String {
    let mut dotted = key.to_owned();
    push(&mut dotted, name);
    shortened(&dotted)
}

/// A key without its middle if it is very long: nesting may be 127 levels deep.
fn shortened(key: &str) -> String {
    let count = key.chars().count();
    if count <= 2 * MAX_QUOTED {
        return key.to_owned();
    }
    let first: String = key.chars().take(MAX_QUOTED).collect();
    let last: String = key.chars().skip(count - MAX_QUOTED).collect();
    format!("{first}..{last}")
}

fn push(key: &mut String, name: &str) {
    if !key.is_empty() {
        key.push('.');
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if !name.is_empty() && name.len() <= MAX_QUOTED && name.chars().all(plain) {
        key.push_str(name);
        return;
    }
    let cut: String = name.chars().take(MAX_QUOTED).collect();
    let more = if cut.len() < name.len() { ".." } else { "" };
    write!(key, "{}{more}", InQuotes(&cut)).expect("a string takes all that is written");
}

/// Builds a value. Where a value cannot be read, its key stays in `key`.
#[derive(Default)]
struct Reader {
    key: String,
    /// The first part of `key` as the text has it, and how long that part is in `key`.
    outer: (String, usize),
    repeated: Vec<Repeated>,
}

impl<'de> DeserializeSeed<'de> for &mut Reader {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for &mut Reader {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        let number = Number::from_f64(value).map(Value::Number);
        number.ok_or_else(|| E::custom("number out of range"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let outer = self.key.len();
        let mut values = Vec::new();
        loop {
            write!(self.key, "[{}]", values.len()).expect("a string takes all that is written");
            let Some(value) = list.next_element_seed(&mut *self)? else {
                break;
            };
            values.push(value);
            self.key.truncate(outer);
        }
        self.key.truncate(outer);
        Ok(values.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Value, A::Error> {
        let outer = self.key.len();
        let mut values = Map::new();
        while let Some(name) = object.next_key::<String>()? {
            // Not before: what comes after a value may be what makes it unreadable, as in `1_000`.
            self.key.truncate(outer);
            push(&mut self.key, &name);
            if outer == 0 {
                self.outer = (name.clone(), self.key.len());
            }
            let value = object.next_value_seed(&mut *self)?;
            if let Some(first) = values.get(&name) {
                let both = Value::from(vec![first.clone(), value.clone()]);
                let violation = Violation::value(&shortened(&self.key), "one value", &both);
                let (outer, len) = &self.outer;
                self.repeated.push(Repeated {
                    outer: outer.clone(),
                    inner: shortened(self.key[*len..].trim_start_matches('.')),
                    violation: Violation {
                        found: format!("the key again, with {}", violation.found),
                        ..violation
                    },
                });
            }
            values.insert(name, value);
        }
        self.key.truncate(outer);
        Ok(values.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever can be read is what `serde_json` reads.
    #[test]
    fn values_are_those_of_serde_json() {
        let text = r#" {"a": [1, -2, 3.5, "\u00e9\n", null, true, [], {}], "b": {"c": 1e300}} "#;
        let json = parse(text.as_bytes()).unwrap();
        assert_eq!(json.value, serde_json::from_str::<Value>(text).unwrap());
        assert_eq!(json.repeated, []);
    }

    #[track_caller]
    fn stops(text: &str, key: &str) {
        assert_eq!(parse(text.as_bytes()).unwrap_err().key, key, "{text}");
    }

    #[test]
    fn the_key_is_where_reading_stopped() {
        stops(r#"{"a": {"b": [1, 1e400]}}"#, "a.b[1]");
        stops(r#"{"a": {"b": [1], "c": nul}}"#, "a.c");
        stops(r#"{"a": {"b": 1_000, "c": 2}}"#, "a.b");
        stops(r#"{"a": {"b": 1}, 2}"#, "a");
        stops(r#"{"a": [1"#, "a[1]");
        stops(r#"{"a": 1} x"#, "");
        stops(r#"{"a.b": -}"#, r#""a.b""#);
        stops(&format!("{{\"a\": {}", "[".repeat(1000)), &deep());
    }

    /// Whoever lists what a text has by name must not find the name in quotes.
    #[test]
    fn a_repeated_key_says_what_it_stands_under() {
        let text = r#"{"a.b": {"c": [{"d": 1, "d": 2}]}, "e f": 1, "e f": 2}"#;
        let repeated = parse(text.as_bytes()).unwrap().repeated;
        let named: Vec<[&str; 3]> = repeated
            .iter()
            .map(|r| [&r.outer[..], &r.inner, &r.violation.field])
            .collect();
        assert_eq!(named[0], ["a.b", "c[0].d", r#""a.b".c[0].d"#]);
        assert_eq!(named[1], ["e f", "", r#""e f""#]);
    }

    /// 127 levels are read, so that nesting cannot exhaust the stack. Of a key that long the ends are
    /// told.
    fn deep() -> String {
        format!("a{}[0..{}", "[0]".repeat(19), "[0]".repeat(20))
    }

    #[test]
    fn no_key_is_longer_than_its_ends() {
        let nested = format!("{{\"{}\":", "é".repeat(59)).repeat(100);
        let key = parse(format!("{nested}-").as_bytes()).unwrap_err().key;
        assert_eq!(key.chars().count(), 2 * MAX_QUOTED + 2);
        let text = format!("{nested}{{\"a\": 1, \"a\": 2}}{}", "}".repeat(100));
        let field = &parse(text.as_bytes()).unwrap().repeated[0].violation.field;
        assert_eq!(field.chars().count(), 2 * MAX_QUOTED + 2);
    }
}
