//! Every tensor of the fixtures' `expected.safetensors`, computed by an independent f32 reference.

mod common;

use candle_core::DType;
use common::quantised::check_quantised;
use common::reference::{CHUNKINGS, TIGHT, check_chunking, check_demo, check_off, check_policies};
use common::{Expected, checkpoint, load};
use deepseek_model::{
    Config, Rounding,
    engram::{NgramHasher, TokenMap},
    round_groups,
    tokenizer::Tokenizer,
};
use proptest::prelude::*;

fn check_rounding(expected: &Expected) {
    let input = expected.f32s("qvec.in");
    for (name, format) in [
        ("mxfp8", Rounding::MxFp8),
        ("mxfp4", Rounding::MxFp4),
        ("nvfp4", Rounding::NvFp4),
    ] {
        let mut got = input.clone();
        round_groups(&mut got, format);
        let want = expected.f32s(&format!("qvec.{name}"));
        let bits = |xs: &[f32]| xs.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&got), bits(&want), "{name}");
    }
}

/// Token map and table rows, exactly.
fn check_engram(name: &str, expected: &Expected) {
    let dir = checkpoint(name);
    let config = Config::load(&dir).unwrap();
    let Some(engram) = &config.engram else { return };
    let map = TokenMap::from_tokenizer(&Tokenizer::load(&dir).unwrap(), engram).unwrap();
    assert_eq!(map.as_slice(), expected.ids("engram.token_map"));
    let hasher = NgramHasher::new(engram, &map).unwrap();
    for (slot, layer) in engram.layers.iter().enumerate() {
        let mut rows = Vec::new();
        hasher
            .table_rows(slot, &expected.ids("tokens"), &[], &mut rows)
            .unwrap();
        let want = expected
            .tensor(&format!("engram.hash.{layer}"))
            .to_dtype(DType::I64)
            .unwrap();
        assert_eq!(
            rows,
            want.flatten_all().unwrap().to_vec1::<i64>().unwrap(),
            "layer {layer}"
        );
    }
}

fn check(name: &str) {
    let expected = Expected::load(name);
    let plain = load(name, false);
    check_off(&plain, &expected, TIGHT);
    check_policies(&plain, &expected, TIGHT);
    check_quantised(&load(name, true), &expected, TIGHT);
    check_rounding(&expected);
    check_engram(name, &expected);
    expected.assert_all_used();
}

#[test]
fn bf16_checkpoint_matches_the_reference() {
    check("bf16-s1");
}

#[test]
fn fp4_checkpoint_matches_the_reference() {
    check("fp4-s1");
}

#[test]
fn engram_checkpoint_matches_the_reference() {
    check("engram-s1");
}

/// The demo model: logits of the last row, and the greedy ids of all modes.
#[test]
fn demo_checkpoint_matches_the_reference() {
    check_demo(|round_cache| load("v41-demo", round_cache), 1e-3);
}

/// Chunk sizes that add up to `total`.
fn chunkings(total: usize) -> impl Strategy<Value = Vec<usize>> {
    prop::collection::btree_set(1..total, 0..12).prop_map(move |cuts| {
        let mut ends: Vec<_> = cuts.into_iter().collect();
        ends.push(total);
        ends.iter()
            .scan(0, |start, end| Some(end - std::mem::replace(start, *end)))
            .collect()
    })
}

/// Without cache rounding `PromptTail` and `Exact` depend on how a prompt is cut by summation order
/// only; the reference has one value each.
#[test]
fn no_chunking_changes_prompt_tail_or_exact() {
    for name in common::FIXTURES {
        let (model, expected) = (load(name, false), Expected::load(name));
        check_chunking(&model, &expected, &[1; 80], TIGHT);
        for (_, chunks) in CHUNKINGS {
            check_chunking(&model, &expected, chunks, TIGHT);
        }
    }
    let (model, expected) = (load("engram-s1", false), Expected::load("engram-s1"));
    proptest!(ProptestConfig::with_cases(24), |(chunks in chunkings(80))| {
        check_chunking(&model, &expected, &chunks, TIGHT);
    });
}
