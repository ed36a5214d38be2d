//! Configurations whose fields were changed after they were read.

use std::{fmt::Write, num::NonZeroU32, path::Path};

use candle_core::{DType, Device};
use deepseek_model::{
    CacheOptions, Config, KvCache, Model, ModelOptions, ReplayPolicy,
    weights::{LoadOptions, Weights},
};

/// A field is public, so what was read may have been changed to what no file may hold. Every rule of a
/// file holds for it, wherever a configuration is taken.
#[test]
fn a_changed_configuration_is_refused_before_it_is_computed_with() {
    type Change = fn(&mut Config);
    let changes: &[(&str, Change)] = &[
        ("no heads", |c| c.num_heads = 0),
        ("no groups", |c| c.o_groups = 0),
        ("heads that are no whole groups", |c| c.o_groups = 3),
        ("a head without end", |c| c.head_dim = usize::MAX),
        ("a head that is no whole rounding group", |c| {
            c.head_dim = 24;
        }),
        ("an index head of no whole rounding group", |c| {
            c.index_dim = 16;
        }),
        ("no rotated channels", |c| c.rope_dim = 0),
        ("half a rotated pair", |c| c.rope_dim = 7),
        ("more rotated channels than a head has", |c| {
            c.rope_dim = 1 << 20;
        }),
        ("no latent", |c| c.q_lora_rank = 0),
        ("too many streams", |c| c.hc_mult = 9),
        ("too many iterations", |c| c.hc_sinkhorn_iters = usize::MAX),
        ("more experts chosen than there are", |c| {
            c.experts_per_token = usize::MAX;
        }),
        ("no choice", |c| c.index_topk = 0),
        ("no number", |c| c.rms_norm_eps = f64::NAN),
        ("no finite number", |c| c.rope_theta = f64::INFINITY),
        ("a scale without end", |c| {
            c.yarn.as_mut().unwrap().original_max_position = usize::MAX;
        }),
        ("blocks of nothing", |c| {
            c.candidates.as_mut().unwrap().block_size = 0;
        }),
        ("too few blocks", |c| {
            c.candidates.as_mut().unwrap().top_blocks = 1;
        }),
        ("candidates of no source", |c| {
            c.candidates.as_mut().unwrap().source = usize::MAX;
        }),
        ("a stop token outside of the vocabulary", |c| {
            c.eos_token_ids.push(u32::MAX);
        }),
        ("no layers", |c| c.layers.clear()),
        ("a source without groups", |c| c.layers[2].ratio = 0),
        ("another ratio than the source's", |c| c.layers[3].ratio = 4),
        ("no source", |c| c.layers[3].kv_source = None),
        ("a source that is gone", |c| c.layers[2].kv_source = None),
        ("a source to come", |c| c.layers[3].kv_source = Some(5)),
        ("a source that is none", |c| c.layers[4].kv_source = Some(3)),
        ("a choice that is not made", |c| {
            c.layers[3].index_source = None;
        }),
        ("a table that is not there", |c| {
            c.layers[1].engram = Some(0);
        }),
    ];
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/bf16-s1");
    let read = Config::load(&dir).unwrap();
    let options = CacheOptions {
        max_sequences: 2,
        max_tokens: 600,
        page_tokens: CacheOptions::PAGE_TOKENS,
        policy: ReplayPolicy::Off,
        sampled_rows: NonZeroU32::MIN,
    };
    let load = LoadOptions {
        device: Device::Cpu,
        dtype: DType::F32,
    };
    let mut report = String::new();
    for (what, change) in changes {
        let mut config = read.clone();
        change(&mut config);
        let refusal = KvCache::new(&config, options, &Device::Cpu, DType::F32).unwrap_err();
        writeln!(report, "{what}\n    {refusal}").unwrap();
        let weights = Weights::load(&dir, &config, &load, &|_| {});
        assert!(weights.is_err(), "{what}");
        let random = Model::random(config, ModelOptions::default(), 1);
        assert!(random.is_err(), "{what}");
    }
    let refused = "the configuration was changed since it was read: ";
    insta::assert_snapshot!("changed", report.replace(refused, ""));
}

/// Of a ratio past 32 bits the low ones can be 0, which would be a layer that compresses nothing.
#[cfg(target_pointer_width = "64")]
#[test]
fn a_ratio_past_32_bits_does_not_replay() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/bf16-s1");
    let mut config = Config::load(&dir).unwrap();
    config.replay_layers().unwrap();
    config.layers[5].ratio = 1 << 32;
    config.replay_layers().unwrap_err();
}
