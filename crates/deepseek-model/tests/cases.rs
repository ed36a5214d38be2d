//! What went wrong elsewhere, tried here: each test is named after the hazard it pins.
//!
//! The fixture model has window 8, nine layers and the cut at layer 5, so layers 6 to 8 hold window
//! KV of kept rows only. Hazards of graphs, of GPUs and of several ranks have no place on a CPU;
//! those of row selection alone are pinned in `replay-core`, of gathering in `replay-cuda`, of
//! loading (BR-27) in `loader/`, of tokenizers (BR-28) in `tokenizer.rs`, of window slots and short
//! tails (BR-06, BR-08) in `seams.rs`, of prefix hits that rebuild their window (BR-11 to BR-13) in
//! `prefix.rs`, too.

mod common;

use std::{
    fmt::Write,
    num::NonZeroU32,
    sync::{LazyLock, Mutex},
};

use candle_core::Tensor;
use common::{Expected, Lone, assert_close, checkpoint, difference, flat, load};
use deepseek_model::{
    CacheOptions, Config, KvCache, LogitRows, Model, ReplayPolicy, SequenceOptions, StepRequest,
    StepStats,
};

const W: usize = 8;
const CUT: usize = 5;
const TIGHT: f32 = 1e-4;

static MODEL: LazyLock<Model> = LazyLock::new(|| load("engram-s1", false));
static TOKENS: LazyLock<Vec<u32>> = LazyLock::new(|| Expected::load("engram-s1").ids("tokens"));

fn new(policy: ReplayPolicy, prompt_len: usize) -> Lone<'static> {
    Lone::new(&MODEL, policy, prompt_len)
}

/// Prefill in chunks, then decode steps with the tokens that follow; logits of all of them.
fn logits(
    policy: ReplayPolicy,
    prompt_len: usize,
    chunks: &[usize],
    decode: usize,
    fill: f32,
) -> Vec<f32> {
    let mut run = new(policy, prompt_len);
    run.cache.remove(run.id).unwrap();
    run.cache.fill(fill).unwrap();
    run.id = run
        .cache
        .add(SequenceOptions {
            prompt_len,
            keeps_rows: false,
        })
        .unwrap();
    let mut all = run.prefill(&TOKENS[..prompt_len], chunks);
    for i in prompt_len..prompt_len + decode {
        all.extend(run.step(&TOKENS[i..=i], LogitRows::Last));
    }
    all
}

/// One step whose tensor `name` is seen.
fn observe(run: &mut Lone<'_>, tokens: &[u32], name: &str) -> Tensor {
    let seen = Mutex::new(None);
    let note = |n: &str, tensor: &Tensor| {
        if n == name {
            *seen.lock().unwrap() = Some(tensor.clone());
        }
    };
    let requests = [StepRequest {
        sequence: run.id,
        tokens,
        logits: LogitRows::None,
    }];
    run.model
        .forward_observed(&requests, &mut run.cache, Some(&note))
        .unwrap();
    seen.into_inner()
        .unwrap()
        .unwrap_or_else(|| panic!("{name} was not computed"))
}

/// `Σ p · ln(p / q)` of two rows of logits.
fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let log_softmax = |xs: &[f32]| -> Vec<f64> {
        let top = xs.iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b));
        let sum: f64 = xs.iter().map(|x| f64::from(x - top).exp()).sum();
        xs.iter().map(|x| f64::from(x - top) - sum.ln()).collect()
    };
    log_softmax(p)
        .iter()
        .zip(log_softmax(q))
        .map(|(p, q)| p.exp() * (p - q))
        .sum()
}

/// BR-02: a trimmed request reads window KV that its replay layers never wrote. Whatever unwritten
/// slots hold, NaN or a number so large that a masked product would show it, no logit changes.
///
/// BR-12: attention takes a first position and ignores it. Under `PromptTail` that is `p - W`, for 16
/// and 4 rows 12 of 20, and all window KV of the replay layers below it is NaN here.
#[test]
fn br_02_unwritten_window_kv_is_never_read() {
    for policy in ReplayPolicy::ALL {
        for last in [1, 4, 7, 8, 9, 15] {
            let run = |fill| logits(policy, 16 + last, &[16, last], 10, fill);
            let clean = run(0.0);
            assert!(clean.iter().all(|x| x.is_finite()));
            for fill in [f32::NAN, 1e30] {
                assert_eq!(
                    difference(&run(fill), &clean),
                    0.0,
                    "{policy}, last chunk {last}, filled with {fill}"
                );
            }
        }
    }
}

