//! Keys of other families of models: what asks for another computation is refused, what asks for this
//! one is not.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::{changed, parse, release};

/// The key, values that ask for what is computed, and one that asks for something else.
fn keys() -> Vec<(&'static str, Vec<Value>, Value)> {
    let mut types = vec!["sliding_attention"; 2];
    types.extend(["compressed_sparse_attention"; 38]);
    let mut other = types.clone();
    other[7] = "full_attention";
    vec![
        ("attn_logit_softcap", vec![json!(0)], json!(50.0)),
        (
            "attn_logit_softcapping",
            vec![json!(0.0), json!(false)],
            json!(50.0),
        ),
        ("final_logit_softcapping", vec![json!(0)], json!(30.0)),
        ("logits_soft_cap", vec![json!(0)], json!(30)),
        (
            "partial_rotary_factor",
            vec![json!(0.125), json!(1), json!(1.0)],
            json!(0.5),
        ),
        ("rotary_pct", vec![json!(1.0)], json!(0.25)),
        ("rotary_dim", vec![json!(64)], json!(32)),
        ("use_sliding_window", vec![json!(true)], json!(false)),
        ("max_window_layers", vec![json!(0)], json!(28)),
        ("sliding_window_pattern", vec![], json!(6)),
        ("attention_chunk_size", vec![], json!(8192)),
        ("layer_types", vec![json!(types)], json!(other)),
        ("mlp_layer_types", vec![json!(vec!["moe"; 40])], {
            json!([&["hash_moe"; 3][..], &["moe"; 37]].concat())
        }),
        ("qk_norm", vec![json!(true)], json!(false)),
        ("use_qk_norm", vec![json!(true)], json!(false)),
        ("logit_scale", vec![json!(1), json!(1.0)], json!(0.0625)),
        ("logits_scaling", vec![json!(1.0)], json!(8.0)),
        ("residual_multiplier", vec![json!(1.0)], json!(0.22)),
        ("embedding_multiplier", vec![json!(1)], json!(12.0)),
        ("mlp_multipliers", vec![json!([1.0, 1])], json!([1.0, 0.5])),
        // Replaces the factor 1 / sqrt(512), so that 1 is another computation.
        (
            "attention_multiplier",
            vec![json!(0.044_194_173_8)],
            json!(1.0),
        ),
        ("query_pre_attn_scalar", vec![json!(512)], json!(256)),
        ("clip_qkv", vec![], json!(8.0)),
        ("parallel_residual", vec![json!(false)], json!(true)),
        ("use_parallel_residual", vec![json!(false)], json!(true)),
        ("attention_bias", vec![json!(false)], json!(true)),
        ("mlp_bias", vec![json!(false)], json!(true)),
        ("tie_embeddings", vec![json!(false)], json!(true)),
        ("tie_word_embeddings", vec![json!(false)], json!(true)),
        ("hidden_activation", vec![json!("silu")], json!("gelu")),
        // Of an empty list the families that have it make one of every fourth layer.
        ("no_rope_layers", vec![json!(vec![1; 40])], json!([])),
        ("moe_layer_freq", vec![json!(1)], json!([])),
        ("rotary_emb_base", vec![json!(10000)], json!(500_000)),
        ("rotary_base", vec![json!(1e4)], json!(20000)),
        ("rope_base", vec![json!(10000.0)], json!(777)),
        ("final_logit_cap", vec![json!(0)], json!(30.0)),
        ("attn_logit_cap", vec![json!(0.0)], json!(50)),
        ("logits_cap", vec![json!(false)], json!(30)),
        (
            "attn_temperature_tuning",
            vec![json!(0), json!(false)],
            json!(4),
        ),
        (
            "attn_config",
            vec![json!({ "clip_qkv": null, "rope_theta": 1e4 })],
            json!({ "clip_qkv": 8 }),
        ),
        ("mlp_only_layers", vec![json!([])], json!([0])),
        ("decoder_sparse_step", vec![json!(1)], json!(2)),
        ("swiglu_alpha", vec![json!(1.0)], json!(1.702)),
        ("position_embedding_type", vec![json!("rope")], {
            json!("absolute")
        }),
        ("alibi", vec![json!(false)], json!(true)),
        ("num_key_value_heads", vec![json!(1)], json!(8)),
        ("gate_temp", vec![json!(1)], json!(2)),
        ("num_expert_group", vec![json!(1)], json!(8)),
        ("n_limited_groups", vec![json!(1)], json!(4)),
        ("use_grouped_topk", vec![json!(false)], json!(true)),
        ("mup_enabled", vec![json!(false)], json!(true)),
        ("attention_value_scale", vec![json!(1.0)], json!(0.7)),
        ("scale_embeddings", vec![json!(false)], json!(true)),
        ("embed_scale", vec![json!(1)], json!(71.5)),
        ("use_head_wise_attn_gate", vec![json!(false)], json!(true)),
        ("is_causal", vec![json!(true)], json!(false)),
        (
            "use_bidirectional_attention",
            vec![json!(false)],
            json!("vision"),
        ),
        ("use_dynamic_ntk", vec![json!(false)], json!(true)),
        ("use_logn_attn", vec![json!(false)], json!(true)),
        ("rotary", vec![], json!({ "type": "dynamic" })),
        ("layernorm_zero_centered", vec![json!(false)], json!(true)),
        ("mlp_hidden_act", vec![json!("silu")], json!("relu2")),
        ("mscale", vec![json!(0.0)], json!(1.0)),
    ]
}

