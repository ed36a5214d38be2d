//! The fields of a JSON object, taken one by one: what is left over at the end, nobody knows.

use serde_json::{Map, Value};

use super::error::{ApiError, Result};
use crate::values::{self, quoted};
use crate::{io, json};

/// What some programs write before a text in UTF-8.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The code of a field that asks for what is not there.
const UNSUPPORTED: &str = "unsupported_parameter";

/// An object of a request.
pub(super) struct Fields {
    /// What its fields' names begin with in messages: nothing, or the way to the object and a dot.
    prefix: String,
    map: Map<String, Value>,
}

impl Fields {
    /// The object that a request's body is.
    ///
    /// # Errors
    /// It is no JSON, or no object, or has a key twice.
    pub(super) fn parse(body: &[u8]) -> Result<Self> {
        let body = body.strip_prefix(BYTE_ORDER_MARK).unwrap_or(body);
        let value = json::parse(body).map_err(|fault| {
            let error = fault.error;
            let (code, message) = match fault.twice {
                Some(_) => ("duplicate_key", error.to_string()),
                None => (
                    "invalid_json",
                    format!("the body is not valid JSON: {error}"),
                ),
            };
            ApiError {
                code: Some(code),
                param: fault.twice,
                message,
                ..ApiError::field("", "")
            }
        })?;
        Self::of(String::new(), value)
    }

    /// The object at `path`.
    ///
    /// # Errors
    /// It is none.
    pub(super) fn of(path: String, value: Value) -> Result<Self> {
        match value {
            Value::Object(map) => Ok(Self {
                prefix: match path.as_str() {
                    "" => path,
                    _ => path + ".",
                },
                map,
            }),
            other if path.is_empty() => Err(ApiError {
                param: None,
                message: format!("the body is {}: expected an object", kind(&other)),
                ..ApiError::field("", "")
            }),
            other => Err(ApiError::field(path, expected("an object", &other))),
        }
    }

    /// The name of a field as messages show it.
    pub(super) fn path(&self, name: &str) -> String {
        format!("{}{}", self.prefix, io::named(name))
    }

    /// A refusal of a field.
    pub(super) fn refuse(&self, name: &str, message: &str) -> ApiError {
        ApiError::field(self.path(name), message)
    }

    /// A field's value; none if it is absent or null.
    pub(super) fn value(&mut self, name: &str) -> Option<Value> {
        self.map.remove(name).filter(|value| !value.is_null())
    }

    /// The same, of a kind that `parse` knows.
    ///
    /// # Errors
    /// It is of another.
    pub(super) fn take<T>(
        &mut self,
        name: &str,
        what: &str,
        parse: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>> {
        self.take_or(name, |value| {
            parse(value).ok_or_else(|| expected(what, value))
        })
    }

    /// The same where `parse` says itself what it expected and what came.
    ///
    /// # Errors
    /// What it says.
    pub(super) fn take_or<T>(
        &mut self,
        name: &str,
        parse: impl FnOnce(&Value) -> std::result::Result<T, String>,
    ) -> Result<Option<T>> {
        let value = self.value(name);
        let parsed = value.as_ref().map(parse).transpose();
        parsed.map_err(|fault| self.refuse(name, &fault))
    }

    /// A whole number within `least..=most`.
    ///
    /// # Errors
    /// It is none.
    pub(super) fn count(&mut self, name: &str, least: usize, most: usize) -> Result<Option<usize>> {
        let range = least as u64..=most as u64;
        let number = self.take_or(name, |value| values::whole(range, value))?;
        Ok(number.map(|number| usize::try_from(number).expect("it is within the range")))
    }

    /// Passes over a field that asks for nothing.
    ///
    /// # Errors
    /// It asks for something.
    pub(super) fn neutral(&mut self, name: &str, neutral: &[Value]) -> Result<()> {
        match self.value(name) {
            Some(value) if !neutral.iter().any(|n| same(n, &value)) => {
                let neutral: Vec<String> = neutral.iter().map(Value::to_string).collect();
                let or = match neutral.len() {
                    0 => "no such field".to_owned(),
                    _ => format!("{}, or no such field", neutral.join(", ")),
                };
                let message = format!("not supported: expected {or}, got {}", quoted(&value));
                let error = self.refuse(name, &message);
                Err(ApiError {
                    code: Some(UNSUPPORTED),
                    ..error
                })
            }
            _ => Ok(()),
        }
    }

    /// Passes over fields that change nothing here, whatever they say.
    pub(super) fn ignore(&mut self, names: &[&str]) {
        for name in names {
            self.map.remove(*name);
        }
    }

    /// # Errors
    /// A field is left that has a value: a name that is misspelt would look as if it were followed.
    pub(super) fn finish(self) -> Result<()> {
        let left = self.map.iter().find(|(_, value)| !value.is_null());
        match left {
            Some((name, _)) => Err(ApiError {
                code: Some("unknown_parameter"),
                ..self.refuse(name, "no field of this name is known")
            }),
            None => Ok(()),
        }
    }
}

/// What was expected, and what came.
pub(super) fn expected(what: &str, value: &Value) -> String {
    format!("expected {what}, got {}", quoted(value))
}

/// A kind of JSON value, with its article.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// Whether two values are the same; numbers may be written as whole ones or not.
fn same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}

