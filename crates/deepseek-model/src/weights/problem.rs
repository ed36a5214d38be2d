//! What is wrong with a checkpoint: everything at once.

use std::{collections::BTreeMap, fmt, path::Path};

use safetensors::Dtype;

use super::{checkpoint::INDEX, error::WeightsError};
use crate::config::ExpertDtype;
use crate::plain::Plain;

/// Problems that [`Problems`] prints; a wrong configuration can make thousands.
const MAX_PRINTED: usize = 20;

/// Longest name that is printed whole, in characters.
const MAX_QUOTED: usize = 160;

/// Text out of a checkpoint: control characters escaped, cut if very long.
pub(super) struct Quoted<'a>(pub(super) &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = self.0.char_indices().nth(MAX_QUOTED);
        let shown = end.map_or(self.0, |(end, _)| &self.0[..end]);
        Plain(shown).fmt(f)?;
        match self.0.chars().count().saturating_sub(MAX_QUOTED) {
            0 => Ok(()),
            more => write!(f, ".. ({more} more characters)"),
        }
    }
}

/// All that is wrong with a checkpoint; prints the first few and counts the rest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems(Vec<Problem>);

impl Problems {
    pub(super) fn new(problems: Vec<Problem>) -> Self {
        Self(problems)
    }

    /// Fails with the problems, if there are any.
    pub(super) fn refuse(problems: Vec<Problem>, dir: &Path) -> Result<(), WeightsError> {
        if problems.is_empty() {
            return Ok(());
        }
        Err(WeightsError::in_checkpoint(dir, problems))
    }

    /// Every problem: of tensors the model has, in the model's order, then of those it has not, by
    /// name, then of scales, then of values.
    pub fn as_slice(&self) -> &[Problem] {
        &self.0
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.0.len() == 1 { "" } else { "s" };
        write!(f, "{} problem{plural}", self.0.len())?;
        if self.0.len() > 1 {
            let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
            for problem in &self.0 {
                *counts.entry(problem.kind()).or_default() += 1;
            }
            let counts: Vec<_> = counts
                .iter()
                .map(|(kind, n)| format!("{n} {kind}"))
                .collect();
            write!(f, " ({})", counts.join(", "))?;
        }
        write!(f, ":")?;
        self.0
            .iter()
            .take(MAX_PRINTED)
            .try_for_each(|problem| write!(f, "\n  {problem}"))?;
        match self.0.len().saturating_sub(MAX_PRINTED) {
            0 => Ok(()),
            more => write!(f, "\n  and {more} more"),
        }
    }
}

/// One thing wrong with a checkpoint. Files are named without their directory.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Problem {
    /// A shard cannot be read, or its header is broken.
    File {
        /// The shard.
        file: String,
        /// Why.
        reason: String,
    },
    /// A header entry that makes its shard unreadable.
    HeaderEntry {
        /// The tensor.
        tensor: String,
        /// The shard.
        file: String,
        /// What is wrong with the entry.
        reason: String,
    },
    /// The index says that a shard holds a tensor, and it does not.
    NotInShard {
        /// The tensor.
        tensor: String,
        /// The shard.
        file: String,
    },
    /// A tensor of the model that the checkpoint does not have.
    Missing {
        /// The tensor.
        tensor: String,
        /// The shape the configuration asks for.
        shape: Vec<usize>,
    },
    /// A tensor the model does not have.
    Unexpected {
        /// The tensor.
        tensor: String,
        /// The shard.
        file: String,
    },
    /// A tensor of a shape that does not follow from the configuration.
    Shape {
        /// The tensor.
        tensor: String,
        /// The shard.
        file: String,
        /// The stored shape asked for.
        expected: Vec<usize>,
        /// The stored shape.
        found: Vec<usize>,
    },
    /// A tensor of a dtype it cannot be stored in.
    Dtype {
        /// The tensor.
        tensor: String,
        /// The shard.
        file: String,
        /// The dtypes it can be stored in.
        expected: &'static str,
        /// Its dtype.
        found: Dtype,
    },
    /// Routed experts of which none is stored as the configuration says.
    ExpertDtype {
        /// The first matrix of one.
        tensor: String,
        /// The shard.
        file: String,
        /// What `expert_dtype` of `config.json` says.
        expected: ExpertDtype,
        /// What it would have to say.
        found: ExpertDtype,
        /// The dtype of the tensor.
        dtype: Dtype,
    },
    /// A quantised matrix without its scales, or a plain one with scales.
    Scale {
        /// The matrix.
        tensor: String,
        /// The shard.
        file: String,
        /// Its dtype.
        dtype: Dtype,
        /// Whether there are scales.
        found: bool,
    },
    /// A matrix whose rows do not fill whole bytes of two values.
    OddColumns {
        /// The matrix.
        tensor: String,
        /// The shard.
        file: String,
        /// Values in a row.
        columns: usize,
    },
    /// Scales that are not finite.
    BadScale {
        /// The tensor of scales.
        tensor: String,
        /// The shard.
        file: String,
        /// How many of its values are not finite.
        count: usize,
        /// Row and column of the first of them.
        first: [usize; 2],
    },
    /// A tensor with a value that is NaN or infinite, or becomes so in the dtype it is held in.
    NotFinite {
        /// The tensor.
        tensor: String,
        /// The shard.
        file: String,
        /// Row and column of the first such value; a vector is one row.
        first: [usize; 2],
    },
}

