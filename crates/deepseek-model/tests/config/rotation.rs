//! Where a file may say how positions rotate.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::{changed, parse, release};

/// The keys of rotation taken out and others put in.
fn rotating(by: &Value) -> Result<deepseek_model::Config, deepseek_model::config::ConfigError> {
    changed(|text| {
        let text = text.as_object_mut().unwrap();
        text.retain(|key, _| !key.contains("rope_theta") && !key.starts_with("rope_s"));
        text.extend(by.as_object().unwrap().clone());
    })
}

fn yarn(more: &Value) -> Value {
    let mut yarn = json!({
        "rope_type": "yarn", "factor": 16.0, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    });
    let keys = yarn.as_object_mut().unwrap();
    keys.extend(more.as_object().unwrap().clone());
    yarn
}

/// Newer tools put the bases into `rope_parameters`, flat or by what is rotated. All of these say what
/// the released file says.
#[test]
fn bases_stand_in_rope_parameters() {
    let bases = json!({ "rope_theta": 10000.0, "compress_rope_theta": 160_000 });
    let main = json!({ "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.125 });
    for (what, keys) in [
        ("both inside", json!({ "rope_parameters": yarn(&bases) })),
        (
            "one inside",
            json!({
                "rope_parameters": yarn(&json!({ "rope_theta": 10000 })),
                "compress_rope_theta": 160_000,
            }),
        ),
        (
            "inside and outside",
            json!({
                "rope_theta": 10000, "compress_rope_theta": 160_000,
                "rope_parameters": yarn(&bases),
            }),
        ),
        (
            "null outside",
            json!({ "rope_theta": null, "rope_parameters": yarn(&bases) }),
        ),
        (
            "stretching in rope_scaling",
            json!({ "rope_scaling": yarn(&json!({})), "rope_parameters": bases }),
        ),
        (
            "two equal objects",
            json!({ "rope_scaling": yarn(&json!({})), "rope_parameters": yarn(&bases) }),
        ),
        (
            "by what is rotated",
            json!({
                "rope_parameters": {
                    "main": main,
                    "compress": yarn(&json!({ "rope_theta": 160_000, "attention_factor": 1.0 })),
                },
            }),
        ),
    ] {
        let config = rotating(&keys).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(config, parse(&release()).unwrap(), "{what}");
    }
}

/// Of two values for one thing there is none to trust: both are named, with what they hold.
#[test]
fn contradictions_are_refused() {
    let mut report = String::new();
    let bases = json!({ "rope_theta": 10000, "compress_rope_theta": 160_000 });
    let with_bases = |more: &Value| {
        let mut all = bases.clone();
        let keys = all.as_object_mut().unwrap();
        keys.extend(more.as_object().unwrap().clone());
        all
    };
    for (what, keys) in [
        (
            "another base inside",
            with_bases(&json!({ "rope_parameters": yarn(&json!({ "rope_theta": 20000 })) })),
        ),
        (
            "another base in rope_scaling",
            with_bases(&json!({ "rope_scaling": yarn(&json!({ "rope_theta": 20000 })) })),
        ),
        (
            "another base for compressed KV",
            with_bases(
                &json!({ "rope_parameters": { "compress": yarn(&json!({ "rope_theta": 10000 })) } }),
            ),
        ),
        (
            "another factor",
            with_bases(&json!({
                "rope_scaling": yarn(&json!({})), "rope_parameters": yarn(&json!({ "factor": 8 })),
            })),
        ),
        (
            "another type",
            with_bases(&json!({
                "rope_scaling": yarn(&json!({})), "rope_parameters": { "type": "default" },
            })),
        ),
        (
            "stretched window KV",
            with_bases(
                &json!({ "rope_parameters": { "main": yarn(&json!({})), "compress": yarn(&json!({})) } }),
            ),
        ),
        (
            "another share of channels",
            with_bases(
                &json!({ "rope_parameters": yarn(&json!({ "partial_rotary_factor": 0.5 })) }),
            ),
        ),
        (
            "a ramp between parts of channels",
            with_bases(&json!({ "rope_scaling": yarn(&json!({ "truncate": false })) })),
        ),
        (
            "no base",
            json!({ "rope_parameters": yarn(&json!({ "rope_theta": 10000 })) }),
        ),
        (
            "a bad base inside",
            json!({ "compress_rope_theta": 160_000, "rope_parameters": yarn(&json!({ "rope_theta": 1 })) }),
        ),
    ] {
        let error = rotating(&keys).unwrap_err();
        writeln!(report, "{what}: {error}").unwrap();
    }
    insta::assert_snapshot!("rotation", report);
}

/// What stands in an object of rotation and means nothing there would be passed over, with results of
/// another model.
#[test]
fn what_would_be_passed_over_is_refused() {
    let main = json!({ "rope_theta": 10000 });
    let compress = yarn(&json!({ "rope_theta": 160_000 }));
    let beside = |more: Value| {
        let mut all = json!({ "main": main, "compress": compress });
        let keys = all.as_object_mut().unwrap();
        keys.extend(more.as_object().unwrap().clone());
        json!({ "rope_parameters": all })
    };
    let inside = |part: &str, key: &str, value: Value| {
        let mut all = beside(json!({}));
        all["rope_parameters"][part][key] = value;
        all
    };
    // The same said again is no contradiction.
    let same = json!({
        "rope_theta": 1e4, "compress_rope_theta": 160_000, "partial_rotary_factor": 0.125,
    });
    assert_eq!(rotating(&beside(same)).unwrap(), parse(&release()).unwrap());

    let bases = |scaling: Value| {
        json!({
            "rope_theta": 10000, "compress_rope_theta": 160_000, "rope_scaling": scaling,
        })
    };
    // Of other types of stretching, and a slip: without the rule they would leave plain YaRN.
    let other_stretching = [
        ("low_freq_factor", json!(1.0)),
        ("high_freq_factor", json!(4.0)),
        ("long_factor", json!([1.0, 2.0])),
        ("short_factor", json!([1.0, 1.0])),
        ("llama_4_scaling_beta", json!(0.1)),
        ("mrope_section", json!([16, 24, 24])),
        ("max_position_embeddings", json!(1_048_576)),
        ("beta_fsat", json!(16)),
    ];
    let mut report = String::new();
    for keys in [
        beside(json!({ "rope_theta": 777 })),
        beside(json!({ "compress_rope_theta": 777 })),
        beside(json!({ "partial_rotary_factor": 0.5 })),
        beside(json!({ "rope_type": "linear", "factor": 99 })),
        bases(json!({ "main": main, "rope_type": "yarn", "factor": 99 })),
        beside(json!({ "sliding_attention": { "rope_theta": 10000 } })),
        inside("main", "compress_rope_theta", json!(5)),
        inside("compress", "compress_rope_theta", json!(5)),
        inside("main", "factor", json!(8)),
        inside("main", "attention_factor", json!(2)),
        inside("main", "mscale", json!(3)),
        bases(json!({ "rope_type": "default", "factor": 4 })),
        bases(json!({ "full_attention": main, "sliding_attention": main })),
        bases(json!({ "x".repeat(100_000): main })),
        inside("main", &"x".repeat(100_000), json!(1)),
        inside("compress", "beta_fsat", json!(16)),
    ]
    .into_iter()
    .chain(other_stretching.map(|(key, value)| bases(yarn(&json!({ key: value })))))
    .chain([json!({ "rope_parameters": yarn(&json!({
        "rope_theta": 10000, "compress_rope_theta": 160_000, "alpha": 1000.0,
    })) })]) {
        let error = rotating(&keys).unwrap_err().to_string();
        writeln!(report, "{error}").unwrap();
    }
    insta::assert_snapshot!("passed_over", report);
}
