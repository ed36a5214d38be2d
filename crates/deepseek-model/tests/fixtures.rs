//! Every tensor of the fixtures' `expected.safetensors`, computed by an independent f32 reference.

mod common;

use std::{collections::BTreeMap, sync::Mutex};

use candle_core::{DType, Tensor};
use common::{Expected, Lone, assert_close, checkpoint, difference, flat, load};
use deepseek_model::{
    Config, LogitRows, Model, ReplayPolicy, Rounding, SequenceOptions, StepRequest,
    engram::{NgramHasher, TokenMap},
    round_groups,
    tokenizer::Tokenizer,
};
use proptest::prelude::*;

const CHUNKINGS: [(&str, &[usize]); 3] = [
    ("one", &[80]),
    ("multi", &[25, 1, 30, 11, 4, 2, 7]),
    ("edge", &[23, 8, 38, 11]),
];

/// The reference's names for the policies; its `exact` keeps a flat halo, its `tapered` ours.
const POLICIES: [(&str, ReplayPolicy); 4] = [
    ("off", ReplayPolicy::Off),
    ("bounded", ReplayPolicy::StepTail),
    ("exact", ReplayPolicy::Exact),
    ("tapered", ReplayPolicy::Exact),
];

/// Two f32 implementations of this size agree to 2e-5; a wrong handling of the replay mask differs
/// by 1e-2 at least.
const TIGHT: f32 = 1e-4;

fn keeping(model: &Model, prompt_len: usize) -> Lone<'_> {
    Lone::with(
        model,
        ReplayPolicy::Off,
        SequenceOptions {
            prompt_len,
            keeps_rows: true,
        },
    )
}

/// Logits of all rows, caches and intermediate tensors of one chunk without replay.
fn check_off(model: &Model, expected: &Expected) {
    let tokens = expected.ids("tokens");
    let mut run = keeping(model, tokens.len());
    let trace = Mutex::new(BTreeMap::<String, Tensor>::new());
    let note = |name: &str, tensor: &Tensor| {
        trace.lock().unwrap().insert(name.into(), tensor.clone());
    };
    let requests = [StepRequest {
        sequence: run.id,
        tokens: &tokens,
        logits: LogitRows::All,
    }];
    let output = model
        .forward_observed(&requests, &mut run.cache, Some(&note))
        .unwrap();
    assert_close(
        "off",
        &flat(&output.logits),
        &expected.f32s("plain.off.logits"),
        TIGHT,
    );
    for source in [2, 5] {
        let (entries, keys) = run.cache.compressed(run.id, source).unwrap();
        assert_close(
            "entries",
            &flat(&entries),
            &expected.f32s(&format!("plain.comp.{source}")),
            TIGHT,
        );
        assert_close(
            "index keys",
            &flat(&keys),
            &expected.f32s(&format!("plain.index.{source}")),
            TIGHT,
        );
    }
    let trace = trace.into_inner().unwrap();
    let prefix = "plain.trace.";
    for name in expected
        .names()
        .iter()
        .filter_map(|name| name.strip_prefix(prefix))
    {
        let (got, want) = (&trace[name], expected.tensor(&format!("{prefix}{name}")));
        if name.ends_with(".chosen") {
            assert_eq!(
                chosen_mask(got, want.dim(1).unwrap()),
                want.to_vec2::<u8>().unwrap(),
                "{name}"
            );
        } else {
            assert_close(name, &flat(got), &flat(want), TIGHT);
        }
    }
    let short = expected.ids("short_tokens");
    let logits = keeping(model, short.len()).step(&short, LogitRows::All);
    assert_close(
        "short",
        &logits,
        &expected.f32s("plain.short.logits"),
        TIGHT,
    );
}

/// Lists of entries `[rows, width]` as a mask `[rows, entries]`.
fn chosen_mask(lists: &Tensor, entries: usize) -> Vec<Vec<u8>> {
    let lists: Vec<Vec<u32>> = lists.to_vec2().unwrap();
    let mask = |list: Vec<u32>| {
        let mut row = vec![0; entries];
        list.into_iter()
            .filter(|e| *e != u32::MAX)
            .for_each(|e| row[e as usize] += 1);
        row
    };
    lists.into_iter().map(mask).collect()
}

