//! Prompts that find the entries of their beginning in the cache. A page holds 128 tokens where nothing
//! else is said, the window 8.

mod common;

use std::num::NonZeroU32;

use common::{assert_close, flat, load};
use deepseek_model::{
    CacheOptions, CachedPrefix, KvCache, LogitRows, Model, PrefixOptions, ReplayPolicy, SequenceId,
    StepRequest,
};

const W: usize = 8;
const PAGE: usize = 128;

fn cache(model: &Model, policy: ReplayPolicy, max_tokens: usize) -> KvCache {
    paged(model, policy, max_tokens, PAGE)
}

fn paged(model: &Model, policy: ReplayPolicy, max_tokens: usize, page_tokens: usize) -> KvCache {
    let options = CacheOptions {
        max_sequences: 3,
        max_tokens,
        page_tokens,
        policy,
        sampled_rows: NonZeroU32::MIN,
    };
    model.new_cache(options).unwrap()
}

fn salted(salt: u64) -> PrefixOptions {
    PrefixOptions {
        salt,
        ..PrefixOptions::default()
    }
}

/// A text of its own for each seed.
fn text(seed: u32, len: usize) -> Vec<u32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        3 + (state >> 8) % 250
    };
    (0..len).map(|_| next()).collect()
}

/// Computes the rest of a prompt in chunks, then decode steps with given tokens: the logits of every row
/// that is read.
fn run(
    model: &Model,
    cache: &mut KvCache,
    sequence: SequenceId,
    (prompt, after): (&[u32], &[u32]),
    chunk: usize,
) -> Vec<Vec<f32>> {
    let mut read = Vec::new();
    let mut step = |cache: &mut KvCache, tokens: &[u32], logits| {
        let request = StepRequest {
            sequence,
            tokens,
            logits,
        };
        let output = model.forward(&[request], cache).unwrap();
        if output.logits.dim(0).unwrap() > 0 {
            read.push(flat(&output.logits));
        }
    };
    let start = cache.len(sequence).unwrap();
    let chunks = prompt[start..].chunks(chunk);
    let last = chunks.len() - 1;
    for (index, tokens) in chunks.enumerate() {
        let logits = if index == last {
            LogitRows::Last
        } else {
            LogitRows::None
        };
        step(cache, tokens, logits);
    }
    for token in after {
        step(cache, &[*token], LogitRows::Last);
    }
    read
}

fn add(cache: &mut KvCache, prompt: &[u32]) -> (SequenceId, CachedPrefix) {
    cache
        .add_prompt(prompt, false, PrefixOptions::default())
        .unwrap()
}

/// The same run in a cache that holds nothing else.
fn cold(model: &Model, policy: ReplayPolicy, (prompt, after): (&[u32], &[u32])) -> Vec<Vec<f32>> {
    let mut cache = cache(model, policy, 1024);
    let (sequence, found) = add(&mut cache, prompt);
    assert_eq!(found, CachedPrefix::default());
    run(model, &mut cache, sequence, (prompt, after), prompt.len())
}

/// Under the policies that equal the reference, a prompt that finds its beginning gives what it gives
/// alone, whatever the slot's window rings hold, in any chunks, and in decode steps after it. The rows
/// that are computed again reach as far down as the windows of all layers do that run there.
#[test]
fn a_hit_gives_what_a_cold_run_gives() {
    for name in ["bf16-s1", "engram-s1"] {
        let model = load(name, false);
        let layers = model.config().layers.len();
        let cut = model.config().replay_layers().unwrap().first() as usize;
        for policy in [ReplayPolicy::Off, ReplayPolicy::Exact] {
            let shared = text(1, 3 * PAGE);
            for (suffix, chunk) in [(1, 500), (W - 1, 1), (W, 13), (W + 1, 500), (60, 7)] {
                let prompt = [&shared[..], &text(2, suffix)].concat();
                let after = text(3, W + 3);
                let want = cold(&model, policy, (&prompt, &after));
                let mut cache = cache(&model, policy, 2048);
                let (first, _) = add(&mut cache, &shared);
                run(&model, &mut cache, first, (&shared, &[]), 100);
                // Rings of no use to anyone else.
                poison_window(&model, &mut cache, policy);
                let (second, found) = add(&mut cache, &prompt);
                assert_eq!(found.tokens, 3 * PAGE);
                let needed = if policy == ReplayPolicy::Off {
                    3 * PAGE
                } else {
                    // The one sampled row, the windows of the layers behind the cut, and its own.
                    (prompt.len() - 1 - (layers - cut - 1) * (W - 1) - (W - 1)).min(3 * PAGE)
                };
                let deep = if policy == ReplayPolicy::Off {
                    layers
                } else {
                    cut
                };
                assert_eq!(found.start, needed - deep * (W - 1));
                let got = run(&model, &mut cache, second, (&prompt, &after), chunk);
                assert_eq!(got.len(), want.len());
                for (step, (got, want)) in got.iter().zip(&want).enumerate() {
                    let what = format!("{name} {policy} suffix {suffix} chunk {chunk} step {step}");
                    assert_close(&what, got, want, 1e-4);
                }
            }
        }
    }
}

