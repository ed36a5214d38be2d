//! Configurations that are understood.

use std::{fmt::Write, fs, path::Path};

use deepseek_model::{
    Config,
    config::{CandidateConfig, EngramConfig, ExpertDtype, LayerSchedule, Scoring, Yarn},
};
use serde_json::{Value, json};

use crate::{changed, parse, release};

#[test]
fn the_release() {
    let config = parse(&release()).unwrap();
    let layers = config.layers.clone();
    assert_eq!(
        config,
        Config {
            vocab_size: 129_280,
            hidden_size: 5120,
            num_heads: 64,
            head_dim: 512,
            rope_dim: 64,
            q_lora_rank: 1280,
            o_groups: 8,
            o_lora_rank: 1024,
            moe_intermediate_size: 2304,
            num_experts: 384,
            experts_per_token: 6,
            scoring: Scoring::SqrtSoftplus,
            norm_topk_prob: true,
            routed_scaling_factor: 1.5,
            swiglu_limit: 10.0,
            rms_norm_eps: 1e-20,
            sliding_window: 128,
            hc_mult: 4,
            hc_sinkhorn_iters: 20,
            hc_eps: 1e-6,
            index_heads: 32,
            index_dim: 128,
            index_topk: 512,
            candidates: Some(CandidateConfig {
                source: 20,
                top_blocks: 2048,
                block_size: 8
            }),
            rope_theta: 10_000.0,
            compress_rope_theta: 160_000.0,
            yarn: Some(Yarn {
                factor: 16.0,
                beta_fast: 32.0,
                beta_slow: 1.0,
                original_max_position: 65_536,
            }),
            max_positions: 1_048_576,
            bos_token_id: Some(0),
            eos_token_ids: vec![1],
            engram: Some(EngramConfig {
                layers: vec![1, 14],
                table_rows: vec![384_006_168, 384_016_682],
                max_ngram: 4,
                heads: 8,
                head_dim: 256,
                vocab_size: 16_000_000,
                pad_token_id: 2,
                compressed_vocab_size: 99_092,
            }),
            expert_dtype: Some(ExpertDtype::Fp4),
            layers,
        }
    );
    insta::assert_snapshot!("release_schedule", table(&config.layers));
}

fn table(layers: &[LayerSchedule]) -> String {
    let show = |id: Option<usize>| id.map_or("-".into(), |id| id.to_string());
    let mut out = String::from("layer ratio kv index engram\n");
    for (i, layer) in layers.iter().enumerate() {
        let (kv, index) = (show(layer.kv_source), show(layer.index_source));
        writeln!(
            out,
            "{i:5} {:5} {kv:>2} {index:>5} {:>6}",
            layer.ratio,
            show(layer.engram)
        )
        .unwrap();
    }
    out
}

#[test]
fn fixtures_and_the_demo() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for name in ["bf16-s1", "fp4-s1", "engram-s1"] {
        let config = Config::load(&root.join("tests/data").join(name)).unwrap();
        assert_eq!(config.layers.len(), 9);
        assert_eq!(config.engram.is_some(), name == "engram-s1");
    }
    let demo = Config::load(&root.join("../../models/v41-demo")).unwrap();
    assert_eq!((demo.layers.len(), &demo.eos_token_ids[..]), (12, &[1][..]));
    insta::assert_snapshot!("demo_schedule", table(&demo.layers));
}

#[test]
fn a_flat_file_means_the_same() {
    let mut flat = release();
    let text = flat.as_object_mut().unwrap().remove("text_config").unwrap();
    flat.as_object_mut()
        .unwrap()
        .extend(text.as_object().unwrap().clone());
    assert_eq!(parse(&flat).unwrap(), parse(&release()).unwrap());

    flat["text_config"] = Value::Null;
    assert_eq!(parse(&flat).unwrap(), parse(&release()).unwrap());
}

#[test]
fn rope_parameters_are_rope_scaling() {
    let renamed = changed(|text| {
        text["rope_parameters"] = text["rope_scaling"].take();
        text["rope_parameters"]["rope_type"] = text["rope_parameters"]["type"].take();
    });
    assert_eq!(renamed.unwrap(), parse(&release()).unwrap());
}

#[test]
fn what_may_be_off() {
    let off = changed(|text| {
        let keys = text.as_object_mut().unwrap();
        keys.retain(|key, _| {
            !["rope_scaling", "candidate", "engram"]
                .iter()
                .any(|p| key.starts_with(p))
        });
    });
    let off = off.unwrap();
    assert_eq!((off.yarn, off.candidates, off.engram), (None, None, None));
    assert!(off.layers.iter().all(|layer| layer.engram.is_none()));

    let off = changed(|text| {
        text["rope_scaling"] = json!({ "rope_type": "default" });
        text["candidate_source_layer_id"] = (-1).into();
        text["engram_layer_ids"] = json!([]);
    });
    let off = off.unwrap();
    assert_eq!((off.yarn, off.candidates, off.engram), (None, None, None));
}