/// The same of keys that say once more, by another name, what is read: the neutral values are the
/// release's own.
fn repeated() -> Vec<(&'static str, Vec<Value>, Value)> {
    let limits = |last: f64| {
        let mut limits = vec![10.0; 43];
        limits[39] = last;
        json!(limits)
    };
    vec![
        ("score_func", vec![json!("sqrtsoftplus")], json!("softmax")),
        (
            "moe_router_activation_func",
            vec![json!("sqrtsoftplus")],
            json!("sigmoid"),
        ),
        ("route_scale", vec![json!(1.5)], json!(2.5)),
        (
            "moe_router_topk_scaling_factor",
            vec![json!(1.5)],
            json!(1.0),
        ),
        ("route_norm", vec![json!(true)], json!(false)),
        ("moe_renormalize", vec![json!(true)], json!(false)),
        (
            "num_experts_per_token",
            vec![json!(6), json!(6.0)],
            json!(8),
        ),
        ("n_activated_experts", vec![json!(6)], json!(8)),
        ("norm_eps", vec![json!(1e-20)], json!(1e-6)),
        ("layer_norm_eps", vec![json!(1e-20)], json!(1e-5)),
        ("rms_norm_epsilon", vec![json!(1e-20)], json!(1e-6)),
        ("swiglu_limits", vec![json!(10), limits(10.0)], limits(7.0)),
        ("swiglu_limits_shared", vec![limits(10.0)], json!([10.0])),
        (
            "partial_rotary_factors",
            vec![json!(vec![0.125; 40]), json!(vec![1; 40])],
            json!([0.125]),
        ),
        ("rope_type", vec![json!("yarn")], json!("linear")),
        ("rope_scaling_type", vec![json!("yarn")], json!("default")),
        ("rope_factor", vec![json!(16.0)], json!(40)),
        ("original_seq_len", vec![json!(65_536)], json!(4096)),
        ("beta_fast", vec![json!(32)], json!(16)),
        (
            "quantization_config",
            vec![json!({
                "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0",
                "weight_block_size": [32, 32], "activation_scheme": "dynamic", "expert_dtype": "fp8",
            })],
            json!({ "fmt": "e5m2" }),
        ),
    ]
}

