//! A checkpoint directory: which file holds which tensor.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Component, Path, PathBuf},
};

use serde_json::Value;

use super::{
    error::WeightsError,
    problem::{Problem, Problems},
    shard::{self, Tensors},
};
use crate::config::{
    Violation,
    file::{self, MAX_JSON},
    json::{self, Json},
};
use crate::memory::check_json;
use crate::plain::InQuotes;

pub(super) const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// All tensors of a checkpoint by name. Values are not read yet.
pub(super) struct Checkpoint {
    pub(super) dir: PathBuf,
    pub(super) tensors: Tensors,
}

/// Tensor name to file name.
type Index = BTreeMap<String, String>;

impl Checkpoint {
    /// Opens the shards that the index lists, or else the single file.
    pub(super) fn open(dir: &Path) -> Result<Self, WeightsError> {
        if !dir.is_dir() {
            return Err(WeightsError::NoDirectory { dir: dir.into() });
        }
        let (index, single) = (dir.join(INDEX), dir.join(SINGLE));
        let tensors = if file::is_there(&index) {
            indexed(dir, &read_index(&index)?)?
        } else if file::is_there(&single) {
            shard::open(&single).map_err(|problems| WeightsError::in_checkpoint(dir, problems))?
        } else {
            return Err(WeightsError::NoCheckpoint { dir: dir.into() });
        };
        Ok(Self {
            dir: dir.into(),
            tensors,
        })
    }
}

/// Whether a directory holds the single file beside an index, which goes before it.
pub(super) fn has_unread_file(dir: &Path) -> bool {
    [INDEX, SINGLE]
        .iter()
        .all(|name| file::is_there(&dir.join(name)))
}

fn read_index(path: &Path) -> Result<Index, WeightsError> {
    check_json(path)?;
    let text = file::read(path, MAX_JSON).map_err(|source| WeightsError::Read {
        path: path.into(),
        source,
    })?;
    let Json { value, repeated } = json::parse(&text).map_err(|stopped| WeightsError::Index {
        path: path.into(),
        key: stopped.key,
        source: stopped.source,
    })?;
    let mut violations = repeated.into_iter().map(|key| key.violation).collect();
    let index = weight_map(&value, &mut violations);
    if violations.is_empty() {
        return Ok(index);
    }
    Err(WeightsError::IndexEntries {
        path: path.into(),
        violations,
    })
}

/// The index of a file that holds `value`; what is wrong with it is noted.
fn weight_map(value: &Value, violations: &mut Vec<Violation>) -> Index {
    const MAP: &str = "weight_map";
    let mut index = Index::new();
    let expected = "an object of file names by tensor";
    if !value.is_object() {
        violations.push(Violation::value("the file as a whole", "an object", value));
        return index;
    }
    match value.get(MAP) {
        Some(Value::Object(map)) => {
            for (tensor, file) in map {
                if let Some(file) = file.as_str() {
                    index.insert(tensor.clone(), file.to_owned());
                } else {
                    let key = json::dotted(MAP, tensor);
                    violations.push(Violation::value(&key, "a file name", file));
                }
            }
        }
        Some(other) => violations.push(Violation::value(MAP, expected, other)),
        None => violations.push(Violation::absent(MAP, expected)),
    }
    index
}

/// The tensors of the index. A tensor that a shard holds beside them is not part of the checkpoint.
fn indexed(dir: &Path, index: &Index) -> Result<Tensors, WeightsError> {
    let files: BTreeSet<&str> = index.values().map(String::as_str).collect();
    let mut problems = Vec::new();
    let mut held = BTreeMap::new();
    for file in files {
        match open_inside(dir, file) {
            Ok(tensors) => drop(held.insert(file, tensors)),
            Err(found) => problems.extend(found),
        }
    }
    let mut tensors = BTreeMap::new();
    for (name, file) in index {
        // An unreadable shard is reported already, and once is enough.
        let Some(shard) = held.get_mut(file.as_str()) else {
            continue;
        };
        match shard.remove(name) {
            Some(raw) => drop(tensors.insert(name.clone(), raw)),
            None => problems.push(Problem::NotInShard {
                tensor: name.clone(),
                file: file.clone(),
            }),
        }
    }
    Problems::refuse(problems, dir)?;
    Ok(tensors)
}

/// Opens a shard by the name the index gives, which must not lead out of the directory.
fn open_inside(dir: &Path, file: &str) -> Result<Tensors, Vec<Problem>> {
    let inside = Path::new(file)
        .components()
        .all(|part| matches!(part, Component::Normal(_)));
    if inside && !file.is_empty() {
        return shard::open(&dir.join(file)).map_err(|mut problems| {
            for problem in &mut problems {
                if let Problem::File { reason, .. } = problem
                    && reason == shard::NOT_THERE
                {
                    *reason = format!("{reason}, but {INDEX} lists it");
                }
            }
            problems
        });
    }
    // Quoted, since it may be empty.
    let (file, reason) = (
        InQuotes(file).to_string(),
        format!("not a file of the checkpoint directory, but {INDEX} lists it"),
    );
    Err(vec![Problem::File { file, reason }])
}
