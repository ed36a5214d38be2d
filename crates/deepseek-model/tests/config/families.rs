//! Keys of other families of models, each with values that ask for what is computed here and one that does
//! not.

use serde_json::{Value, json};

/// The key, values that ask for what is computed, and one that asks for something else.
pub(crate) fn keys() -> Vec<(&'static str, Vec<Value>, Value)> {
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
        ("indexer_rope_interleaved", vec![json!(true)], json!(false)),
        ("interleaved_rope", vec![json!(true)], json!(false)),
        ("is_neox_style", vec![json!(false)], json!(true)),
        ("interleaved", vec![json!(true)], json!(false)),
        ("apply_rope_interleave", vec![json!(true)], json!(false)),
        ("is_neox", vec![json!(false)], json!(true)),
        ("rope_neox", vec![json!(false)], json!(true)),
        ("post_norm", vec![json!(false)], json!(true)),
        ("do_layer_norm_before", vec![json!(true)], json!(false)),
        (
            "normalization",
            vec![json!("rmsnorm"), json!("RMSNorm")],
            json!("layernorm"),
        ),
        ("mlp_alpha_factor", vec![json!(1)], json!(3.55)),
        ("use_correction_bias", vec![json!(true)], json!(false)),
        ("use_mla", vec![json!(true)], json!(false)),
        ("bits", vec![], json!(4)),
        ("group_size", vec![], json!(64)),
        ("quant_algo", vec![], json!("NVFP4")),
        (
            "weight_block_size",
            vec![json!([32, 32])],
            json!([128, 128]),
        ),
        ("activation_scheme", vec![json!("dynamic")], json!("static")),
        (
            "quantization",
            vec![
                json!({}),
                json!({ "quant_method": "fp8", "expert_dtype": "fp4" }),
            ],
            json!({ "bits": 4 }),
        ),
        ("quantization", vec![], json!({ "mode": "mxfp4" })),
        (
            "quantization",
            vec![json!({ "layers.0.wq_a": { "quant_method": "fp8" }, "layers.1.wq_a": true })],
            json!({ "layers.0.wq_a": { "bits": 4 } }),
        ),
        ("load_in_4bit", vec![json!(false)], json!(true)),
        ("load_in_8bit", vec![json!(false)], json!(true)),
        ("rope_traditional", vec![json!(true)], json!(false)),
        (
            "compression_config",
            vec![],
            json!({ "format": "pack-quantized" }),
        ),
        (
            "compression_config",
            vec![json!({ "weight_block_size": [32, 32] })],
            json!({ "quant_method": "compressed-tensors" }),
        ),
    ]
}

/// The same of keys that say once more, by another name, what is read: the neutral values are the
/// release's own.
pub(crate) fn repeated() -> Vec<(&'static str, Vec<Value>, Value)> {
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
        ("context_length", vec![json!(1_048_576)], json!(4096)),
        ("model_max_length", vec![json!(1_048_576)], json!(4096)),
        ("max_sequence_len", vec![json!(1_048_576)], json!(4096)),
        ("max_target_positions", vec![json!(1_048_576)], json!(4096)),
        ("max_model_len", vec![json!(1_048_576)], json!(4096)),
        ("max_context_len", vec![json!(1_048_576)], json!(4096)),
        ("rope_head_dim", vec![json!(64)], json!(32)),
        ("v_head_dim", vec![json!(512), json!(512.0)], json!(128)),
        ("qk_nope_head_dim", vec![json!(448)], json!(447)),
        ("index_top_k", vec![json!(512)], json!(2048)),
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
                "weight_block_size": [32, 32], "activation_scheme": "dynamic", "expert_dtype": "fp4",
            })],
            json!({ "fmt": "e5m2" }),
        ),
        (
            "quantization_config",
            vec![json!({ "config_groups": null, "load_in_4bit": false })],
            json!({ "config_groups": { "group_0": { "weights": { "num_bits": 4 } } } }),
        ),
    ]
}
