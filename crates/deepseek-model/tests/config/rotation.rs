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