/// A file where nothing is stretched: what says so outside of `rope_scaling` would be passed over.
#[test]
fn stretching_beside_no_stretching_is_refused() {
    for scaling in [Value::Null, json!({ "type": "default" })] {
        let with = |key: &str, value: Value| {
            changed(|text| {
                text["rope_scaling"] = scaling.clone();
                text[key] = value;
            })
        };
        with("rope_type", json!("default")).unwrap();
        let errors = [
            with("rope_type", json!("yarn")),
            with("rope_factor", json!(16)),
        ];
        let errors = errors.map(|error| error.unwrap_err().to_string());
        insta::allow_duplicates! {
            insta::assert_snapshot!(errors.join("\n"), @r#"
            config.json breaks 1 rule:
              rope_type: expected "default" (no rope_scaling stretches anything), found "yarn"
            config.json breaks 1 rule:
              rope_factor: expected null (no rope_scaling stretches anything), found 16
            "#);
        }
    }
}

/// A format of which the tensors do not tell that it is another one.
#[test]
fn formats_that_are_not_read_are_refused() {
    let error = changed(|text| {
        text["quantization_config"] = json!({
            "fmt": "e5m2", "scale_fmt": "float32", "weight_block_size": [128, 128],
            "expert_dtype": "nvfp4",
        });
    });
    insta::assert_snapshot!(error.unwrap_err(), @r#"
    config.json breaks 4 rules:
      quantization_config.fmt: expected "e4m3" (nothing else is supported), found "e5m2"
      quantization_config.scale_fmt: expected "ue8m0" (nothing else is supported), found "float32"
      quantization_config.expert_dtype: expected "fp4", "fp8" or "bf16" (nothing else is supported), found "nvfp4"
      quantization_config.weight_block_size: expected [32,32] (nothing else is supported), found [128,128]
    "#);
    changed(|text| text["quantization_config"] = json!({ "weight_block_size": [32] })).unwrap_err();
}

/// In the decoder's part, and beside it, where it may be meant for the decoder: such a key changes
/// results and no shape, so that nothing else would tell.
#[test]
fn keys_of_other_families_are_judged_by_their_value() {
    let mut report = String::new();
    for (key, mut neutral, other) in keys().into_iter().chain(repeated()) {
        let beside = |value: &Value| {
            let mut json = release();
            json[key] = value.clone();
            parse(&json)
        };
        neutral.push(Value::Null);
        for value in &neutral {
            let config = changed(|text| text[key] = value.clone());
            assert_eq!(config.unwrap(), parse(&release()).unwrap(), "{key} {value}");
            beside(value).unwrap();
        }
        let error = changed(|text| text[key] = other.clone()).unwrap_err();
        let (_, rule) = error.to_string().split_once('\n').map(owned).unwrap();
        let error = beside(&other).unwrap_err().to_string();
        assert_eq!(
            error,
            format!("config.json breaks 1 rule:\n{rule}, beside text_config")
        );
        writeln!(report, "{}", rule.trim_start()).unwrap();
    }
    insta::assert_snapshot!("other_families", report);
}

fn owned((a, b): (&str, &str)) -> (String, String) {
    (a.to_owned(), b.to_owned())
}

/// Lists of the wrong length, though all of what they hold asks for nothing else.
#[test]
fn lists_of_ones_have_one_for_each() {
    let mut other = vec![1; 40];
    other[39] = 0;
    let mut report = String::new();
    for (key, value) in [
        ("no_rope_layers", json!(vec![1; 39])),
        ("no_rope_layers", json!(other)),
        ("mlp_multipliers", json!([])),
        ("mlp_multipliers", json!([1, 1, 1])),
        ("residual_multiplier", json!([])),
        ("attn_config", json!({ "rope_theta": 20000 })),
    ] {
        let error = changed(|text| text[key] = value.clone()).unwrap_err();
        writeln!(report, "{key}: {error}").unwrap();
    }
    insta::assert_snapshot!("lists_of_ones", report);
    changed(|text| text["no_rope_layers"] = json!(vec![1; 43])).unwrap();
}

/// What decides results and no shape, said beside the decoder's part and not in it, would be passed
/// over.
#[test]
fn what_contradicts_the_decoders_part_is_refused() {
    let mut json = release();
    json["rope_theta"] = json!(10000.0);
    json["rope_scaling"] = json["text_config"]["rope_scaling"].clone();
    json["swiglu_limit"] = json!(10);
    assert_eq!(parse(&json).unwrap(), parse(&release()).unwrap());

    json["rope_theta"] = json!(5e5);
    json["rope_scaling"]["factor"] = json!(4);
    json["swiglu_limit"] = json!(7.0);
    json["text_config"]
        .as_object_mut()
        .unwrap()
        .retain(|key, _| !key.starts_with("candidate"));
    json["candidate_source_layer_id"] = json!(20);
    insta::assert_snapshot!("contradictions", parse(&json).unwrap_err().to_string());
}

/// Two objects may differ where a quoted value is cut already, or only in how they spell the same.
#[test]
fn what_differs_beside_the_decoders_part_is_named() {
    let mut json = release();
    json["eos_token_id"] = json!([7, 1]);
    json["text_config"]["eos_token_id"] = json!([1, 7, 7]);
    json["bos_token_id"] = json!(0);
    json["max_position_embeddings"] = json!(1_048_576);
    json["rope_scaling"] = json["text_config"]["rope_scaling"].clone();
    let keys = json["rope_scaling"].as_object_mut().unwrap();
    let kind = keys.remove("type").unwrap();
    keys.insert("rope_type".to_owned(), kind);
    keys.insert("truncate".to_owned(), Value::Null);
    parse(&json).unwrap();
    json["text_config"]["rope_scaling"]["rope_type"] = "yarn".into();
    parse(&json).unwrap();

    let mut report = String::new();
    for (pointer, value) in [
        (
            "/rope_scaling/original_max_position_embeddings",
            json!(2048),
        ),
        ("/rope_scaling/rope_type", json!("linear")),
        ("/rope_scaling/factor", Value::Null),
        ("/eos_token_id", json!([1, 8])),
        ("/qk_rope_head_dim", json!(32)),
        ("/engram_pad_token_id", json!(3)),
        ("/engram_vocab_size", json!(1000)),
        ("/engram_max_ngram_size", json!(3)),
        ("/engram_n_heads", json!(4)),
        ("/engram_compressed_vocab_size", json!(99_091)),
        ("/num_hidden_layers", json!(43)),
        ("/vocab_size", json!(1000)),
        ("/max_position_embeddings", json!(4096)),
        ("/kv_source_layer_ids", json!([2, 8, 14])),
        ("/kv_source_layer_ids", json!([2, 8, 14, 20, 30])),
        ("/kv_source_layer_ids", json!([2, 8, 15, 20])),
    ] {
        let mut json = json.clone();
        json["text_config"]["bos_token_id"] = json!(5);
        let (object, key) = pointer.rsplit_once('/').unwrap();
        json.pointer_mut(object).unwrap()[key] = value;
        let error = parse(&json).unwrap_err();
        writeln!(report, "{error}").unwrap();
    }
    insta::assert_snapshot!("beside_the_decoder", report);
}

/// Whatever is read inside must be the same beside: a copy of the whole part changes nothing, and any
/// other value of a key that is required is refused with the key's name. Keys that are not read, as that
/// of a name, are not compared.
#[test]
fn every_key_that_is_read_agrees_beside() {
    let part = release()["text_config"].as_object().unwrap().clone();
    let with = |key: &str, value: Value| {
        let mut json = release();
        json.as_object_mut().unwrap().extend(part.clone());
        json[key] = value;
        parse(&json)
    };
    with("dtype", json!("float32")).unwrap();
    with("num_nextn_predict_layers", json!(7)).unwrap();
    let required = part.keys().filter(|key| {
        let absent = changed(|text| drop(text.as_object_mut().unwrap().remove(*key)));
        absent.is_err()
    });
    let mut count = 0;
    for key in required {
        let error = with(key, json!("other")).unwrap_err().to_string();
        let rule = format!("\n  {key}: expected ");
        assert!(
            error.contains(&rule) && error.contains("as text_config has it"),
            "{error}"
        );
        count += 1;
    }
    // All sizes, numbers and lists of the release; a rule that compares nothing would pass above.
    assert!(count > 30, "{count}");
}

/// Lists that say of each layer what it attends to must cover all layers and agree with the ratios.
#[test]
fn layer_types_follow_the_ratios() {
    let refusal = |value: Value| {
        let error = changed(|text| text["layer_types"] = value).unwrap_err();
        error.to_string()
    };
    insta::assert_snapshot!(refusal(json!(["sliding_attention"])), @r#"
    config.json breaks 1 rule:
      layer_types: expected a list of num_hidden_layers (40) names or more, found ["sliding_attention"]
    "#);
    insta::assert_snapshot!(refusal(json!(vec!["compressed_sparse_attention"; 43])), @r#"
    config.json breaks 1 rule:
      layer_types[0]: expected "sliding_attention", as its ratio in compress_ratios is 0, found "compressed_sparse_attention"
    "#);
    insta::assert_snapshot!(refusal(json!(vec![0; 40])), @r#"
    config.json breaks 1 rule:
      layer_types[0]: expected "sliding_attention", as its ratio in compress_ratios is 0, found 0
    "#);
}
