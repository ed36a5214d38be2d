//! Configurations that are refused.

use std::{fmt::Write, fs};

use deepseek_model::{Config, config::ConfigError};
use serde_json::{Value, json};

use crate::{chain, changed, parse, release};

/// Each key on its own: left out, and given as text. The file and the key are always named.
#[test]
fn every_key_is_checked() {
    let mut report = String::new();
    let keys: Vec<String> = release()["text_config"]
        .as_object()
        .unwrap()
        .keys()
        .cloned()
        .collect();
    for key in keys {
        let absent = changed(|text| drop(text.as_object_mut().unwrap().remove(&key)));
        let wrong = changed(|text| text[&key] = "wrong".into());
        for (how, result) in [("absent", absent), ("wrong", wrong)] {
            let outcome = match result {
                Ok(_) => "accepted".to_owned(),
                Err(error) => error.to_string(),
            };
            writeln!(report, "{key} {how}: {outcome}").unwrap();
        }
    }
    insta::assert_snapshot!("every_key", report);
}

/// Rules of one key and rules between keys, each broken alone.
#[test]
fn every_rule_is_checked() {
    let mut report = String::new();
    for (key, value) in [
        ("hidden_size", json!(0)),
        ("hidden_size", json!(-3)),
        ("hidden_size", json!(5120.5)),
        ("hidden_size", Value::Null),
        ("hidden_size", json!("5120")),
        ("eos_token_id", json!([1, -1])),
        ("eos_token_id", json!(vec![1; 4097])),
        ("hidden_size", json!(1_u64 << 40)),
        ("num_hidden_layers", json!(100_000)),
        ("num_key_value_heads", json!(8)),
        ("n_shared_experts", json!(2)),
        ("hidden_act", json!("gelu")),
        ("tie_word_embeddings", json!(true)),
        ("o_groups", json!(7)),
        ("head_dim", json!(520)),
        ("index_head_dim", json!(72)),
        ("index_head_dim", json!(32)),
        ("qk_rope_head_dim", json!(63)),
        ("qk_rope_head_dim", json!(1024)),
        ("num_experts_per_tok", json!(385)),
        ("scoring_func", json!("tanh")),
        ("routed_scaling_factor", json!(0)),
        ("swiglu_limit", json!(-1)),
        ("rope_theta", json!(1)),
        ("rope_scaling", json!({ "type": "linear", "factor": 2 })),
        ("rope_scaling", json!({ "factor": 2 })),
        ("rope_scaling", json!({ "type": "yarn", "factor": 0.5 })),
        (
            "rope_scaling",
            json!({
                "type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 32,
                "original_max_position_embeddings": 64,
            }),
        ),
        (
            "rope_scaling",
            json!({
                "rope_type": "yarn", "type": "linear", "factor": 2, "beta_fast": 32, "beta_slow": 1,
                "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 1,
                "attention_factor": 1.2,
            }),
        ),
        (
            "rope_scaling",
            json!({ "rope_type": "default", "type": "yarn" }),
        ),
        ("topk_method", json!("greedy")),
        ("n_group", json!(8)),
        ("topk_group", json!(4)),
        ("attention_bias", json!(true)),
        ("model_type", json!("deepseek_v3")),
        ("architectures", json!(["LlamaForCausalLM"])),
        ("quantization_config", json!({ "quant_method": "awq" })),
        ("quantization_config", json!("fp8")),
        ("compress_ratios", json!([0, 0, -2])),
        ("compress_ratios", json!([0, 2, 2])),
        ("kv_source_layer_ids", json!([2, 8, 14, 20, 22])),
        ("kv_source_layer_ids", json!([2, 14, 8, 20])),
        ("kv_source_layer_ids", json!([2, 8, 8, 14, 20])),
        (
            "index_source_layer_ids",
            json!([2, 8, 14, 20, 24, 28, 36, 32]),
        ),
        ("kv_source_layer_ids", json!([8, 14, 20])),
        ("kv_source_layer_ids", json!([2, 8, 14])),
        ("kv_source_layer_ids", json!([2, 8, 14, 20, 40])),
        ("kv_source_layer_ids", json!([0, 2, 8, 14, 20])),
        ("index_source_layer_ids", json!([1, 2, 8, 14, 20, 41])),
        ("index_source_layer_ids", json!([2, 8, 20])),
        ("candidate_source_layer_id", json!(1.5)),
        ("candidate_source_layer_id", json!(24)),
        ("candidate_source_layer_id", json!(14)),
        ("candidate_source_layer_id", json!(99)),
        ("candidate_topk_blocks", json!(64)),
        ("candidate_topk_blocks", json!(0)),
        ("engram_layer_ids", json!([14, 1])),
        ("engram_layer_ids", json!([1, 1])),
        ("engram_layer_ids", json!([1, 40])),
        ("engram_layer_ids", json!([1])),
        ("engram_num_embeddings", json!([5, 0])),
        ("engram_max_ngram_size", json!(1)),
        ("engram_pad_token_id", json!(129_280)),
        ("eos_token_id", json!([1, 129_280])),
        ("bos_token_id", json!(-1)),
        ("num_hidden_layers", json!(1025)),
        ("n_routed_experts", json!(4097)),
        ("sliding_window", json!((1 << 24) + 1)),
        ("sliding_window", json!((1 << 20) + 1)),
        ("compress_ratios", json!([0, 0, (1 << 20) + 1])),
        ("kv_source_layer_ids", json!(vec![2; 41])),
        ("index_source_layer_ids", json!(vec![2; 41])),
        ("hc_eps", json!(1e300)),
        ("routed_scaling_factor", json!(1e39)),
        ("routed_scaling_factor", json!(1e-60)),
        ("swiglu_limit", json!(1e-46)),
        ("rms_norm_eps", json!(1e-100)),
        ("hc_mult", json!(9)),
        ("gate_temp", json!(3.0)),
        ("first_k_dense_replace", json!(3)),
        ("moe_layer_freq", json!(2)),
        ("n_hash_layers", json!(3)),
        ("num_hash_layers", json!(3)),
        ("attn_logit_softcapping", json!(50.0)),
        ("final_logit_softcapping", json!(30.0)),
        ("logit_softcap", json!(30)),
        ("use_qk_norm", json!(false)),
        ("rope_interleave", json!(false)),
        ("indexer_rope_interleave", json!(false)),
        ("max_seq_len", json!(4096)),
        ("n_positions", json!(1024)),
        ("seq_length", json!("8192")),
        ("expert_dtype", json!("nvfp4")),
        ("quant_method", json!("awq")),
        ("engram_max_ngram_size", json!(65)),
        ("engram_n_heads", json!(1366)),
    ] {
        let error = changed(|text| text[key] = value.clone()).unwrap_err();
        writeln!(report, "{key} = {value}\n{error}\n").unwrap();
    }
    insta::assert_snapshot!("every_rule", report);
}

