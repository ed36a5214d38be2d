//! The checkpoints of this repository, each value against the oracle.

use std::sync::Mutex;

use candle_core::{DType, Device};
use deepseek_model::{
    Config,
    weights::{LoadOptions, LoadProgress, Weights, WeightsError},
};

use crate::{
    checkpoint::{self, demo, fixture, load},
    reference,
};

#[test]
fn plain_checkpoint() {
    every_value(&fixture("bf16-s1"));
}

#[test]
fn quantised_checkpoint() {
    every_value(&fixture("fp4-s1"));
}

#[test]
fn checkpoint_with_tables() {
    every_value(&fixture("engram-s1"));
}

/// The demo is one file without an index.
#[test]
fn demo_checkpoint() {
    every_value(&demo());
}

#[track_caller]
fn every_value(dir: &std::path::Path) {
    let config = Config::load(dir).unwrap();
    let tensors = checkpoint::read(dir);
    for dtype in [DType::F32, DType::BF16] {
        reference::check(load(dir, &config, dtype).unwrap(), &tensors, dtype);
    }
}

#[test]
fn table_rows_are_dequantised_on_demand() {
    for dir in [fixture("engram-s1"), demo()] {
        let config = Config::load(&dir).unwrap();
        let tensors = checkpoint::read(&dir);
        let mut weights = load(&dir, &config, DType::BF16).unwrap();
        let engram = config.engram.unwrap();
        for (&layer, &rows) in engram.layers.iter().zip(&engram.table_rows) {
            let table = weights.take_table(layer).unwrap();
            assert_eq!((table.rows(), table.columns()), (rows, engram.head_dim));
            assert!(
                matches!(weights.take_table(layer), Err(WeightsError::NoTable(l)) if l == layer)
            );

            // Out of order, repeated, first and last.
            let wanted = [rows as i64 - 1, 0, 7, 7, rows as i64 / 2];
            let mut out = vec![0.0; wanted.len() * table.columns()];
            table.gather(&wanted, &mut out).unwrap();
            let name = format!("layers.{layer}.engram.embed.weight");
            let row = |i| (0..engram.head_dim).map(move |j| (i, j));
            let at = wanted.iter().flat_map(|&i| row(i as usize));
            let expected: Vec<f32> = at
                .map(|(i, j)| reference::value(&tensors, &name, i, j))
                .collect();
            assert_eq!(out, expected);

            table.gather(&[], &mut []).unwrap();
        }
    }
}

/// A table outlives the weights it came with: it owns its mapped file.
#[test]
fn a_table_keeps_its_file() {
    let dir = demo();
    let config = Config::load(&dir).unwrap();
    let mut weights = load(&dir, &config, DType::F32).unwrap();
    let table = weights.take_table(1).unwrap();
    drop(weights);
    let mut out = vec![0.0; table.columns()];
    table.gather(&[3], &mut out).unwrap();
    assert!(out.iter().any(|&v| v != 0.0));
}

#[test]
fn a_tensor_is_taken_once() {
    let dir = fixture("bf16-s1");
    let config = Config::load(&dir).unwrap();
    let mut weights = load(&dir, &config, DType::F32).unwrap();
    weights.take("norm.weight").unwrap();
    for name in [
        "norm.weight",
        "layers.0.ffn.experts.0.w1.weight",
        "vision.patch.weight",
    ] {
        let error = weights.take(name).unwrap_err();
        assert!(matches!(error, WeightsError::NotHeld(missing) if missing == name));
    }
}

#[test]
fn progress_counts_every_tensor_once_and_never_falls() {
    let dir = fixture("fp4-s1");
    let config = Config::load(&dir).unwrap();
    let seen: Mutex<Vec<LoadProgress>> = Mutex::default();
    let options = LoadOptions {
        device: Device::Cpu,
        dtype: DType::F32,
    };
    Weights::load(&dir, &config, &options, &|p| seen.lock().unwrap().push(p)).unwrap();

    let seen = seen.into_inner().unwrap();
    let counts: Vec<usize> = seen.iter().map(|p| p.tensors_done).collect();
    assert_eq!(counts, (1..=seen.len()).collect::<Vec<_>>());
    assert!(seen.is_sorted_by_key(|p| p.bytes_done));
    let last = seen.last().unwrap();
    assert_eq!(last.tensors_done, last.tensors_total);
    assert_eq!(last.bytes_done, last.bytes_total);

    // Everything but what a text decoder skips.
    let all = checkpoint::read(&dir);
    let read = all.iter().filter(|(name, _)| {
        !["vision.", "aligner.", "image_", "mtp."]
            .iter()
            .any(|p| name.starts_with(p))
            && !name.ends_with("bias_vl")
    });
    assert_eq!(
        last.bytes_total,
        read.map(|(_, raw)| raw.bytes.len()).sum::<usize>()
    );
}