/// Fills the window rings of all free slots with rows of another text, in a sequence each.
fn poison_window(model: &Model, cache: &mut KvCache, policy: ReplayPolicy) {
    let other = text(99, 2 * W);
    let mut added = Vec::new();
    while let Ok((sequence, _)) = cache.add_prompt(&other, false, salted(7)) {
        let tokens = other.as_slice();
        let logits = LogitRows::Last;
        let request = StepRequest {
            sequence,
            tokens,
            logits,
        };
        model.forward(&[request], cache).unwrap();
        added.push(sequence);
    }
    assert!(!added.is_empty(), "{policy}: a slot is free");
    for sequence in added {
        cache.remove(sequence).unwrap();
    }
}

/// Entries that were found stay as they are, byte for byte, and those behind them are the new text's.
#[test]
fn shared_entries_are_not_written() {
    let model = load("bf16-s1", true);
    for policy in ReplayPolicy::ALL {
        let shared = text(1, 2 * PAGE);
        let mut cache = cache(&model, policy, 2048);
        let (first, _) = add(&mut cache, &shared);
        run(&model, &mut cache, first, (&shared, &[]), 64);
        let sources: Vec<usize> = (0..model.config().layers.len())
            .filter(|layer| cache.compressed(first, *layer).is_ok())
            .collect();
        assert!(!sources.is_empty());
        let entries = |cache: &KvCache, id, layer| {
            let (kv, keys) = cache.compressed(id, layer).unwrap();
            (flat(&kv), flat(&keys))
        };
        let before: Vec<_> = sources.iter().map(|&l| entries(&cache, first, l)).collect();
        let prompt = [&shared[..], &text(2, 40)].concat();
        let (second, found) = add(&mut cache, &prompt);
        assert_eq!(found.tokens, 2 * PAGE, "{policy}");
        run(&model, &mut cache, second, (&prompt, &text(3, 5)), 9);
        for (layer, (kv, keys)) in sources.iter().zip(&before) {
            let (now_kv, now_keys) = entries(&cache, first, *layer);
            assert!(
                *kv == now_kv && *keys == now_keys,
                "{policy}, layer {layer}"
            );
            let (all_kv, all_keys) = entries(&cache, second, *layer);
            assert!(all_kv.starts_with(kv) && all_keys.starts_with(keys));
        }
    }
}

/// Under the policies that only come close, a window's rows are computed again, and nothing below them
/// is read: chunks do not matter, nor what the slot held before (BR-11, BR-12).
#[test]
fn a_window_is_rebuilt_without_what_was_below_it() {
    let model = load("engram-s1", false);
    let policy = ReplayPolicy::PromptTail;
    let shared = text(1, 2 * PAGE);
    let prompt = [&shared[..], &text(2, 21)].concat();
    let after = text(3, W + 2);
    let mut results = Vec::new();
    for (chunk, poisoned) in [(500, false), (1, true), (13, false), (13, true)] {
        let mut cache = cache(&model, policy, 2048);
        let (first, _) = add(&mut cache, &shared);
        run(&model, &mut cache, first, (&shared, &[]), 100);
        if poisoned {
            poison_window(&model, &mut cache, policy);
        }
        let (second, found) = add(&mut cache, &prompt);
        let expected = CachedPrefix {
            tokens: 2 * PAGE,
            start: 2 * PAGE - W,
        };
        assert_eq!(found, expected);
        results.push(run(&model, &mut cache, second, (&prompt, &after), chunk));
    }
    for got in &results[1..] {
        for (step, (got, want)) in got.iter().zip(&results[0]).enumerate() {
            assert_close(&format!("step {step}"), got, want, 1e-4);
        }
    }
    // Close to a run that found nothing, and not the same.
    let cold = cold(&model, policy, (&prompt, &after));
    let difference = |a: &[f32], b: &[f32]| {
        let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
        differences.fold(0.0, f32::max)
    };
    assert!(difference(&results[0][0], &cold[0]) > 1e-4);
}

