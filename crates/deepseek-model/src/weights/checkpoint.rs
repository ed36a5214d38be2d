//! A checkpoint directory: which file holds which tensor.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Component, Path, PathBuf},
};

use serde::Deserialize;

use super::{
    error::{Problem, Problems, WeightsError},
    shard::{self, Tensors},
};

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// All tensors of a checkpoint by name. Values are not read yet.
pub(super) struct Checkpoint {
    pub(super) dir: PathBuf,
    pub(super) tensors: Tensors,
}

#[derive(Deserialize)]
struct Index {
    /// Tensor name to file name.
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens the shards that the index lists, or else the single file.
    pub(super) fn open(dir: &Path) -> Result<Self, WeightsError> {
        if !dir.is_dir() {
            return Err(WeightsError::NoDirectory { dir: dir.into() });
        }
        let (index, single) = (dir.join(INDEX), dir.join(SINGLE));
        let tensors = if index.exists() {
            indexed(dir, &read_index(&index)?)?
        } else if single.exists() {
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

fn read_index(path: &Path) -> Result<Index, WeightsError> {
    let text = std::fs::read_to_string(path).map_err(|source| WeightsError::Read {
        path: path.into(),
        source,
    })?;
    serde_json::from_str(&text).map_err(|source| WeightsError::Index {
        path: path.into(),
        source,
    })
}

/// The tensors of the index. A tensor that a shard holds beside them is not part of the checkpoint.
fn indexed(dir: &Path, index: &Index) -> Result<Tensors, WeightsError> {
    let files: BTreeSet<&str> = index.weight_map.values().map(String::as_str).collect();
    let mut problems = Vec::new();
    let mut held = BTreeMap::new();
    for file in files {
        match open_inside(dir, file) {
            Ok(tensors) => drop(held.insert(file, tensors)),
            Err(found) => problems.extend(found),
        }
    }
    let mut tensors = BTreeMap::new();
    for (name, file) in &index.weight_map {
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
        return shard::open(&dir.join(file));
    }
    // Quoted, since it may be empty.
    let (file, reason) = (
        format!("{file:?}"),
        "not a file of the checkpoint directory".to_owned(),
    );
    Err(vec![Problem::File { file, reason }])
}
