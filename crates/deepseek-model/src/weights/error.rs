//! Why weights cannot be had.

use std::{
    io,
    path::{Path, PathBuf},
};

use candle_core::DType;

use super::{
    checkpoint,
    problem::{Problem, Problems, Quoted},
};
use crate::config::{ConfigError, Violation, Violations, unreadable};
use crate::memory::{Bytes, MemoryError, Shortage};
use crate::plain::Shown;

/// Why weights cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// The configuration is not one that shapes can be computed with.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// There is no such directory.
    #[error("there is no directory {}", Shown(dir))]
    NoDirectory {
        /// The directory asked for.
        dir: PathBuf,
    },
    /// The directory has no checkpoint.
    #[error(
        "{} holds neither model.safetensors.index.json nor model.safetensors",
        Shown(dir)
    )]
    NoCheckpoint {
        /// The directory asked for.
        dir: PathBuf,
    },
    /// A file cannot be read.
    #[error("cannot read {}", Shown(path))]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The host has no memory for what is made of a file.
    #[error(transparent)]
    Reading(#[from] MemoryError),
    /// The index is no JSON.
    #[error("{} {}", Shown(path), unreadable("a shard index", key))]
    Index {
        /// The index.
        path: PathBuf,
        /// The key at which the parser stopped, dotted if nested; empty if at none.
        key: String,
        /// Where and why the parser stopped.
        source: serde_json::Error,
    },
    /// The index has no `weight_map` from tensor names to file names, or names a tensor twice.
    #[error("{} breaks {}", Shown(path), Violations(violations))]
    IndexEntries {
        /// The index.
        path: PathBuf,
        /// All that was found.
        violations: Vec<Violation>,
    },
    /// The checkpoint is damaged, or is not the one the configuration describes.
    #[error("{}{} has {problems}", Shown(dir), unread_note(*unread))]
    Checkpoint {
        /// The checkpoint directory.
        dir: PathBuf,
        /// Whether it holds a single file, too, which is not read since there is an index.
        unread: bool,
        /// All that was found.
        problems: Problems,
    },
    /// The configuration asks for far more tensors than there are.
    #[error(
        "{}{} has {found} tensors, but {layers} layers (num_hidden_layers) of {experts} experts \
         (n_routed_experts) need at least {needed}",
        Shown(dir),
        unread_note(*unread)
    )]
    TooFew {
        /// The checkpoint directory.
        dir: PathBuf,
        /// Whether it holds a single file, too, which is not read since there is an index.
        unread: bool,
        /// Tensors of the checkpoint.
        found: usize,
        /// Tensors that the experts alone need.
        needed: usize,
        /// `num_hidden_layers`.
        layers: usize,
        /// `n_routed_experts`.
        experts: usize,
    },
    /// The tensors do not fit the memory.
    #[error(
        "{} takes {} as {dtype:?}{}",
        Shown(dir),
        match bytes {
            Some(bytes) => format!("{} of memory", Bytes(*bytes as u64)),
            None => "more bytes than can be addressed".to_owned(),
        },
        bytes.map_or_else(String::new, |_| format!(", {shortage}"))
    )]
    Memory {
        /// The checkpoint directory.
        dir: PathBuf,
        /// Bytes of all tensors; `None` if more than can be addressed.
        bytes: Option<usize>,
        /// Dtype of matrices.
        dtype: DType,
        /// What there is.
        shortage: Shortage,
    },
    /// The tensors do not fit the memory of the device.
    #[error(
        "{} takes {} of the device's memory as {dtype:?}, expected at most the {} that are free: {} are \
         missing",
        Shown(dir),
        Bytes(*needed),
        Bytes(*free),
        Bytes(needed.saturating_sub(*free))
    )]
    DeviceMemory {
        /// The checkpoint directory.
        dir: PathBuf,
        /// Bytes of all tensors.
        needed: u64,
        /// Bytes that are free.
        free: u64,
        /// Dtype of matrices.
        dtype: DType,
    },
    /// The device cannot say how much memory is free.
    #[error(transparent)]
    Free(#[from] Box<crate::Error>),
    /// Random weights of a configuration with n-gram tables.
    #[error("random weights: expected a model without n-gram tables, layer {layer} has one")]
    RandomTable {
        /// The layer.
        layer: usize,
    },
    /// Matrices are asked for in a dtype the decoder does not compute in.
    #[error("matrices can be held in F32 or BF16, not in {0:?}")]
    HeldDtype(DType),
    /// The device did not take a tensor.
    #[error("cannot place {} on the device", Quoted(tensor))]
    Device {
        /// The tensor's name.
        tensor: String,
        /// What the device said.
        source: candle_core::Error,
    },
    /// No such tensor was loaded, or it was taken before.
    #[error("no tensor {} left to take", Quoted(.0))]
    NotHeld(String),
    /// The layer owns no n-gram table, or it was taken before.
    #[error("no n-gram table of layer {0} left to take")]
    NoTable(usize),
    /// A buffer that does not hold one row for each that was asked for.
    #[error(
        "{}: expected a buffer of {expected} values for {rows} rows, got {found}",
        Quoted(tensor)
    )]
    Buffer {
        /// The table's name.
        tensor: String,
        /// Rows asked for.
        rows: usize,
        /// Their values.
        expected: usize,
        /// Values of the buffer.
        found: usize,
    },
    /// A table row that does not exist.
    #[error("{} has {rows} rows, row {row} was asked for", Quoted(tensor))]
    Row {
        /// The table's name.
        tensor: String,
        /// The row asked for.
        row: i64,
        /// Rows of the table.
        rows: usize,
    },
    /// A table row with a scale that is no number.
    #[error(
        "{} in {}: row {row} has a scale that is not finite",
        Quoted(tensor),
        Shown(path)
    )]
    RowScale {
        /// The file of the scales.
        path: PathBuf,
        /// The table's name.
        tensor: String,
        /// The row asked for.
        row: usize,
    },
    /// A table row with a value that is no number.
    #[error(
        "{} in {}: row {row} has a value that is not finite",
        Quoted(tensor),
        Shown(path)
    )]
    RowValue {
        /// The file of the values.
        path: PathBuf,
        /// The table's name.
        tensor: String,
        /// The row asked for.
        row: usize,
    },
}

impl WeightsError {
    /// A checkpoint refused for `problems`, of which there is at least one.
    pub(super) fn in_checkpoint(dir: &Path, problems: Vec<Problem>) -> Self {
        Self::Checkpoint {
            dir: dir.into(),
            unread: checkpoint::has_unread_file(dir),
            problems: Problems::new(problems),
        }
    }
}

/// Says which of two descriptions of a checkpoint was read, where there are two.
fn unread_note(unread: bool) -> &'static str {
    if unread {
        " (as model.safetensors.index.json lists it; model.safetensors beside it is not read)"
    } else {
        ""
    }
}