#[test]
fn a_short_list_of_ratios_ends_in_zeros() {
    let config = changed(|text| {
        text["compress_ratios"] = json!([0, 0, 2]);
        text["kv_source_layer_ids"] = json!([2]);
        text["index_source_layer_ids"] = json!([2]);
        text["candidate_source_layer_id"] = Value::Null;
    });
    let ratios: Vec<usize> = config
        .unwrap()
        .layers
        .iter()
        .map(|layer| layer.ratio)
        .collect();
    assert_eq!(ratios, [&[0, 0, 2][..], &[0; 37]].concat());
}

/// Names and values that ask for nothing else than what is computed.
#[test]
fn keys_of_the_one_supported_variant() {
    let named = changed(|text| {
        text["model_type"] = "deepseek_v41_text".into();
        text["architectures"] = json!([]);
        text["n_group"] = 1.into();
        text["topk_group"] = Value::Null;
        text["gate_temp"] = 1.into();
        text["first_k_dense_replace"] = 0.into();
        text["moe_layer_freq"] = 1.into();
        text["n_hash_layers"] = 0.into();
        text["final_logit_softcapping"] = Value::Null;
        text["logit_softcap"] = json!(0.0);
        text["use_qk_norm"] = true.into();
        text["rope_interleave"] = true.into();
        text["indexer_rope_interleave"] = true.into();
        text["n_positions"] = text["max_position_embeddings"].clone();
        text["max_seq_len"] = Value::Null;
        text["quant_method"] = "fp8".into();
        text["attention_bias"] = false.into();
        text["moe_layer_freq"] = json!(vec![1; 43]);
        text["quantization_config"] = json!({ "fmt": "e4m3" });
        text["rope_scaling"]["rope_type"] = "yarn".into();
        text["rope_scaling"]["mscale"] = json!(0.0);
        text["rope_scaling"]["mscale_all_dim"] = 0.into();
    });
    assert_eq!(named.unwrap(), parse(&release()).unwrap());
    for name in [
        "DeepseekV41ForCausalLM",
        "DeepseekV41ForConditionalGeneration",
    ] {
        changed(|text| text["architectures"] = json!([name])).unwrap();
    }
}

/// As many streams as a mixing site has room for, on every device.
#[test]
fn eight_streams() {
    let config = changed(|text| text["hc_mult"] = 8.into()).unwrap();
    assert_eq!(config.hc_mult, 8);
}

#[test]
fn score_functions() {
    for (name, scoring) in [("sigmoid", Scoring::Sigmoid), ("softmax", Scoring::Softmax)] {
        assert_eq!(
            changed(|text| text["scoring_func"] = name.into())
                .unwrap()
                .scoring,
            scoring
        );
    }
}

#[test]
fn stop_tokens_come_from_both_files() {
    let dir = tempfile::TempDir::new().unwrap();
    let write =
        |name: &str, json: Value| fs::write(dir.path().join(name), json.to_string()).unwrap();
    let mut config = release();
    config["eos_token_id"] = json!([1, 5]);
    write("config.json", config);
    write(
        "generation_config.json",
        json!({ "eos_token_id": [7, 1], "temperature": 0.5 }),
    );
    assert_eq!(Config::load(dir.path()).unwrap().eos_token_ids, [1, 5, 7]);

    // Or from the decoder's part.
    let mut config = release();
    config["eos_token_id"] = Value::Null;
    config["text_config"]["eos_token_id"] = 9.into();
    write("config.json", config);
    write("generation_config.json", json!({}));
    assert_eq!(Config::load(dir.path()).unwrap().eos_token_ids, [9]);

    write(
        "generation_config.json",
        json!({ "eos_token_id": [7, 129_280, "x"] }),
    );
    let error = Config::load(dir.path()).unwrap_err().to_string();
    insta::assert_snapshot!(
        "generation_ids",
        error.replace(dir.path().to_str().unwrap(), "DIR")
    );
    // Who copied it from another model would get texts of another beginning.
    write("generation_config.json", json!({ "bos_token_id": 0 }));
    Config::load(dir.path()).unwrap();
    write("generation_config.json", json!({ "bos_token_id": 5 }));
    let error = Config::load(dir.path()).unwrap_err().to_string();
    let error = error.replace(dir.path().to_str().unwrap(), "DIR");
    insta::assert_snapshot!(error, @r"
    DIR/generation_config.json breaks 1 rule:
      bos_token_id: expected 0, as config.json has it, found 5
    ");
    write("generation_config.json", json!({ "eos_token_id": 129_280 }));
    let error = Config::load(dir.path()).unwrap_err().to_string();
    insta::assert_snapshot!(
        "generation_range",
        error.replace(dir.path().to_str().unwrap(), "DIR")
    );
}
