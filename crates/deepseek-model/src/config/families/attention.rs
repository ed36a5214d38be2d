//! Keys of other families that say what a row attends to, and by which scores.

use super::{
    Key,
    Neutral::{False, Null, One, True, Zero},
};

pub(super) const KEYS: &[Key] = &[
    (One, "nothing else is supported", &["num_key_value_heads"]),
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
            "attn_layer_period",
            "attn_layer_offset",
            "global_attn_every_n_layers",
            "linear_attn_config",
        ],
    ),
    (
        Zero,
        "no layer reads another's window KV",
        &["num_kv_shared_layers"],
    ),
    (False, "no layer reads another's window KV", &["use_cla"]),
    (
        True,
        "attention has sinks",
        &["add_swa_attention_sink_bias"],
    ),
    (
        False,
        "queries and keys are not scaled",
        &["mla_scale_q_lora", "mla_scale_kv_lora"],
    ),
    (True, "queries have a latent", &["use_mla"]),
];
