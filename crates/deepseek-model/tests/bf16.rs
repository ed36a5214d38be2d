//! Activations rounded to bf16: as far from f32 as the reference's own bf16 run is.
//!
//! A bf16 run cannot be compared value by value: one rounding that differs flips a choice of entries
//! or experts. What can be compared is how far it is from f32 on the average: too near, and rounding
//! is missing somewhere; too far, and there is too much of it.

mod common;

use candle_core::DType;
use common::{Expected, Lone, checkpoint, load};
use deepseek_model::{LogitRows, Model, ModelOptions, ReplayPolicy, SequenceOptions};

/// Mean absolute difference between the logits of the reference in bf16 and in f32, without cache
/// rounding, over all rows (of the demo the first 160), computed by the PyTorch reference.
const REFERENCE: [(&str, usize, f32); 4] = [
    ("bf16-s1", 80, 0.1517),
    ("fp4-s1", 80, 0.1179),
    ("engram-s1", 80, 0.0648),
    ("v41-demo", 160, 0.0428),
];

fn logits(model: &Model, tokens: &[u32]) -> Vec<f32> {
    let options = SequenceOptions {
        prompt_len: tokens.len(),
        keeps_rows: true,
    };
    Lone::with(model, ReplayPolicy::Off, options).step(tokens, LogitRows::All)
}

#[test]
fn bf16_is_as_far_from_f32_as_the_references() {
    for (name, rows, reference) in REFERENCE {
        let tokens = Expected::load(name).ids("tokens")[..rows].to_vec();
        let options = ModelOptions {
            dtype: DType::BF16,
            round_cache: false,
            ..Default::default()
        };
        let bf16 = Model::load(&checkpoint(name), options, &|_| {}).unwrap();
        let (a, b) = (logits(&bf16, &tokens), logits(&load(name, false), &tokens));
        let mean = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).sum::<f32>() / a.len() as f32;
        println!("{name}: {mean}, reference {reference}");
        let ratio = mean / reference;
        assert!(
            (0.6..1.6).contains(&ratio),
            "{name}: mean difference {mean}, the reference's is {reference}"
        );
    }
}