/// BR-03: the cut has window KV of every row, so its kept rows must see what they see without
/// replay; only the layers after it lose the keys of dropped rows.
#[test]
fn br_03_the_cut_attends_to_dropped_rows() {
    let tokens = &TOKENS[..20];
    let kept = |policy, layer: usize| {
        let out = observe(
            &mut new(policy, 20),
            tokens,
            &format!("layers.{layer}.attn_out"),
        );
        let rows = out.dim(0).unwrap();
        flat(&out.narrow(0, rows - W, W).unwrap())
    };
    for policy in [ReplayPolicy::StepTail, ReplayPolicy::PromptTail] {
        assert_close(
            "cut",
            &kept(policy, CUT),
            &kept(ReplayPolicy::Off, CUT),
            1e-5,
        );
        let d = difference(&kept(policy, CUT + 1), &kept(ReplayPolicy::Off, CUT + 1));
        assert!(d > 1e-3, "layer after the cut: {d}");
    }
}

/// BR-05: prompt log-probabilities read rows that were dropped. A prompt that someone reads keeps
/// all rows and equals `Off`; its neighbour in the batch is still cut short.
#[test]
fn br_05_a_prompt_that_is_read_keeps_its_rows() {
    let (a, b) = (&TOKENS[..20], &TOKENS[20..40]);
    let off = |tokens| {
        Lone::with(
            &MODEL,
            ReplayPolicy::Off,
            SequenceOptions {
                prompt_len: 20,
                keeps_rows: true,
            },
        )
        .step(tokens, LogitRows::All)
    };
    for keeps in [[true, false], [true, true], [false, true]] {
        let mut cache = MODEL
            .new_cache(CacheOptions {
                max_sequences: 2,
                max_tokens: 64,
                page_tokens: CacheOptions::PAGE_TOKENS,
                policy: ReplayPolicy::PromptTail,
                sampled_rows: NonZeroU32::MIN,
            })
            .unwrap();
        let requests: Vec<_> = [a, b]
            .iter()
            .zip(keeps)
            .map(|(tokens, keeps_rows)| {
                let sequence = cache
                    .add(SequenceOptions {
                        prompt_len: 20,
                        keeps_rows,
                    })
                    .unwrap();
                StepRequest {
                    sequence,
                    tokens,
                    logits: if keeps_rows {
                        LogitRows::All
                    } else {
                        LogitRows::Last
                    },
                }
            })
            .collect();
        let output = MODEL.forward(&requests, &mut cache).unwrap();
        for (i, tokens) in [a, b].into_iter().enumerate() {
            let rows = flat(
                &output
                    .logits
                    .narrow(0, output.ranges[i].start, output.ranges[i].len())
                    .unwrap(),
            );
            if keeps[i] {
                assert_close("kept", &rows, &off(tokens), TIGHT);
            }
            assert_eq!(
                output.stats.layers[CUT].run[i],
                if keeps[i] { 20 } else { W }
            );
        }
    }
}

/// BR-06: the first token is right and decode goes wrong once the window has rolled past the
/// prompt. `Exact` follows `Off` through it; bounded replay stays nearer to `Off` than a prompt cut
/// down to its window, and what every row wrote is the same to the bit.
#[test]
fn br_06_decode_stays_right_past_the_seam() {
    for prompt_len in [7, 8, 9, 15, 16, 17, 23, 24, 25] {
        let off = logits(ReplayPolicy::Off, prompt_len, &[prompt_len], 12, 0.0);
        let exact = logits(ReplayPolicy::Exact, prompt_len, &[prompt_len], 12, 0.0);
        assert_close("exact", &exact, &off, TIGHT);
        let on = logits(ReplayPolicy::PromptTail, prompt_len, &[prompt_len], 12, 0.0);
        if prompt_len <= W {
            assert_eq!(
                difference(&on, &off),
                0.0,
                "nothing is dropped from {prompt_len} rows"
            );
            continue;
        }
        let mut cut_down = new(ReplayPolicy::Off, W);
        let mut truncated = cut_down.prefill(&TOKENS[prompt_len - W..prompt_len], &[W]);
        for i in prompt_len..prompt_len + 12 {
            truncated.extend(cut_down.step(&TOKENS[i..=i], LogitRows::Last));
        }
        let vocab = MODEL.config().vocab_size;
        let mean = |other: &[f32]| -> f64 {
            off.chunks(vocab)
                .zip(other.chunks(vocab))
                .map(|(a, b)| divergence(a, b))
                .sum()
        };
        assert!(
            mean(&on) < mean(&truncated),
            "{prompt_len}: {} and {}",
            mean(&on),
            mean(&truncated)
        );
    }
}

