//! JSON from outside: a value of which no object has a key twice. Of two values of one key `serde_json`
//! takes the last and says nothing.

use std::cell::RefCell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::io;

/// Why a text is no such value.
#[derive(Debug)]
pub(crate) struct Fault {
    /// The way to a key that comes twice, such as `messages[1].role`; none if the text is not JSON.
    pub(crate) twice: Option<String>,
    /// What is wrong, with line and column.
    pub(crate) error: serde_json::Error,
}

/// The value that a text is.
///
/// # Errors
/// It is not JSON, or a key comes twice.
pub(crate) fn parse(text: &[u8]) -> Result<Value, Fault> {
    let twice = RefCell::new(None);
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let seed = Seed {
        path: Path::Root,
        twice: &twice,
    };
    let value = seed.deserialize(&mut deserializer);
    let value = value.and_then(|value| deserializer.end().map(|()| value));
    value.map_err(|error| Fault {
        twice: twice.into_inner(),
        error,
    })
}

/// Where a value stands.
#[derive(Clone, Copy)]
enum Path<'a> {
    Root,
    Key(&'a Path<'a>, &'a str),
    Index(&'a Path<'a>, usize),
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root => Ok(()),
            Self::Key(Self::Root, key) => f.write_str(&io::named(key)),
            Self::Key(parent, key) => write!(f, "{parent}.{}", io::named(key)),
            Self::Index(parent, index) => write!(f, "{parent}[{index}]"),
        }
    }
}

/// Makes the value at a place.
struct Seed<'a> {
    path: Path<'a>,
    /// Takes the way to a key that comes twice.
    twice: &'a RefCell<Option<String>>,
}

impl<'a> Seed<'a> {
    fn below(&self, path: Path<'a>) -> Self {
        Self { path, ..*self }
    }
}

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seed<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        loop {
            let path = Path::Index(&self.path, list.len());
            match access.next_element_seed(self.below(path))? {
                Some(value) => list.push(value),
                None => return Ok(Value::Array(list)),
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut fields = Map::new();
        while let Some(key) = access.next_key::<String>()? {
            let path = Path::Key(&self.path, &key);
            if fields.contains_key(&key) {
                let path = path.to_string();
                let error = A::Error::custom(format!("{path}: the key comes twice"));
                *self.twice.borrow_mut() = Some(path);
                return Err(error);
            }
            let value = access.next_value_seed(self.below(path))?;
            fields.insert(key, value);
        }
        Ok(Value::Object(fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_key_twice_is_what_serde_json_makes_of_it() {
        for text in [
            "null",
            " [true, -3, 18446744073709551615, 0.5, 1e20, \"\\u00e9\\n\", {}] ",
            r#"{"a": {"a": [{"a": 1}, {"a": 2}]}, "b": null}"#,
        ] {
            let expected: Value = serde_json::from_str(text).unwrap();
            assert_eq!(parse(text.as_bytes()).unwrap(), expected);
        }
        for text in ["", "{", "[1,]", "1 2", "{\"a\": \u{1}}", "\"\\ud800\""] {
            let fault = parse(text.as_bytes()).unwrap_err();
            let expected = serde_json::from_str::<Value>(text).unwrap_err();
            assert_eq!(fault.error.to_string(), expected.to_string());
            assert_eq!(fault.twice, None);
        }
    }

    /// Also where the two are spelled otherwise, or alike in value.
    #[test]
    fn a_key_that_comes_twice_is_named_with_the_way_to_it() {
        let faults = [
            r#"{"a": 1, "b": 2, "a": 1}"#,
            r#"{"a": 1, "\u0061": null}"#,
            r#"{"a": [0, {"b": {"c\n": 1, "c\n": 2}}]}"#,
            r#"[[{"": 1, "": 2}]]"#,
        ]
        .map(|text| {
            let fault = parse(text.as_bytes()).unwrap_err();
            format!("{:?}: {}", fault.twice, fault.error)
        });
        insta::assert_snapshot!(faults.join("\n"), @r#"
        Some("a"): a: the key comes twice at line 1 column 20
        Some("a"): a: the key comes twice at line 1 column 17
        Some("a[1].b.c\\n"): a[1].b.c\n: the key comes twice at line 1 column 32
        Some("[0][0].\"\""): [0][0]."": the key comes twice at line 1 column 12
        "#);
    }
}