/// What stands beside the decoder's part is about it, too.
#[test]
fn another_family_or_quantisation_beside_the_decoders_part_is_refused() {
    let mut json = release();
    json["model_type"] = "deepseek_v3".into();
    json["architectures"] = json!(["DeepseekV3ForCausalLM", "DeepseekV4ForCausalLM"]);
    json["quantization_config"]["quant_method"] = "gptq".into();
    insta::assert_snapshot!("beside", parse(&json).unwrap_err().to_string());
}

/// Two candidate blocks too few would do; the bound itself is accepted.
#[test]
fn the_candidate_rule_is_exact() {
    // (65 - 1) * 8 + 1 = 513, (64 - 1) * 8 + 1 = 505; index_topk is 512.
    assert!(changed(|text| text["candidate_topk_blocks"] = 65.into()).is_ok());
    assert!(changed(|text| text["candidate_topk_blocks"] = 64.into()).is_err());
    assert!(
        changed(|text| {
            text["candidate_topk_blocks"] = 64.into();
            text["index_topk"] = 505.into();
        })
        .is_ok()
    );
}

/// Some files say it outside of `quantization_config`, where it would be passed over.
#[test]
fn formats_outside_of_their_object_are_judged_by_what_it_says() {
    let with = |outside: &str| {
        let mut json = release();
        json["expert_dtype"] = outside.into();
        parse(&json)
    };
    with("fp4").unwrap();
    insta::assert_snapshot!(with("fp8").unwrap_err().to_string(), @r#"
    config.json breaks 1 rule:
      expert_dtype: expected "fp4", as quantization_config has it, found "fp8", beside text_config
    "#);
    changed(|text| text["expert_dtype"] = "bf16".into()).unwrap_err();
    // Of two such objects the decoder's own is read.
    let error = changed(|text| text["quantization_config"] = json!({ "expert_dtype": "fp8" }));
    insta::assert_snapshot!(error.unwrap_err(), @r#"
    config.json breaks 1 rule:
      quantization_config.expert_dtype: expected "fp8", as text_config.quantization_config has it, found "fp4", beside text_config
    "#);
    // Also of a layer, and of a part of it.
    let error = changed(|text| {
        text["quantization_config"] = json!({
            "expert_dtype": "fp4",
            "layers.3.ffn": { "expert_dtype": "fp8" },
            "layers": { "4": { "fmt": "e5m2" } },
        });
    });
    insta::assert_snapshot!(error.unwrap_err(), @r#"
    config.json breaks 2 rules:
      text_config.quantization_config.layers.4.fmt: expected "e4m3" (nothing else is supported), found "e5m2"
      text_config.quantization_config."layers.3.ffn".expert_dtype: expected "fp4", as text_config.quantization_config has it, found "fp8"
    "#);
    for dtype in ["fp4", "fp8", "bf16"] {
        let mut json = release();
        json["expert_dtype"] = dtype.into();
        json["quantization_config"] = Value::Null;
        parse(&json).unwrap();
    }
}

#[test]
fn violations_are_reported_together() {
    let error = changed(|text| {
        text["hidden_size"] = "big".into();
        text["o_groups"] = 7.into();
        text["qk_rope_head_dim"] = 1025.into();
        text["kv_source_layer_ids"] = json!([2, 8, 14, 20, 50]);
        text["rope_scaling"]["factor"] = Value::Null;
        text["engram_num_embeddings"] = json!([1, 2, 3]);
        text["compress_ratios"][5] = 1.into();
        text.as_object_mut().unwrap().remove("hc_eps");
    });
    let error = error.unwrap_err();
    insta::assert_snapshot!("together", error.to_string());
    let ConfigError::Invalid { violations, .. } = error else {
        panic!("{error}")
    };
    let fields: Vec<&str> = violations.iter().map(|v| v.field.as_str()).collect();
    assert!(fields.contains(&"text_config.hidden_size"));
    assert!(fields.contains(&"text_config.rope_scaling.factor"));
}

/// JSON has numbers that f64 has not, and the parser stops there: the error says under which key.
#[test]
fn numbers_that_are_none_are_named_by_key_and_line() {
    let text = serde_json::to_string_pretty(&release()).unwrap();
    let mut report = String::new();
    for (key, value, by) in [
        ("rms_norm_eps", "1e-20", "1e400"),
        ("hidden_size", "5120", "-1e999"),
        ("factor", "16", "1e309"),
        ("hc_eps", "1e-6", ".5"),
        ("rope_theta", "10000", "1_000"),
        ("swiglu_limit", "10.0", "NaN"),
        ("num_attention_heads", "64", "0x40"),
    ] {
        let line = format!("\"{key}\": {value}");
        assert!(text.contains(&line), "{line}");
        let text = text.replace(&line, &format!("\"{key}\": {by}"));
        let error = Config::from_json(&text, "config.json".as_ref()).unwrap_err();
        writeln!(report, "{key} = {by}\n{}\n", chain(&error)).unwrap();
    }
    insta::assert_snapshot!("no_numbers", report);
}

/// Of two values for a key the parser would take the last and say nothing.
#[test]
fn keys_that_are_there_twice() {
    let text = release().to_string();
    let doubled = text
        .replace(
            "\"hidden_size\":5120",
            "\"hidden_size\":4096,\"hidden_size\":5120",
        )
        .replace("\"factor\":16", "\"factor\":16,\"factor\":\"16\"")
        .replace("\"o_groups\":8", "\"o_groups\":7");
    let error = Config::from_json(&doubled, "config.json".as_ref()).unwrap_err();
    insta::assert_snapshot!("twice", error.to_string());
}

/// JSON escapes what is below a blank, and leaves what turns the rest of a message around.
#[test]
fn values_are_quoted_so_that_they_can_be_read() {
    let error = changed(|text| text["hidden_act"] = "\u{202e}uleg\u{9b}\u{2066}\n".into());
    insta::assert_snapshot!(error.unwrap_err(), @r#"
    config.json breaks 1 rule:
      text_config.hidden_act: expected "silu" (nothing else is supported), found "\u{202e}uleg\u{9b}\u{2066}\n"
    "#);
}

/// A list of a million ids is neither printed nor compared pair by pair.
#[test]
fn long_lists_are_refused_by_their_length() {
    let million: Vec<u32> = (0..1_000_000).collect();
    let error = changed(|text| {
        text["engram_layer_ids"] = json!(million);
        text["eos_token_id"] = json!(million);
        text["kv_source_layer_ids"] = json!(million);
    });
    insta::assert_snapshot!("long_lists", error.unwrap_err().to_string());
}

#[test]
fn files_that_cannot_be_read() {
    let dir = tempfile::TempDir::new().unwrap();
    let refusal = |text: Option<&str>| {
        if let Some(text) = text {
            fs::write(dir.path().join("config.json"), text).unwrap();
        }
        let error = chain(&Config::load(dir.path()).unwrap_err());
        error.replace(dir.path().to_str().unwrap(), "DIR")
    };
    // What follows is the system's own wording.
    assert!(refusal(None).starts_with("cannot read DIR/config.json: "));
    insta::assert_snapshot!("empty", refusal(Some("")));
    insta::assert_snapshot!("cut", refusal(Some("{\"text_config\": {")));
    insta::assert_snapshot!("a_list", refusal(Some("[1]")));
    insta::assert_snapshot!(
        "text_config_of_wrong_type",
        refusal(Some("{\"text_config\": 5}"))
    );
    let empty = refusal(Some("{}"));
    assert!(empty.contains("DIR/config.json breaks 30 rules"), "{empty}");
}