/// The long-range KV and the index keys of the cut are the same to the bit under every policy:
/// they are written for every row before any is dropped.
#[test]
fn compressed_kv_is_complete_under_every_policy() {
    let written = |policy, source| {
        let mut run = new(policy, 80);
        run.prefill(&TOKENS, &[30, 50]);
        let (entries, keys) = run.cache.compressed(run.id, source).unwrap();
        (flat(&entries), flat(&keys))
    };
    for source in [2, CUT] {
        for policy in ReplayPolicy::ALL {
            assert_eq!(
                written(policy, source),
                written(ReplayPolicy::Off, source),
                "{policy}, source {source}"
            );
        }
    }
}

/// BR-07: output collapses when a prompt needs two forwards.
#[test]
fn br_07_a_prompt_of_several_chunks_equals_one_chunk() {
    for prompt_len in [16, 17, 32, 33] {
        let chunks: Vec<usize> = (0..prompt_len)
            .step_by(16)
            .map(|s| 16.min(prompt_len - s))
            .collect();
        let many = logits(ReplayPolicy::Off, prompt_len, &chunks, 4, 0.0);
        assert_close(
            "off",
            &many,
            &logits(ReplayPolicy::Off, prompt_len, &[prompt_len], 4, 0.0),
            TIGHT,
        );
    }
}

/// The fixture's configuration with some fields replaced.
fn config(changes: &[(&str, serde_json::Value)]) -> Config {
    let path = checkpoint("engram-s1").join("config.json");
    let mut json: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    for (field, value) in changes {
        json["text_config"][*field] = value.clone();
    }
    Config::from_json(&json.to_string(), "config.json".as_ref()).unwrap_or_else(|e| panic!("{e}"))
}

/// BR-08: a layout in which skipping would be wrong must refuse with one named reason, never run
/// silently; without replay it runs.
#[test]
fn br_08_layouts_that_cannot_replay_say_why() {
    use serde_json::json;
    let layouts = [
        (
            "an engram layer after the cut",
            vec![("engram_layer_ids", json!([1, 7]))],
        ),
        (
            "an engram layer at the cut",
            vec![("engram_layer_ids", json!([1, 5]))],
        ),
        (
            "the cut is the last layer",
            vec![
                ("num_hidden_layers", json!(6)),
                ("index_source_layer_ids", json!([2, 4, 5])),
            ],
        ),
        (
            "the last source compresses",
            vec![("compress_ratios", json!([0, 0, 2, 2, 2, 2, 2, 2, 2]))],
        ),
        (
            "no source at all",
            vec![
                ("compress_ratios", json!([0, 0, 0, 0, 0, 0, 0, 0, 0])),
                ("kv_source_layer_ids", json!([])),
                ("index_source_layer_ids", json!([])),
                ("candidate_source_layer_id", json!(-1)),
            ],
        ),
    ];
    let mut texts = String::new();
    for (what, changes) in layouts {
        let config = config(&changes);
        let options = |policy| CacheOptions {
            max_sequences: 1,
            max_tokens: 16,
            page_tokens: CacheOptions::PAGE_TOKENS,
            policy,
            sampled_rows: NonZeroU32::MIN,
        };
        let device = candle_core::Device::Cpu;
        KvCache::new(
            &config,
            options(ReplayPolicy::Off),
            &device,
            candle_core::DType::F32,
        )
        .unwrap();
        let reason = KvCache::new(
            &config,
            options(ReplayPolicy::PromptTail),
            &device,
            candle_core::DType::F32,
        )
        .unwrap_err();
        writeln!(texts, "{what}: {reason}").unwrap();
    }
    insta::assert_snapshot!(texts);
}

/// BR-09: bounded replay is taken for exact. It is not: the same prompt tells them apart.
#[test]
fn br_09_bounded_replay_is_not_exact() {
    let run = |policy| logits(policy, 60, &[60], 0, 0.0);
    let off = run(ReplayPolicy::Off);
    assert_close("exact", &run(ReplayPolicy::Exact), &off, TIGHT);
    for policy in [ReplayPolicy::PromptTail, ReplayPolicy::StepTail] {
        let d = difference(&run(policy), &off);
        assert!(
            d > 1e-2,
            "{policy} differs from off by {d} only: this test could not fail"
        );
    }
}

