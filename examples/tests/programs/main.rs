//! The programs on the checkpoints of the repository, driven without a process where that will do.

mod batch;
mod flags;
mod generate;
mod interrupt;
#[cfg(target_os = "linux")]
mod memory;
mod perplexity;
mod process;
mod refusals;
mod serve;
mod statuses;
mod terminal;

use std::path::{Path, PathBuf};

use clap::Parser;
use replay_examples::generate::GenerateArgs;
use replay_examples::io::Io;
use serde_json::Value;
use tempfile::TempDir;

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

pub(crate) fn demo() -> String {
    root().join("models/v41-demo").display().to_string()
}

/// A copy of the demo checkpoint to change.
pub(crate) fn copy_of_demo() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(demo()).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    dir
}

/// Changes a JSON file.
pub(crate) fn change(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut file = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    change(&mut file);
    std::fs::write(path, file.to_string()).unwrap();
}

/// A demo checkpoint whose texts begin with no token of their own.
pub(crate) fn without_first_token() -> TempDir {
    let dir = copy_of_demo();
    change(&dir.path().join("config.json"), |config| {
        config["bos_token_id"] = Value::Null;
        config["text_config"]["bos_token_id"] = Value::Null;
    });
    change(&dir.path().join("generation_config.json"), |generation| {
        generation["bos_token_id"] = Value::Null;
    });
    dir
}

/// A demo checkpoint of finite weights whose logits overflow: one of the first two is infinite.
pub(crate) fn broken_demo() -> TempDir {
    let dir = copy_of_demo();
    let path = dir.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let weights = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let range = |name, dtype| {
        let tensor = weights.tensor(name).unwrap();
        assert_eq!(tensor.dtype(), dtype);
        let start = tensor.data().as_ptr() as usize - bytes.as_ptr() as usize;
        (start..start + tensor.data().len(), tensor.shape().to_vec())
    };
    let (norm, _) = range("norm.weight", safetensors::Dtype::BF16);
    let (head, shape) = range("head.weight", safetensors::Dtype::F32);
    let bf16 = (1e20f32.to_bits() >> 16) as u16;
    let norm: &mut [[u8; 2]] = bytes[norm].as_chunks_mut().0;
    norm.fill(bf16.to_le_bytes());
    let head: &mut [[u8; 4]] = bytes[head].as_chunks_mut().0;
    head.fill(0f32.to_le_bytes());
    head[0] = 1e30f32.to_le_bytes();
    head[shape[1]] = (-1e30f32).to_le_bytes();
    std::fs::write(path, bytes).unwrap();
    dir
}

/// A demo checkpoint of finite weights that gives one token no probability at all after the rows
/// whose final column 0 is above zero, and leaves the others alike.
pub(crate) fn demo_that_rules_out(id: u32) -> TempDir {
    let dir = copy_of_demo();
    let path = dir.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let weights = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let start = |data: &[u8]| data.as_ptr() as usize - bytes.as_ptr() as usize;
    let (norm, head) = (
        weights.tensor("norm.weight").unwrap(),
        weights.tensor("head.weight").unwrap(),
    );
    let (norm_at, head_at) = (start(norm.data()), start(head.data()));
    let (head_len, width) = (head.data().len(), head.shape()[1]);
    let head: &mut [[u8; 4]] = bytes[head_at..head_at + head_len].as_chunks_mut().0;
    head.fill(0f32.to_le_bytes());
    head[id as usize * width] = (-1e38f32).to_le_bytes();
    let bf16 = (1e20f32.to_bits() >> 16) as u16;
    bytes[norm_at..norm_at + 2].copy_from_slice(&bf16.to_le_bytes());
    std::fs::write(path, bytes).unwrap();
    dir
}

/// A demo checkpoint cut off after its last KV source.
pub(crate) fn demo_without_replay() -> TempDir {
    let dir = copy_of_demo();
    change(&dir.path().join("config.json"), |config| {
        let text = &mut config["text_config"];
        text["num_hidden_layers"] = 7.into();
        text["index_source_layer_ids"] = serde_json::json!([2, 4, 6]);
    });
    let path = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let weights = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let layer = |name: &str| {
        name.strip_prefix("layers.")?
            .split('.')
            .next()?
            .parse()
            .ok()
    };
    let kept = weights
        .iter()
        .filter(|(name, _)| layer(name).is_none_or(|layer: usize| layer < 7));
    std::fs::write(path, safetensors::serialize(kept, None).unwrap()).unwrap();
    dir
}

/// A program's streams after it ended.
pub(crate) struct Run {
    pub(crate) result: anyhow::Result<()>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Run {
    /// Runs `program` with a pipe for stdin.
    pub(crate) fn of(stdin: &str, program: impl FnOnce(&mut Io<'_>) -> anyhow::Result<()>) -> Self {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let result = program(&mut Io {
            stdin: &mut stdin.as_bytes(),
            out: &mut out,
            err: &mut err,
            watched: false,
            interrupt: None,
        });
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Self {
            result,
            out: text(out),
            err: text(err),
        }
    }

    /// What a run that went well printed.
    #[track_caller]
    pub(crate) fn ok(self) -> (String, String) {
        self.result.unwrap();
        (self.out, self.err)
    }

    /// The message of a run that was refused before it printed anything.
    #[track_caller]
    pub(crate) fn refused(self) -> String {
        self.refused_at(&demo())
    }

    /// The same of a run on the checkpoint `model`.
    #[track_caller]
    pub(crate) fn refused_at(self, model: &str) -> String {
        let error = self.result.unwrap_err();
        assert_eq!(
            (self.out.as_str(), self.err.as_str()),
            ("", ""),
            "half-written output"
        );
        let here = std::env::current_dir().unwrap().display().to_string();
        format!("{error:#}")
            .replace(model, "DEMO")
            .replace(&here, "HERE")
    }
}

pub(crate) fn records(out: &str) -> Vec<Value> {
    out.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// `generate` on the demo checkpoint.
pub(crate) fn generate(flags: &[&str]) -> Run {
    generate_on(&demo(), flags, "")
}

pub(crate) fn generate_on(model: &str, flags: &[&str], stdin: &str) -> Run {
    let fixed = ["generate", "--model", model];
    let args = GenerateArgs::try_parse_from(fixed.iter().chain(flags)).unwrap();
    Run::of(stdin, |io| replay_examples::generate::run(&args, io))
}