/// What is found: whole pages, but never the last token; pages of other salts and of prompts that
/// read every row never. A hit within the reach of what is computed again is not adopted (BR-13).
#[test]
fn what_is_found() {
    let model = load("bf16-s1", false);
    let mut cache = cache(&model, ReplayPolicy::PromptTail, 2048);
    let known = text(1, 2 * PAGE + 5);
    let (first, _) = add(&mut cache, &known);
    run(&model, &mut cache, first, (&known, &[]), 90);
    let mut found = |prompt: &[u32], keeps_rows, salt| {
        let (id, found) = cache.add_prompt(prompt, keeps_rows, salted(salt)).unwrap();
        cache.remove(id).unwrap();
        found.tokens
    };
    assert_eq!(found(&known, false, 0), 2 * PAGE);
    assert_eq!(found(&known[..=2 * PAGE], false, 0), 2 * PAGE);
    assert_eq!(
        found(&known[..2 * PAGE], false, 0),
        PAGE,
        "the last token is computed"
    );
    assert_eq!(found(&known[..PAGE], false, 0), 0);
    assert_eq!(found(&known, true, 0), 0);
    assert_eq!(found(&known, false, 1), 0);
    let mut other = known.clone();
    other[PAGE + 3] ^= 1;
    assert_eq!(found(&other, false, 0), PAGE);
    other[3] ^= 1;
    assert_eq!(found(&other, false, 0), 0);

    // Through nine layers of a window of 8, 63 rows are computed again; of 32, more than a page has.
    let mut deep = model.config().clone();
    deep.sliding_window = 32;
    let model = Model::random(deep, deepseek_model::ModelOptions::default(), 1).unwrap();
    let mut cache = self::cache(&model, ReplayPolicy::Off, 2048);
    let (first, _) = add(&mut cache, &known);
    run(&model, &mut cache, first, (&known, &[]), 90);
    let (_, found) = add(&mut cache, &known[..=PAGE]);
    assert_eq!(found, CachedPrefix::default());
}

/// Pages of a removed sequence are found until their room is needed; the longest unused go first, and
/// of a text its end before its beginning. None is lost.
#[test]
fn pages_are_kept_until_their_room_is_needed() {
    let model = load("bf16-s1", false);
    // Eight pages and one for each sequence but the first.
    let mut cache = cache(&model, ReplayPolicy::PromptTail, 8 * PAGE);
    let pages = cache.free_pages();
    let compute = |cache: &mut KvCache, seed: u32, len: usize| {
        let prompt = text(seed, len);
        let (id, found) = add(cache, &prompt);
        run(&model, cache, id, (&prompt, &[]), 200);
        cache.remove(id).unwrap();
        assert_eq!(cache.free_pages(), pages, "every page comes back");
        found.tokens
    };
    assert_eq!(compute(&mut cache, 1, 4 * PAGE + 1), 0);
    assert_eq!(compute(&mut cache, 2, 4 * PAGE + 1), 0);
    assert_eq!(compute(&mut cache, 1, 4 * PAGE + 1), 4 * PAGE);
    // Takes the two pages that were never filled, then from the end of text 2.
    assert_eq!(compute(&mut cache, 3, 4 * PAGE), 0);
    assert_eq!(compute(&mut cache, 1, 4 * PAGE + 1), 4 * PAGE);
    let left = compute(&mut cache, 2, 4 * PAGE + 1);
    assert!(left > 0 && left < 4 * PAGE, "{left}");
}

/// Two sequences of the same text at once: the second finds what the first has computed so far, and
/// whoever is second to fill a page keeps its own.
#[test]
fn the_same_text_twice_at_once() {
    let model = load("bf16-s1", false);
    let policy = ReplayPolicy::Exact;
    let prompt = text(1, 3 * PAGE + 9);
    let after = text(2, 4);
    let want = cold(&model, policy, (&prompt, &after));
    let mut cache = cache(&model, policy, 2048);
    let pages = cache.free_pages();
    let (a, none) = add(&mut cache, &prompt);
    let (b, too) = add(&mut cache, &prompt);
    assert_eq!([none, too], [CachedPrefix::default(); 2]);
    let got_b = run(&model, &mut cache, b, (&prompt, &after), 70);
    let got_a = run(&model, &mut cache, a, (&prompt, &after), 50);
    cache.remove(b).unwrap();
    let (c, found) = add(&mut cache, &prompt);
    assert_eq!(found.tokens, 3 * PAGE);
    let got_c = run(&model, &mut cache, c, (&prompt, &after), 50);
    for got in [got_a, got_b, got_c] {
        for (got, want) in got.iter().zip(&want) {
            assert_close("logits", got, want, 1e-4);
        }
    }
    cache.remove(a).unwrap();
    cache.remove(c).unwrap();
    assert_eq!(cache.free_pages(), pages);
}

