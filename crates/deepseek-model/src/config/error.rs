//! Why a configuration is refused: every broken rule at once.

use std::{fmt, io, path::PathBuf};

use serde_json::Value;

use crate::{
    memory::MemoryError,
    plain::{Plain, Shown},
};

/// Longest JSON text quoted in a [`Violation`], in characters.
pub(super) const MAX_QUOTED: usize = 60;
/// Violations that are printed; a damaged list can make any number.
const MAX_PRINTED: usize = 40;

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file is not there or cannot be read.
    #[error("cannot read {}", Shown(path))]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The host has no memory for what is made of the file.
    #[error(transparent)]
    Reading(#[from] MemoryError),
    /// The file is no JSON object, or holds a number that no computer has.
    #[error("{} {}", Shown(path), unreadable("a JSON object", key))]
    Json {
        /// The file.
        path: PathBuf,
        /// The key at which the parser stopped, dotted if nested; empty if at none.
        key: String,
        /// Where and why the parser stopped.
        source: serde_json::Error,
    },
    /// Keys are missing, of a wrong type, or break a rule of the model.
    #[error("{} breaks {}", Shown(path), Violations(violations))]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Every broken rule, in the order of the checks.
        violations: Vec<Violation>,
    },
    /// A field was set to what no file may hold. The rule is named by the file's key.
    #[error("the configuration was changed since it was read: {0}")]
    Changed(Violation),
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
    pub(crate) fn new(field: &str, expected: impl Into<String>, found: impl fmt::Display) -> Self {
        Self {
            field: field.to_owned(),
            expected: expected.into(),
            found: found.to_string(),
        }
    }

    /// A key that is not in the file.
    pub(crate) fn absent(field: &str, expected: &str) -> Self {
        Self::new(field, expected, "no such key")
    }

    /// A key whose value is of the wrong type or out of range.
    pub(crate) fn value(field: &str, expected: &str, found: &Value) -> Self {
        Self::new(field, expected, quoted(found))
    }
}

/// A value as messages quote it: its beginning, with what is not plain escaped.
pub(crate) fn quoted(value: &Value) -> String {
    let text = value.to_string();
    let mut quoted: String = text.chars().take(MAX_QUOTED).collect();
    if quoted.len() < text.len() {
        quoted.push_str("..");
    }
    Plain(&quoted).to_string()
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

/// A file that could not be read as `wanted`, after its name.
pub(crate) fn unreadable(wanted: &str, key: &str) -> String {
    if key.is_empty() {
        format!("is not {wanted}")
    } else {
        format!("cannot be read at the key {key}")
    }
}

/// Prints the first few and counts the rest.
pub(crate) struct Violations<'a>(pub(crate) &'a [Violation]);

impl fmt::Display for Violations<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.0.len() == 1 { "" } else { "s" };
        write!(f, "{} rule{plural}:", self.0.len())?;
        self.0
            .iter()
            .take(MAX_PRINTED)
            .try_for_each(|violation| write!(f, "\n  {violation}"))?;
        match self.0.len().saturating_sub(MAX_PRINTED) {
            0 => Ok(()),
            more => write!(f, "\n  and {more} more"),
        }
    }
}
