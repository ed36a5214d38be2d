//! Directories with an index and a single file: the index goes before, and a refusal says so.

use std::fs;

use candle_core::DType;
use deepseek_model::Config;

use crate::checkpoint::{self, fixture, load, sharded};

#[test]
fn a_single_file_that_is_not_read_is_named() {
    let config = Config::load(&fixture("engram-s1")).unwrap();
    let mut tensors = checkpoint::read(&fixture("engram-s1"));
    let whole = sharded(&tensors);
    tensors.remove("norm.weight");
    let dir = sharded(&tensors);
    let refusal = || {
        let error = load(dir.path(), &config, DType::F32).unwrap_err();
        let dir = dir.path().to_str().unwrap();
        error.to_string().replace(dir, "CHECKPOINT")
    };
    let alone = refusal();
    fs::write(dir.path().join("model.safetensors"), "").unwrap();
    insta::assert_snapshot!(format!("{alone}\n{}", refusal()));

    // What fits loads by its index, whatever the other file is.
    fs::write(whole.path().join("model.safetensors"), "").unwrap();
    load(whole.path(), &config, DType::F32).unwrap();
}