/// Prefill and 16 greedy steps under every policy and chunking.
fn check_policies(model: &Model, expected: &Expected) {
    let tokens = expected.ids("tokens");
    for (policy_name, policy) in POLICIES {
        for (label, chunks) in CHUNKINGS {
            let what = format!("plain.{policy_name}.{label}");
            let mut run = Lone::new(model, policy, tokens.len());
            let last = run.prefill(&tokens, chunks);
            assert_close(&what, &last, &expected.f32s(&format!("{what}.last")), TIGHT);
            for layer in 5..9 {
                let name = format!("plain.kv.{policy_name}.{label}.{layer}");
                if expected.names().contains(&name) {
                    let kv = flat(&run.cache.window_kv(run.id, layer).unwrap());
                    assert_close(&name, &kv, &expected.f32s(&name), TIGHT);
                }
            }
            let (ids, steps) = run.generate(last, 16);
            assert_eq!(ids, expected.ids(&format!("{what}.ids")), "{what}");
            let name = format!("{what}.steps");
            if expected.names().contains(&name) {
                assert_close(&name, &steps, &expected.f32s(&name), TIGHT);
            }
        }
    }
}

/// Ways to cut the prompt whose sums run in different orders, so that each is another draw of the
/// last bits.
const DRAWS: [&[usize]; 4] = [&[80], &[20; 4], &[5; 16], &[1; 80]];

/// Rows `[row, width]` that no run has reproduced yet.
///
/// With cache rounding a difference in the last bit can flip a rounding bin, and from there a choice
/// of entries or experts: about one flip in a run of this size, in the reference as in any other f32
/// implementation. So each row must be reproduced to within its spread (how far the reference itself
/// moves under last-bit noise on the weights) by one of several runs that round differently. A row
/// whose spread is infinite follows a changed id, and nothing can be said of it.
struct Unmatched<'a> {
    want: &'a [f32],
    spread: &'a [f32],
    rows: Vec<usize>,
}

impl<'a> Unmatched<'a> {
    fn new(want: &'a [f32], spread: &'a [f32]) -> Self {
        Self {
            want,
            spread,
            rows: (0..spread.len())
                .filter(|row| spread[*row].is_finite())
                .collect(),
        }
    }

    fn try_run(&mut self, got: &[f32]) {
        let width = self.want.len() / self.spread.len();
        self.rows.retain(|&row| {
            let part = row * width..(row + 1) * width;
            difference(&got[part.clone()], &self.want[part]) > TIGHT + 3.0 * self.spread[row]
        });
    }

    #[track_caller]
    fn assert_none(&self, what: &str) {
        assert!(
            self.rows.is_empty(),
            "{what}: no run reproduces rows {:?}",
            self.rows
        );
    }
}

fn check_quantised(model: &Model, expected: &Expected) {
    let tokens = expected.ids("tokens");
    let (want, spread) = (
        expected.f32s("quant.off.logits"),
        expected.f32s("quant.spread.off.logits"),
    );
    let mut unmatched = Unmatched::new(&want, &spread);
    for chunks in DRAWS {
        let mut run = keeping(model, tokens.len());
        let (mut start, mut logits) = (0, Vec::new());
        for n in chunks {
            logits.extend(run.step(&tokens[start..start + n], LogitRows::All));
            start += n;
        }
        unmatched.try_run(&logits);
    }
    unmatched.assert_none("quant.off.logits");
    let short = expected.ids("short_tokens");
    let logits = keeping(model, short.len()).step(&short, LogitRows::All);
    assert_close(
        "quant.short",
        &logits,
        &expected.f32s("quant.short.logits"),
        TIGHT,
    );
    for (policy_name, policy) in POLICIES {
        for (label, chunks) in CHUNKINGS {
            check_quantised_policy(model, expected, (policy_name, policy), (label, chunks));
        }
    }
}

