//! Why a configuration is refused: every broken rule at once.

use std::{fmt, io, path::PathBuf};

use serde_json::Value;

/// Longest JSON text quoted in a [`Violation`], in characters.
const MAX_QUOTED: usize = 60;

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file is not there or cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file is no JSON object.
    #[error("{} is not a JSON object", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why the parser stopped.
        source: serde_json::Error,
    },
    /// Keys are missing, of a wrong type, or break a rule of the model.
    #[error("{} breaks {}", path.display(), List(violations))]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Every broken rule, in the order of the checks.
        violations: Vec<Violation>,
    },
}

/// One broken rule of a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The key, dotted if nested (`rope_scaling.factor`).
    pub field: String,
    /// What the rule asks for.
    pub expected: String,
    /// What the file holds.
    pub found: String,
}

impl Violation {
    pub(super) fn new(field: &str, expected: impl Into<String>, found: impl fmt::Display) -> Self {
        Self {
            field: field.to_owned(),
            expected: expected.into(),
            found: found.to_string(),
        }
    }

    /// A key that is not in the file.
    pub(super) fn absent(field: &str, expected: &str) -> Self {
        Self::new(field, expected, "no such key")
    }

    /// A key whose value is of the wrong type or out of range.
    pub(super) fn value(field: &str, expected: &str, found: &Value) -> Self {
        let text = found.to_string();
        let mut quoted: String = text.chars().take(MAX_QUOTED).collect();
        if quoted.len() < text.len() {
            quoted.push_str("..");
        }
        Self::new(field, expected, quoted)
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: expected {}, found {}",
            self.field, self.expected, self.found
        )
    }
}

struct List<'a>(&'a [Violation]);

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.0.len() == 1 { "" } else { "s" };
        write!(f, "{} rule{plural}:", self.0.len())?;
        self.0
            .iter()
            .try_for_each(|violation| write!(f, "\n  {violation}"))
    }
}
