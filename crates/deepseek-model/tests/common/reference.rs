//! Checks against what the reference computed, the same on every device.

use std::{collections::BTreeMap, sync::Mutex};

use candle_core::Tensor;
use deepseek_model::{LogitRows, Model, ReplayPolicy, SequenceOptions, StepRequest};

use super::{Expected, Lone, assert_close, flat};

pub const CHUNKINGS: [(&str, &[usize]); 3] = [
    ("one", &[80]),
    ("multi", &[25, 1, 30, 11, 4, 2, 7]),
    ("edge", &[23, 8, 38, 11]),
];

/// The reference's names for the policies; its `exact` keeps a flat halo, its `tapered` ours.
pub const POLICIES: [(&str, ReplayPolicy); 4] = [
    ("off", ReplayPolicy::Off),
    ("bounded", ReplayPolicy::StepTail),
    ("exact", ReplayPolicy::Exact),
    ("tapered", ReplayPolicy::Exact),
];

/// Two f32 implementations of this size agree to 2e-5; a wrong handling of the replay mask differs
/// by 1e-2 at least.
pub const TIGHT: f32 = 1e-4;

pub fn keeping(model: &Model, prompt_len: usize) -> Lone<'_> {
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
pub fn check_off(model: &Model, expected: &Expected, tolerance: f32) {
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
        tolerance,
    );
    for source in [2, 5] {
        let (entries, keys) = run.cache.compressed(run.id, source).unwrap();
        assert_close(
            "entries",
            &flat(&entries),
            &expected.f32s(&format!("plain.comp.{source}")),
            tolerance,
        );
        assert_close(
            "index keys",
            &flat(&keys),
            &expected.f32s(&format!("plain.index.{source}")),
            tolerance,
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
            assert_close(name, &flat(got), &flat(want), tolerance);
        }
    }
    let short = expected.ids("short_tokens");
    let logits = keeping(model, short.len()).step(&short, LogitRows::All);
    assert_close(
        "short",
        &logits,
        &expected.f32s("plain.short.logits"),
        tolerance,
    );
}

/// Lists of entries `[rows, width]` as a mask `[rows, entries]`.
pub fn chosen_mask(lists: &Tensor, entries: usize) -> Vec<Vec<u8>> {
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
pub fn check_policies(model: &Model, expected: &Expected, tolerance: f32) {
    let tokens = expected.ids("tokens");
    for (policy_name, policy) in POLICIES {
        for (label, chunks) in CHUNKINGS {
            let what = format!("plain.{policy_name}.{label}");
            let mut run = Lone::new(model, policy, tokens.len());
            let last = run.prefill(&tokens, chunks);
            assert_close(
                &what,
                &last,
                &expected.f32s(&format!("{what}.last")),
                tolerance,
            );
            for layer in 5..9 {
                let name = format!("plain.kv.{policy_name}.{label}.{layer}");
                if expected.names().contains(&name) {
                    let kv = flat(&run.cache.window_kv(run.id, layer).unwrap());
                    assert_close(&name, &kv, &expected.f32s(&name), tolerance);
                }
            }
            let (ids, steps) = run.generate(last, 16);
            assert_eq!(ids, expected.ids(&format!("{what}.ids")), "{what}");
            let name = format!("{what}.steps");
            if expected.names().contains(&name) {
                assert_close(&name, &steps, &expected.f32s(&name), tolerance);
            }
        }
    }
}

/// Runs a prompt in chunks and 16 greedy steps; the logits of all 17 rows.
pub fn logits_of(
    model: &Model,
    policy: ReplayPolicy,
    tokens: &[u32],
    chunks: &[usize],
) -> Vec<f32> {
    let mut run = Lone::new(model, policy, tokens.len());
    let last = run.prefill(tokens, chunks);
    run.generate(last, 16).1
}

pub fn check_chunking(model: &Model, expected: &Expected, chunks: &[usize], tolerance: f32) {
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
            tolerance,
        );
    }
}

/// The demo model: logits of the last row to `tolerance` (with cache rounding a bin that flips moves
/// a logit by some hundredths), and the greedy ids of all modes.
pub fn check_demo(load: impl Fn(bool) -> Model, tolerance: f32) {
    let expected = Expected::load("v41-demo");
    let tokens = expected.ids("tokens");
    let modes = [
        ("off", ReplayPolicy::Off),
        ("bounded", ReplayPolicy::PromptTail),
        ("exact", ReplayPolicy::Exact),
    ];
    for (set, round_cache) in [("plain", false), ("quant", true)] {
        let model = load(round_cache);
        for (mode, policy) in modes {
            let what = format!("{set}.{mode}");
            let mut run = Lone::new(&model, policy, tokens.len());
            let last = run.prefill(&tokens, &[tokens.len()]);
            let want = expected.f32s(&format!("{what}.last"));
            assert_close(
                &what,
                &last,
                &want,
                if round_cache { 0.2 } else { tolerance },
            );
            let (ids, _) = run.generate(last, 48);
            assert_eq!(ids, expected.ids(&format!("{what}.ids")), "{what}");
        }
    }
    expected.assert_all_used();
}
