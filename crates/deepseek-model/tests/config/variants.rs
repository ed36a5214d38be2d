//! Keys of other families of models: what asks for another computation is refused, what asks for this
//! one is not.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::{
    changed,
    families::{keys, repeated},
    parse, release,
};

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
              text_config.rope_type: expected "default" (no rope_scaling stretches anything), found "yarn"
            config.json breaks 1 rule:
              text_config.rope_factor: expected null (no rope_scaling stretches anything), found 16
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
      text_config.quantization_config.fmt: expected "e4m3" (nothing else is supported), found "e5m2"
      text_config.quantization_config.scale_fmt: expected "ue8m0" (nothing else is supported), found "float32"
      text_config.quantization_config.expert_dtype: expected "fp4", "fp8" or "bf16" (nothing else is supported), found "nvfp4"
      text_config.quantization_config.weight_block_size: expected [32,32] (nothing else is supported), found [128,128]
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
        let error = error.to_string();
        let (_, rule) = error.split_once("\n  text_config.").unwrap();
        assert_eq!(
            beside(&other).unwrap_err().to_string(),
            format!("config.json breaks 1 rule:\n  {rule}, beside text_config")
        );
        writeln!(report, "{rule}").unwrap();
    }
    insta::assert_snapshot!("other_families", report);
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
      text_config.layer_types: expected a list of num_hidden_layers (40) names or more, found ["sliding_attention"]
    "#);
    insta::assert_snapshot!(refusal(json!(vec!["compressed_sparse_attention"; 43])), @r#"
    config.json breaks 1 rule:
      text_config.layer_types[0]: expected "sliding_attention", as its ratio in compress_ratios is 0, found "compressed_sparse_attention"
    "#);
    insta::assert_snapshot!(refusal(json!(vec![0; 40])), @r#"
    config.json breaks 1 rule:
      text_config.layer_types[0]: expected "sliding_attention", as its ratio in compress_ratios is 0, found 0
    "#);
}