/// 16 greedy steps with cache rounding, and where the reference has them, their logits.
fn check_quantised_policy(
    model: &Model,
    expected: &Expected,
    (policy_name, policy): (&str, ReplayPolicy),
    (label, chunks): (&str, &[usize]),
) {
    let what = format!("quant.{policy_name}.{label}");
    let tokens = expected.ids("tokens");
    let last = expected.f32s(&format!("{what}.last"));
    let ids = expected.ids(&format!("{what}.ids"));
    let spread = expected.f32s(&format!("quant.spread.{policy_name}.{label}"));
    let has_steps = expected.names().contains(&format!("{what}.steps"));
    let steps = if has_steps {
        expected.f32s(&format!("{what}.steps"))
    } else {
        last.clone()
    };
    let mut unmatched = Unmatched::new(&steps, if has_steps { &spread } else { &spread[..1] });
    let sure = spread.iter().take_while(|s| s.is_finite()).count();
    let mut same_ids = false;
    // Other chunkings are other draws of the same value, except under `StepTail`, where one chunk
    // is `PromptTail` in any chunking and several chunks are a value of their own.
    let draws: Vec<(ReplayPolicy, &[usize])> = match (policy, label) {
        (ReplayPolicy::StepTail, "one") => {
            DRAWS.map(|draw| (ReplayPolicy::PromptTail, draw)).to_vec()
        }
        (ReplayPolicy::StepTail, _) => Vec::new(),
        _ => DRAWS.map(|draw| (policy, draw)).to_vec(),
    };
    for (policy, chunks) in std::iter::once((policy, chunks)).chain(draws) {
        let mut run = Lone::new(model, policy, tokens.len());
        let first = run.prefill(&tokens, chunks);
        let (got_ids, got) = run.generate(first, 16);
        same_ids |= got_ids[..sure] == ids[..sure];
        unmatched.try_run(&got[..steps.len()]);
    }
    assert!(same_ids, "{what}: no run gives the reference's ids");
    unmatched.assert_none(&what);
}

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
    check_off(&plain, &expected);
    check_policies(&plain, &expected);
    check_quantised(&load(name, true), &expected);
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
    let expected = Expected::load("v41-demo");
    let tokens = expected.ids("tokens");
    let modes = [
        ("off", ReplayPolicy::Off),
        ("bounded", ReplayPolicy::PromptTail),
        ("exact", ReplayPolicy::Exact),
    ];
    for (set, round_cache) in [("plain", false), ("quant", true)] {
        let model = load("v41-demo", round_cache);
        for (mode, policy) in modes {
            let what = format!("{set}.{mode}");
            let mut run = Lone::new(&model, policy, tokens.len());
            let last = run.prefill(&tokens, &[tokens.len()]);
            let want = expected.f32s(&format!("{what}.last"));
            // A rounding bin that flips in the cache moves a logit by some hundredths.
            assert_close(&what, &last, &want, if round_cache { 0.2 } else { 1e-3 });
            let (ids, _) = run.generate(last, 48);
            let want = expected.ids(&format!("{what}.ids"));
            assert_eq!(ids, want, "{what}");
        }
    }
    expected.assert_all_used();
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

/// Runs a prompt in chunks and 16 greedy steps; the logits of all 17 rows.
fn logits_of(model: &Model, policy: ReplayPolicy, tokens: &[u32], chunks: &[usize]) -> Vec<f32> {
    let mut run = Lone::new(model, policy, tokens.len());
    let last = run.prefill(tokens, chunks);
    run.generate(last, 16).1
}

fn check_chunking(model: &Model, expected: &Expected, chunks: &[usize]) {
    let tokens = expected.ids("tokens");
    for (policy, name) in [
        (ReplayPolicy::PromptTail, "plain.bounded.one"),
        (ReplayPolicy::Exact, "plain.off.one"),
    ] {
        let logits = logits_of(model, policy, &tokens, chunks);
        assert_close(
            &format!("{policy} {chunks:?}"),
            &logits,
            &expected.f32s(&format!("{name}.steps")),
            TIGHT,
        );
    }
}

/// `PromptTail` and `Exact` do not depend on how a prompt is cut; the reference has one value each.
#[test]
fn no_chunking_changes_prompt_tail_or_exact() {
    for name in common::FIXTURES {
        let (model, expected) = (load(name, false), Expected::load(name));
        check_chunking(&model, &expected, &[1; 80]);
        for (_, chunks) in CHUNKINGS {
            check_chunking(&model, &expected, chunks);
        }
    }
    let (model, expected) = (load("engram-s1", false), Expected::load("engram-s1"));
    proptest!(ProptestConfig::with_cases(24), |(chunks in chunkings(80))| {
        check_chunking(&model, &expected, &chunks);
    });
}