/// BR-10: the split between prefill and decode is made in two places. Every query length from 1 to
/// 2W + 1 works, alone and as the tail after a chunk of 16, and gives the one-chunk result.
#[test]
fn br_10_every_query_length_works() {
    for n in 1..=2 * W + 1 {
        for policy in [
            ReplayPolicy::Off,
            ReplayPolicy::PromptTail,
            ReplayPolicy::Exact,
        ] {
            let whole = logits(policy, 16 + n, &[16 + n], 2, f32::NAN);
            assert_close(
                &format!("{policy} 16 + {n}"),
                &logits(policy, 16 + n, &[16, n], 2, f32::NAN),
                &whole,
                TIGHT,
            );
            assert!(
                logits(policy, n, &[n], 2, f32::NAN)
                    .iter()
                    .all(|x| x.is_finite())
            );
        }
        assert!(
            logits(ReplayPolicy::StepTail, 16 + n, &[16, n], 2, f32::NAN)
                .iter()
                .all(|x| x.is_finite())
        );
    }
}

/// BR-11: a slot's window ring belongs to the sequence before. The same prompt gives the same
/// logits after another sequence has used its slot and its pages.
#[test]
fn br_11_a_reused_slot_starts_clean() {
    for policy in ReplayPolicy::ALL {
        let mut run = new(policy, 20);
        let first = run.prefill(&TOKENS[..20], &[20]);
        for other in [40, 20] {
            run.cache.remove(run.id).unwrap();
            run.id = run
                .cache
                .add(SequenceOptions {
                    prompt_len: other,
                    keeps_rows: false,
                })
                .unwrap();
            let tokens: Vec<u32> = if other == 20 {
                TOKENS[..20].to_vec()
            } else {
                TOKENS[40..].to_vec()
            };
            let last = run.prefill(&tokens, &[other]);
            if other == 20 {
                assert_eq!(last, first, "{policy}");
            }
        }
    }
}

/// BR-30: layers run on more rows than they need. One prompt: all rows before the cut; at the cut
/// and after it a window, or the tapering halo; a chunk without a kept row stops at the cut.
#[test]
fn br_30_replay_layers_run_the_rows_they_should() {
    let run = |policy, chunks: &[usize]| -> Vec<StepStats> {
        let mut run = new(policy, 80);
        let mut start = 0;
        let step = |&n: &usize| {
            let requests = [StepRequest {
                sequence: run.id,
                tokens: &TOKENS[start..start + n],
                logits: LogitRows::None,
            }];
            start += n;
            MODEL.forward(&requests, &mut run.cache).unwrap().stats
        };
        chunks.iter().map(step).collect()
    };
    let rows = |stats: &StepStats| {
        stats
            .layers
            .iter()
            .map(|l| (l.written[0], l.run[0]))
            .collect::<Vec<_>>()
    };
    let whole = |n: usize| vec![(n, n); CUT];
    let with = |n: usize, tail: [(usize, usize); 4]| [whole(n), tail.to_vec()].concat();

    for policy in [ReplayPolicy::StepTail, ReplayPolicy::PromptTail] {
        assert_eq!(
            rows(&run(policy, &[80])[0]),
            with(80, [(80, 8), (8, 8), (8, 8), (8, 8)])
        );
    }
    assert_eq!(
        rows(&run(ReplayPolicy::Exact, &[80])[0]),
        with(80, [(80, 22), (22, 15), (15, 8), (8, 1)])
    );
    let stats = run(ReplayPolicy::PromptTail, &[60, 16, 4]);
    assert_eq!(rows(&stats[0]), with(60, [(60, 0), (0, 0), (0, 0), (0, 0)]));
    assert_eq!(rows(&stats[1]), with(16, [(16, 4), (4, 4), (4, 4), (4, 4)]));
    assert_eq!(rows(&stats[2]), with(4, [(4, 4), (4, 4), (4, 4), (4, 4)]));
    assert_eq!(stats[0].row_layers(), 60 * CUT);
    assert_eq!(stats[0].row_layers_without_replay(), 60 * 9);
}

/// BR-41: on a step that completes no group, a source scores against the keys that another layer
/// published last. Six single-token steps past `index_topk` entries choose what one chunk chooses.
#[test]
fn br_41_a_source_reads_its_own_keys_when_no_group_closes() {
    for layer in [2, 4, CUT, 7] {
        let name = format!("layers.{layer}.chosen");
        let whole: Vec<Vec<u32>> = observe(&mut new(ReplayPolicy::Off, 66), &TOKENS[..66], &name)
            .to_vec2()
            .unwrap();
        let mut run = new(ReplayPolicy::Off, 60);
        run.prefill(&TOKENS[..60], &[60]);
        for at in 60..66 {
            let step: Vec<Vec<u32>> = observe(&mut run, &TOKENS[at..=at], &name)
                .to_vec2()
                .unwrap();
            assert_eq!(step[0], whole[at], "layer {layer}, position {at}");
        }
    }
}