/// Hits around the window, in the smallest pages there can be, and what follows them: those of a window
/// or less are not adopted, shared entries stay as they are, and nothing depends on the chunks (BR-13).
#[test]
fn hits_around_the_window() {
    let model = load("bf16-s1", false);
    let policy = ReplayPolicy::PromptTail;
    let known = text(1, 3 * W);
    for same in [0, 1, W - 1, W, W + 1, W + 2, 2 * W, 2 * W + 1] {
        for suffix in 1..=W + 1 {
            let prompt = [&known[..same], &text(5, suffix)].concat();
            let mut results = Vec::new();
            for chunk in [1, 4, 100] {
                // The cut and three sources before it: ratio 2, so that a page has 2 tokens.
                let mut cache = paged(&model, policy, 256, 1);
                assert_eq!(cache.page_tokens(), 2);
                cache.fill(f32::NAN).unwrap();
                let (first, _) = add(&mut cache, &known);
                run(&model, &mut cache, first, (&known, &[]), 100);
                let before = flat(&cache.compressed(first, 5).unwrap().0);
                let (second, found) = add(&mut cache, &prompt);
                let hit = same / 2 * 2;
                let hit = if hit > W { hit } else { 0 };
                assert_eq!((found.tokens, found.start), (hit, hit.saturating_sub(W)));
                let after = text(6, W + 1);
                results.push(run(&model, &mut cache, second, (&prompt, &after), chunk));
                let now = flat(&cache.compressed(first, 5).unwrap().0);
                assert!(before == now, "shared {same}, suffix {suffix}");
            }
            for got in &results[1..] {
                for (got, want) in got.iter().zip(&results[0]) {
                    assert_close(&format!("shared {same}, suffix {suffix}"), got, want, 1e-4);
                }
            }
        }
    }
}

/// A text whose beginning is known, but too little of it to be worth taking over: its own pages become
/// known all the same, where they hold the same as those of others.
#[test]
fn a_text_whose_beginning_is_not_adopted_becomes_known() {
    let model = load("bf16-s1", false);
    for policy in [ReplayPolicy::Off, ReplayPolicy::Exact] {
        let mut cache = paged(&model, policy, 1024, 8);
        let pages = cache.free_pages();
        let first = text(1, 20);
        let (a, _) = add(&mut cache, &first);
        run(&model, &mut cache, a, (&first, &[]), 100);
        let longer = [&first[..16], &text(2, 160)].concat();
        let (b, found) = add(&mut cache, &longer);
        assert_eq!(found, CachedPrefix::default());
        let want = run(&model, &mut cache, b, (&longer, &[]), 50);
        // The two pages that both begin with are one of each.
        assert_eq!(cache.free_pages(), pages - 3 - 22 + 2);
        cache.remove(b).unwrap();
        cache.remove(a).unwrap();
        assert_eq!(cache.free_pages(), pages);
        let (c, found) = add(&mut cache, &longer);
        assert_eq!(found.tokens, 168, "{policy}");
        let got = run(&model, &mut cache, c, (&longer, &[]), 50);
        assert_close("logits", &got[0], &want[0], 1e-4);
    }
}

/// Rows before the end of a hit rebuild window KV: what they give is no result, and nobody may read it.
#[test]
fn rows_before_the_end_of_a_hit_cannot_be_read() {
    let model = load("bf16-s1", false);
    let mut cache = cache(&model, ReplayPolicy::Off, 2048);
    let known = text(1, 2 * PAGE);
    let (first, _) = add(&mut cache, &known);
    run(&model, &mut cache, first, (&known, &[]), 100);
    let prompt = [&known[..], &text(2, 4)].concat();
    let (sequence, found) = add(&mut cache, &prompt);
    let mut read = |logits| {
        let request = StepRequest {
            sequence,
            tokens: &prompt[found.start..],
            logits,
        };
        model.forward(&[request], &mut cache)
    };
    let refused = read(LogitRows::Tail(5)).unwrap_err();
    insta::assert_snapshot!(refused, @"step: request 0 reads rows before position 256, which only rebuild window KV behind what was found in the cache");
    assert_eq!(read(LogitRows::Tail(4)).unwrap().logits.dim(0).unwrap(), 4);
}

/// Contexts that nobody computed are of no text.
#[test]
fn assumed_and_filled_pages_are_not_found() {
    let model = load("bf16-s1", false);
    let mut cache = cache(&model, ReplayPolicy::PromptTail, 2048);
    let known = text(1, 2 * PAGE);
    let (first, _) = add(&mut cache, &known);
    cache.assume(first, 300 - 44).unwrap();
    let tokens = text(2, PAGE);
    for token in &tokens {
        let request = StepRequest {
            sequence: first,
            tokens: &[*token],
            logits: LogitRows::None,
        };
        model.forward(&[request], &mut cache).unwrap();
    }
    let longer = [&tokens[..], &[5; 9]].concat();
    assert_eq!(add(&mut cache, &longer).1, CachedPrefix::default());

    let (second, _) = add(&mut cache, &known);
    run(&model, &mut cache, second, (&known, &[]), 100);
    cache.remove(second).unwrap();
    cache.fill(f32::NAN).unwrap();
    let longer = [&known[..], &[5; 9]].concat();
    assert_eq!(add(&mut cache, &longer).1, CachedPrefix::default());
}
