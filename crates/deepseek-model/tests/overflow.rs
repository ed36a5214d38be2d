//! Activations whose squares have no finite sum.

mod common;

use std::fs;

use common::{Lone, checkpoint};
use deepseek_model::{LogitRows, Model, ModelOptions, ReplayPolicy, StepRequest};

/// A token whose embedding is `value` in every channel.
const TOKEN: usize = 9;

/// A copy of a checkpoint with `value`, given as bf16, in every channel of the token's embedding.
fn with_embedding(value: f32) -> Model {
    let (from, dir) = (checkpoint("v41-demo"), tempfile::tempdir().unwrap());
    for name in ["config.json", "tokenizer.json"] {
        fs::copy(from.join(name), dir.path().join(name)).unwrap();
    }
    let mut bytes = fs::read(from.join("model.safetensors")).unwrap();
    let (header, tensors) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let embedding = tensors.info("embed.weight").unwrap();
    let row = embedding.shape[1] * 2;
    let start = 8 + header + embedding.data_offsets.0 + TOKEN * row;
    for channel in bytes[start..start + row].chunks_exact_mut(2) {
        channel.copy_from_slice(&half::bf16::from_f32(value).to_le_bytes());
    }
    fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    Model::load(dir.path(), ModelOptions::default(), &|_| {}).unwrap()
}

/// The logits of a step with the token, or why there are none.
fn step(model: &Model) -> Result<Vec<f32>, deepseek_model::Error> {
    let mut run = Lone::new(model, ReplayPolicy::Off, 3);
    let request = StepRequest {
        sequence: run.id,
        tokens: &[5, TOKEN as u32, 6],
        logits: LogitRows::Last,
    };
    let output = model.forward(&[request], &mut run.cache)?;
    Ok(common::flat(&output.logits))
}

/// Squares of 1.5e19 are finite, their sum is not: the root's inverse is 0, and so would be all that
/// the norm gives, the logits among it.
#[test]
fn a_row_that_overflows_in_a_norm_fails_its_step() {
    let error = step(&with_embedding(1.5e19)).unwrap_err().to_string();
    // A backtrace may follow.
    let text = error.lines().next().unwrap();
    insta::assert_snapshot!(text, @"layer 0: router chose 0 of 2 experts: its logits are not finite");
    // Large values whose squares have a sum are normalised like any other.
    let logits = step(&with_embedding(1e15)).unwrap();
    assert!(logits.iter().all(|x| x.is_finite()) && logits.iter().any(|&x| x != 0.0));
}