impl Problem {
    /// The tensor it is about, if it is about one.
    pub fn tensor(&self) -> Option<&str> {
        match self {
            Self::File { .. } => None,
            Self::HeaderEntry { tensor, .. }
            | Self::NotInShard { tensor, .. }
            | Self::Missing { tensor, .. }
            | Self::Unexpected { tensor, .. }
            | Self::Shape { tensor, .. }
            | Self::Dtype { tensor, .. }
            | Self::ExpertDtype { tensor, .. }
            | Self::Scale { tensor, .. }
            | Self::OddColumns { tensor, .. }
            | Self::BadScale { tensor, .. }
            | Self::NotFinite { tensor, .. } => Some(tensor),
        }
    }

    /// The word under which [`Problems`] counts.
    fn kind(&self) -> &'static str {
        match self {
            Self::File { .. } => "unreadable",
            Self::HeaderEntry { .. } => "ill-described",
            Self::NotInShard { .. } | Self::Missing { .. } => "missing",
            Self::Unexpected { .. } => "unexpected",
            Self::Shape { .. } => "misshapen",
            Self::Dtype { .. } | Self::ExpertDtype { .. } | Self::OddColumns { .. } => "ill-typed",
            Self::Scale { .. } | Self::BadScale { .. } => "badly scaled",
            Self::NotFinite { .. } => "not finite",
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { file, reason } => write!(
                f,
                "{file}: {reason}",
                file = Quoted(file),
                reason = Quoted(reason)
            ),
            Self::HeaderEntry {
                tensor,
                file,
                reason,
            } => write!(
                f,
                "{tensor} in {file}: {reason}",
                tensor = Quoted(tensor),
                file = Quoted(file),
                reason = Quoted(reason)
            ),
            Self::NotInShard { tensor, file } => {
                write!(
                    f,
                    "{tensor}: listed in {INDEX}, but not in {file}",
                    tensor = Quoted(tensor),
                    file = Quoted(file)
                )
            }
            Self::Missing { tensor, shape } => {
                write!(
                    f,
                    "{tensor}: missing, expected shape {shape:?}",
                    tensor = Quoted(tensor)
                )
            }
            Self::Unexpected { tensor, file } => {
                write!(
                    f,
                    "{tensor} in {file}: the model has no such tensor",
                    tensor = Quoted(tensor),
                    file = Quoted(file)
                )
            }
            Self::Shape {
                tensor,
                file,
                expected,
                found,
            } => {
                write!(
                    f,
                    "{tensor} in {file}: expected shape {expected:?}, found {found:?}",
                    tensor = Quoted(tensor),
                    file = Quoted(file)
                )
            }
            Self::Dtype {
                tensor,
                file,
                expected,
                found,
            } => {
                write!(
                    f,
                    "{tensor} in {file}: expected dtype {expected}, found {found}",
                    tensor = Quoted(tensor),
                    file = Quoted(file)
                )
            }
            Self::ExpertDtype {
                tensor,
                file,
                expected,
                found,
                dtype,
            } => {
                let (expected, found) = (expected.name(), found.name());
                write!(
                    f,
                    "{tensor} in {file}: expected {expected}, as expert_dtype of config.json says of the \
                     experts, found {found} ({dtype}), and no expert in {expected}",
                    tensor = Quoted(tensor),
                    file = Quoted(file)
                )
            }
            Self::Scale {
                tensor,
                file,
                dtype,
                found: false,
            } => {
                write!(
                    f,
                    "{tensor} in {file}: {dtype} without a scale tensor beside it",
                    tensor = Quoted(tensor),
                    file = Quoted(file)
                )
            }
            Self::Scale {
                tensor,
                file,
                dtype,
                found: true,
            } => {
                write!(
                    f,
                    "{tensor} in {file}: {dtype} needs no scale, but has a scale tensor",
                    tensor = Quoted(tensor),
                    file = Quoted(file)
                )
            }
            Self::OddColumns {
                tensor,
                file,
                columns,
            } => write!(
                f,
                "{tensor} in {file}: a row of {columns} 4-bit values does not fill whole bytes",
                tensor = Quoted(tensor),
                file = Quoted(file)
            ),
            Self::NotFinite {
                tensor,
                file,
                first: [row, column],
            } => write!(
                f,
                "{tensor} in {file}: the value at row {row}, column {column} is not finite",
                tensor = Quoted(tensor),
                file = Quoted(file)
            ),
            Self::BadScale {
                tensor,
                file,
                count,
                first: [row, column],
            } => {
                write!(
                    f,
                    "{tensor} in {file}: the scale at row {row}, column {column} is not finite",
                    tensor = Quoted(tensor),
                    file = Quoted(file)
                )?;
                match count - 1 {
                    0 => Ok(()),
                    more => write!(f, ", nor are {more} more"),
                }
            }
        }
    }
}
