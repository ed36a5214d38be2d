//! One safetensors file: its header, and the bytes of each tensor.

use std::{
    collections::BTreeMap,
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use safetensors::{
    Dtype,
    tensor::{Metadata, TensorInfo},
};

use super::{header, mapping::Mapping, problem::Problem};

/// Why a shard that is missing cannot be opened.
pub(super) const NOT_THERE: &str = "no such file";

/// An open shard.
#[derive(Debug)]
pub(super) struct Shard {
    map: Mapping,
    /// Name without directory, for errors.
    file: String,
    /// For errors where no directory is named.
    path: PathBuf,
}

/// Tensors by name.
pub(super) type Tensors = BTreeMap<String, RawTensor>;

/// A tensor as it lies in its shard.
#[derive(Debug, Clone)]
pub(super) struct RawTensor {
    shard: Arc<Shard>,
    pub(super) dtype: Dtype,
    /// Stored shape: packed axes count elements of `dtype`.
    pub(super) shape: Vec<usize>,
    range: Range<usize>,
}

impl RawTensor {
    /// The stored bytes, little-endian, row-major, of any alignment.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.shard.map.bytes()[self.range.clone()]
    }

    /// See [`Mapping::expect_scattered_reads`].
    pub(super) fn expect_scattered_reads(&self) {
        self.shard.map.expect_scattered_reads(self.range.clone());
    }

    /// The shard's name, for errors.
    pub(super) fn file(&self) -> String {
        self.shard.file.clone()
    }

    /// The shard's path, for errors that name no directory.
    pub(super) fn path(&self) -> PathBuf {
        self.shard.path.clone()
    }
}

/// Opens a shard and reads its header.
pub(super) fn open(path: &Path) -> Result<Tensors, Vec<Problem>> {
    let file = file_name(path);
    let map = match Mapping::open(path) {
        Ok(map) => map,
        Err(error) => {
            let reason = match error.kind() {
                io::ErrorKind::NotFound => NOT_THERE.to_owned(),
                _ => format!("cannot be read: {error}"),
            };
            return Err(vec![Problem::File { file, reason }]);
        }
    };
    let (metadata, start) = header::read(&file, map.bytes())?;
    let shard = Arc::new(Shard {
        map,
        file,
        path: path.into(),
    });
    Ok(tensors(&shard, start, &metadata))
}

fn tensors(shard: &Arc<Shard>, start: usize, metadata: &Metadata) -> Tensors {
    let locate = |(name, info): (String, &TensorInfo)| {
        let (from, to) = info.data_offsets;
        let raw = RawTensor {
            shard: shard.clone(),
            dtype: info.dtype,
            shape: info.shape.clone(),
            range: start + from..start + to,
        };
        (name, raw)
    };
    metadata.tensors().into_iter().map(locate).collect()
}

/// Name without directory.
fn file_name(path: &Path) -> String {
    path.file_name()
        .unwrap_or(path.as_os_str())
        .to_string_lossy()
        .into_owned()
}