/// A text.
pub(super) fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(value: Value) -> Fields {
        Fields::of(String::new(), value).unwrap_or_else(|e| panic!("{}", e.message))
    }

    fn message<T>(result: Result<T>) -> String {
        let error = result.err().unwrap();
        format!("{} [{:?}, {:?}]", error.message, error.param, error.code)
    }

    #[test]
    fn bodies_that_are_no_objects_are_refused() {
        insta::assert_snapshot!(message(Fields::parse(b"{\"a\": ")), @"the body is not valid JSON: EOF while parsing a value at line 1 column 6 [None, Some(\"invalid_json\")]");
        insta::assert_snapshot!(message(Fields::parse(b"{\"a\": \"\xff\"}")), @r#"the body is not valid JSON: invalid unicode code point at line 1 column 8 [None, Some("invalid_json")]"#);
        insta::assert_snapshot!(message(Fields::parse(b"[]")), @"the body is a list: expected an object [None, None]");
        let nested = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        insta::assert_snapshot!(message(Fields::parse(nested.as_bytes())), @"the body is not valid JSON: recursion limit exceeded at line 1 column 128 [None, Some(\"invalid_json\")]");
    }

    /// The last of two values would count, and nobody would say so.
    #[test]
    fn a_key_that_comes_twice_is_refused_at_any_depth() {
        let of = |body: &str| message(Fields::parse(body.as_bytes()));
        insta::assert_snapshot!(of(r#"{"seed": 1, "seed": 2}"#), @r#"seed: the key comes twice at line 1 column 18 [Some("seed"), Some("duplicate_key")]"#);
        insta::assert_snapshot!(of(r#"{"messages": [{}, {"role": "user", "role": "user"}]}"#), @r#"messages[1].role: the key comes twice at line 1 column 41 [Some("messages[1].role"), Some("duplicate_key")]"#);
        let long = "é".repeat(100_000);
        let refused = of(&format!(r#"{{"{long}": 1, "{long}": 2}}"#));
        assert!(refused.len() < 800, "{} bytes", refused.len());
    }

    /// RFC 8259 lets parsers pass over one, and some clients write it.
    #[test]
    fn a_byte_order_mark_is_passed_over() {
        assert!(Fields::parse("\u{feff}{}".as_bytes()).is_ok());
    }

    /// A misspelt name would silently change nothing.
    #[test]
    fn what_nobody_took_is_unknown() {
        let mut fields = of(json!({"a": 1, "b": null, "c": 2}));
        assert_eq!(fields.count("a", 0, 1).ok(), Some(Some(1)));
        fields.ignore(&["c"]);
        assert!(fields.finish().is_ok());
        insta::assert_snapshot!(message(of(json!({"max_token\n": 5})).finish()), @r#"max_token\n: no field of this name is known [Some("max_token\\n"), Some("unknown_parameter")]"#);
        insta::assert_snapshot!(message(of(json!({"": 5})).finish()), @r#""": no field of this name is known [Some("\"\""), Some("unknown_parameter")]"#);
        let long = message(of(json!({"é".repeat(100_000): 5})).finish());
        assert!(long.len() < 400, "{} bytes", long.len());
    }

    #[test]
    fn a_wrong_kind_is_named_with_the_way_to_it() {
        let mut fields = Fields::of("messages[1]".to_owned(), json!({"role": 7}))
            .ok()
            .unwrap();
        insta::assert_snapshot!(message(fields.take("role", "a text", text)), @r#"messages[1].role: expected a text, got 7 [Some("messages[1].role"), None]"#);
    }

    #[test]
    fn only_values_that_ask_for_nothing_pass() {
        let neutral = |value| of(json!({"penalty": value})).neutral("penalty", &[json!(0)]);
        for value in [json!(null), json!(0), json!(0.0), json!(-0.0)] {
            assert!(neutral(value).is_ok());
        }
        insta::assert_snapshot!(message(neutral(json!(0.5))), @r#"penalty: not supported: expected 0, or no such field, got 0.5 [Some("penalty"), Some("unsupported_parameter")]"#);
        assert!(neutral(json!("0")).is_err(), "a text is no number");
    }
}
