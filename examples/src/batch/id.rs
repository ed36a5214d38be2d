//! By what a result is told from others.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _};
use serde::ser::{Error as _, Serialize, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::io;

/// A string, or a number as it is spelled: no type holds every number, and a result with one that is altered
/// would find no request.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Id(String);

impl Id {
    /// The number of a line.
    pub(super) fn of_line(line: usize) -> Self {
        Self(line.to_string())
    }
}

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spelled = Box::<RawValue>::deserialize(deserializer)?;
        // A string has several spellings.
        match serde_json::from_str(spelled.get()).map_err(D::Error::custom)? {
            Value::String(text) => Ok(Self(Value::from(text).to_string())),
            _ => Ok(Self(spelled.get().to_owned())),
        }
    }
}

impl Serialize for Id {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let spelled = RawValue::from_string(self.0.clone()).map_err(S::Error::custom)?;
        spelled.serialize(serializer)
    }
}

/// As messages show it.
impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&io::beginning(&self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A float of 64 bits would make 2^64 and 2^64 + 1 one number, and 1.10 another text.
    #[test]
    fn an_id_is_written_as_it_was_read() {
        for id in [
            "18446744073709551616",
            "-9223372036854775809",
            "1.10",
            "1e2",
            "-0",
            "9007199254740993.0",
            r#""a\n\"é""#,
        ] {
            let read: Id = serde_json::from_str(id).unwrap();
            assert_eq!(serde_json::to_string(&read).unwrap(), id);
        }
        let of = |text: &str| serde_json::from_str::<Id>(text).unwrap();
        assert_eq!(of(r#""\u0061""#), of(r#""a""#));
        assert_ne!(of("1"), of(r#""1""#));
        assert_eq!(of("7"), Id::of_line(7));
    }
}
