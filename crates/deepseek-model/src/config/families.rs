//! Keys by which other families of models ask for another computation, each with the value that asks
//! for what is computed here.

use super::neutral::Neutral::{self, Empty, False, Name, Null, One, Ones, True, Zero};

/// What is computed here, and the keys whose other values ask for something else.
pub(super) const KEYS: &[(Neutral, &str, &[&str])] = &[
    (One, "nothing else is supported", &["num_key_value_heads"]),
    (
        One,
        "experts are in no groups",
        &[
            "n_group",
            "topk_group",
            "num_expert_group",
            "n_expert_groups",
            "n_limited_groups",
            "moe_router_num_groups",
            "moe_router_group_topk",
        ],
    ),
    (False, "experts are in no groups", &["use_grouped_topk"]),
    (
        One,
        "nothing else is supported",
        &[
            "n_shared_experts",
            "num_shared_experts",
            "moe_num_shared_experts",
        ],
    ),
    (
        One,
        "every layer has experts",
        &[
            "decoder_sparse_step",
            "interleave_moe_layer_step",
            "moe_layer_interval",
        ],
    ),
    (
        Zero,
        "every layer has experts",
        &[
            "first_k_dense_replace",
            "num_dense_layers",
            "moe_layer_start_index",
        ],
    ),
    (Empty, "every layer has experts", &["mlp_only_layers"]),
    (
        Zero,
        "no layer routes by token id",
        &["n_hash_layers", "num_hash_layers"],
    ),
    (One, "router logits are not divided", &["gate_temp"]),
    (
        False,
        "experts' outputs are weighted",
        &[
            "apply_router_weight_on_input",
            "moe_apply_router_weight_on_input",
        ],
    ),
    (
        False,
        "the shared expert has no gate",
        &["shared_expert_gate", "use_shared_expert_gate"],
    ),
    (
        One,
        "logits are not scaled",
        &[
            "logit_scale",
            "logits_scale",
            "logits_scaling",
            "lm_head_multiplier",
            "output_multiplier",
            "output_multiplier_scale",
        ],
    ),
    (Null, "logits are not scaled", &["dim_model_base"]),
    (
        One,
        "embeddings are not scaled",
        &[
            "embedding_multiplier",
            "embedding_multiplier_scale",
            "embedding_scale",
            "emb_scale",
            "embed_scale",
            "embeddings_scale",
            "scale_emb",
        ],
    ),
    (
        False,
        "embeddings are not scaled",
        &["scale_embedding", "scale_embeddings"],
    ),
    (
        False,
        "nothing is scaled by width",
        &["mup_enabled", "use_mup"],
    ),
    (
        One,
        "what a layer adds is not scaled",
        &[
            "residual_multiplier",
            "residual_scale",
            "attention_in_multiplier",
            "attention_out_multiplier",
            "attn_output_multiplier",
            "attention_value_scale",
            "key_multiplier",
        ],
    ),
    (
        Ones,
        "what a layer adds is not scaled",
        &["mlp_multipliers"],
    ),
    (Null, "what a layer adds is not scaled", &["scale_depth"]),
    (One, "experts gate by silu", &["swiglu_alpha"]),
    (
        Name(&["silu"]),
        "nothing else is supported",
        &[
            "hidden_act",
            "hidden_activation",
            "activation_function",
            "mlp_hidden_act",
            "ffn_act_fn",
        ],
    ),
    (
        Name(&["noaux_tc"]),
        "nothing else is supported",
        &["topk_method"],
    ),
    (
        Name(&["rmsnorm", "rms_norm"]),
        "nothing else is supported",
        &["norm_type"],
    ),
    (
        False,
        "a norm's weight is its factor, without 1 added",
        &[
            "layernorm_zero_centered",
            "layernorm_zero_centered_gamma",
            "apply_layernorm_1p",
            "zero_centered_rmsnorm",
        ],
    ),
    (
        True,
        "queries and keys are normed",
        &["use_qk_norm", "qk_norm", "qk_layernorm", "use_qk_layernorm"],
    ),
    (
        True,
        "scores are divided by the root of head_dim",
        &["scale_attn_weights"],
    ),
    (
        False,
        "scores do not depend on the layer or the position",
        &[
            "scale_attn_by_inverse_layer_idx",
            "alibi",
            "use_alibi",
            "use_logn_attn",
            "use_logn_attention",
        ],
    ),
    (
        Zero,
        "scores do not depend on the layer or the position",
        &["attn_temperature_tuning"],
    ),
    (
        Null,
        "queries, keys and values are not clipped",
        &["clip_qkv"],
    ),
    (
        False,
        "attention has no gate",
        &[
            "attn_output_gate",
            "attention_output_gate",
            "use_attn_output_gate",
            "use_head_wise_attn_gate",
            "head_wise_attn_output_gate",
            "elementwise_attn_output_gate",
        ],
    ),
    (
        False,
        "the projections have no biases",
        &[
            "attention_bias",
            "attention_out_bias",
            "mlp_bias",
            "bias",
            "use_bias",
            "qkv_bias",
            "use_qkv_bias",
            "add_qkv_bias",
            "add_bias_linear",
            "lm_head_bias",
        ],
    ),
    (
        False,
        "experts read what attention wrote",
        &[
            "parallel_residual",
            "use_parallel_residual",
            "parallel_attn",
            "parallel_block",
        ],
    ),
    (
        False,
        "norms stand before a layer's parts",
        &[
            "use_post_norm",
            "sandwich_norm",
            "apply_residual_connection_post_layernorm",
        ],
    ),
    (True, "no row reads one that comes after it", &["is_causal"]),
    (
        False,
        "no row reads one that comes after it",
        &["use_bidirectional_attention"],
    ),
    (True, "every layer has a window", &["use_sliding_window"]),
    (Zero, "every layer has a window", &["max_window_layers"]),
    (
        Null,
        "what a layer attends to follows from compress_ratios",
        &[
            "sliding_window_pattern",
            "attention_chunk_size",
            "full_attention_interval",
            "hybrid_layer_pattern",
            "hybrid_override_pattern",
            "layers_block_type",
            "attn_type_list",
            "linear_attn_config",
        ],
    ),
    (
        Zero,
        "no layer reads another's window KV",
        &["num_kv_shared_layers"],
    ),
    (
        True,
        "neighbouring channels are a pair",
        &["rope_interleave", "rope_interleaved"],
    ),
    (
        Name(&["rope", "rotary"]),
        "nothing else is supported",
        &["position_embedding_type"],
    ),
    (
        Null,
        "every layer rotates",
        &["no_rope_layer_interval", "nope_layer_interval"],
    ),
    (
        Null,
        "all windows rotate by rope_theta",
        &["rope_local_base_freq", "local_rope_theta", "swa_rope_theta"],
    ),
    (One, "positions are not stretched so", &["rope_ratio"]),
    (
        False,
        "positions are not stretched so",
        &["use_dynamic_ntk", "dynamic_ntk"],
    ),
    (
        Null,
        "rope_scaling says how positions are stretched",
        &["rotary"],
    ),
    (
        Zero,
        "stretching leaves scores as they are",
        &["mscale", "mscale_all_dim"],
    ),
    (
        False,
        "the head has its own weights",
        &["tie_word_embeddings", "tie_embeddings"],
    ),
];
