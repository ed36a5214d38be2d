//! Checkpoints as plain data: read from a fixture or made up, changed, and written to a directory.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use candle_core::{DType, Device};
use deepseek_model::{
    Config,
    weights::{LoadOptions, Weights, WeightsError},
};
use safetensors::{Dtype, SafeTensors, View};
use tempfile::TempDir;

/// A tensor as it is stored.
#[derive(Clone)]
pub(crate) struct Raw {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

pub(crate) type Tensors = BTreeMap<String, Raw>;

impl View for &Raw {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// A fixture's directory.
pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(name)
}

/// The demo model's directory.
pub(crate) fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/v41-demo")
}

/// All tensors of a directory, whatever the index says.
pub(crate) fn read(dir: &Path) -> Tensors {
    let mut tensors = Tensors::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if !name.starts_with("model") || !name.ends_with(".safetensors") {
            continue;
        }
        let bytes = fs::read(&path).unwrap();
        for (name, view) in SafeTensors::deserialize(&bytes).unwrap().iter() {
            let (dtype, shape, bytes) = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
            tensors.insert(
                name.to_owned(),
                Raw {
                    dtype,
                    shape,
                    bytes,
                },
            );
        }
    }
    tensors
}

/// A directory with `tensors` in one file.
pub(crate) fn single(tensors: &Tensors) -> TempDir {
    let dir = TempDir::new().unwrap();
    safetensors::serialize_to_file(tensors, None, &dir.path().join("model.safetensors")).unwrap();
    dir
}

/// A directory with `tensors` spread over two shards, `a.safetensors` and `b.safetensors`.
pub(crate) fn sharded(tensors: &Tensors) -> TempDir {
    let dir = TempDir::new().unwrap();
    let mut map = BTreeMap::new();
    for (shard, file) in ["a.safetensors", "b.safetensors"].into_iter().enumerate() {
        let part = tensors.iter().enumerate().filter(|(at, _)| at % 2 == shard);
        let part: BTreeMap<_, _> = part.map(|(_, tensor)| tensor).collect();
        map.extend(part.keys().map(|&name| (name.clone(), file)));
        safetensors::serialize_to_file(part, None, &dir.path().join(file)).unwrap();
    }
    write_index(dir.path(), &map);
    dir
}

pub(crate) fn write_index(dir: &Path, map: &BTreeMap<String, &str>) {
    let index = serde_json::json!({ "metadata": {}, "weight_map": map });
    fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// Loads on the CPU with matrices in `dtype`.
pub(crate) fn load(dir: &Path, config: &Config, dtype: DType) -> Result<Weights, WeightsError> {
    let options = LoadOptions {
        device: Device::Cpu,
        dtype,
    };
    Weights::load(dir, config, &options, &|_| {})
}
