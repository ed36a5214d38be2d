//! Where one step ends and the next begins: what is in the window's slots, and who reads it.
//!
//! The fixture model has window 8, nine layers and the cut at layer 5.

mod common;

use std::sync::LazyLock;

use common::{Expected, Lone, difference, flat, load};
use deepseek_model::{LogitRows, Model, ReplayPolicy, SequenceOptions};

const W: usize = 8;
const CUT: usize = 5;
const LAYERS: usize = 9;
const TIGHT: f32 = 1e-4;

static MODEL: LazyLock<Model> = LazyLock::new(|| load("engram-s1", false));
static TOKENS: LazyLock<Vec<u32>> = LazyLock::new(|| Expected::load("engram-s1").ids("tokens"));

/// A sequence in a cache that was full of NaN before.
fn new(policy: ReplayPolicy, prompt_len: usize) -> Lone<'static> {
    let mut run = Lone::new(&MODEL, policy, prompt_len);
    run.cache.remove(run.id).unwrap();
    run.cache.fill(f32::NAN).unwrap();
    let prompt = SequenceOptions {
        prompt_len,
        keeps_rows: false,
    };
    run.id = run.cache.add(prompt).unwrap();
    run
}

/// Window KV of every layer, oldest row first.
fn windows(run: &Lone<'_>) -> Vec<Vec<f32>> {
    let window = |layer| flat(&run.cache.window_kv(run.id, layer).unwrap());
    (0..LAYERS).map(window).collect()
}

/// BR-06: the window that decode has rolled out holds other positions than it should, or holds them
/// in other slots. From decode step `W` on no row of the prompt is left in it. Window KV of layers up
/// to the cut depends on tokens and positions alone, so under every policy it is that of `Off` to the
/// bit; under `Exact` it is `Off`'s in all layers, up to summation order. And each step moves every
/// window by one row, the others being untouched, to the bit.
#[test]
fn br_06_the_window_rolls_as_without_replay() {
    for prompt_len in [7, 8, 9, 15, 16, 17, 23, 24, 25] {
        let rolled = |policy| -> Vec<Vec<Vec<f32>>> {
            let mut run = new(policy, prompt_len);
            run.prefill(&TOKENS[..prompt_len], &[prompt_len]);
            let mut after = Vec::new();
            for at in prompt_len..prompt_len + W + 4 {
                run.step(&TOKENS[at..=at], LogitRows::Last);
                after.push(windows(&run));
            }
            after.split_off(W - 1)
        };
        let off = rolled(ReplayPolicy::Off);
        let width = off[0][0].len() / W;
        for policy in ReplayPolicy::ALL {
            let got = rolled(policy);
            for (step, (got, off)) in got.iter().zip(&off).enumerate() {
                let what = |layer| {
                    let step = W + step;
                    format!("{policy}, prompt {prompt_len}, decode step {step}, layer {layer}")
                };
                for layer in 0..LAYERS {
                    let d = difference(&got[layer], &off[layer]);
                    assert!(d.is_finite(), "{}", what(layer));
                    let allowed = match policy {
                        _ if layer <= CUT => 0.0,
                        ReplayPolicy::Exact => TIGHT,
                        _ => continue,
                    };
                    assert!(d <= allowed, "{}: {d}", what(layer));
                }
            }
            for (before, after) in got.iter().zip(&got[1..]) {
                for (layer, (before, after)) in before.iter().zip(after).enumerate() {
                    let kept = &after[..(W - 1) * width];
                    assert_eq!(kept, &before[width..], "{policy}, layer {layer}");
                    let newest = &after[(W - 1) * width..];
                    assert_ne!(newest, &before[(W - 1) * width..], "{policy}, {layer}");
                }
            }
        }
    }
}

/// BR-08: a short tail is taken for a fresh window. After a first chunk of which rows were dropped,
/// a last chunk of at most a window drops nothing: run by replay it gives the logits of the plain
/// path, which decode rows take, to the bit, and the cache has the length it should have.
#[test]
fn br_08_a_short_tail_reads_the_chunks_before_it() {
    for (first, tail) in [(12, 4), (12, 5), (16, 8), (9, 1), (30, 7)] {
        let (what, end) = (format!("{first} + {tail}"), first + tail);
        let mut replay = new(ReplayPolicy::StepTail, end);
        let by_replay = replay.prefill(&TOKENS[..end], &[first, tail]);

        let mut plain = new(ReplayPolicy::StepTail, first);
        plain.prefill(&TOKENS[..first], &[first]);
        let by_plain = plain.step(&TOKENS[first..end], LogitRows::Last);
        assert_eq!(by_replay, by_plain, "{what}");
        assert_eq!(windows(&replay), windows(&plain), "{what}");

        // Rows were dropped, or there would be nothing to take for a fresh window.
        let off = new(ReplayPolicy::Off, end).prefill(&TOKENS[..end], &[first, tail]);
        let d = difference(&by_replay, &off);
        assert!(
            d > 1e-3,
            "{what}: off by {d} only, this test could not fail"
        );

        replay.step(&TOKENS[end..=end], LogitRows::Last);
        assert_eq!(replay.cache.len(replay.id).unwrap(), end + 1);
        let window = replay.cache.window_kv(replay.id, LAYERS - 1).unwrap();
        assert_eq!(window.dims(), [W, 64]);
    }
}

/// With cache rounding, other steps over the same tokens may give other logits: a sum in another
/// order differs in its last bit, and that flips a rounding bin now and then. The same steps give
/// the same bits.
#[test]
fn the_same_steps_give_the_same_bits_with_cache_rounding() {
    let model = load("engram-s1", true);
    for policy in ReplayPolicy::ALL {
        for chunks in [&[40][..], &[25, 1, 14], &[8; 5]] {
            let run = || {
                let mut run = Lone::new(&model, policy, 40);
                let last = run.prefill(&TOKENS[..40], chunks);
                run.generate(last, 6)
            };
            assert_eq!(run(), run(), "{policy}, {chunks:?}");
        }
    }
}
