//! Other families' names of keys that are read here. Beside the name that is read they would be passed
//! over, so that they must say the same.

use serde_json::{Map, Value};

use super::{error::quoted, fields::Fields};

/// The key that is read, and its other names. Those of sizes are not among them where a tensor of another
/// shape is refused by itself: no tensor has that of the window, of the positions, of the choice of entries
/// or of the channels that rotate. Those of `head_dim` are names of one part of a head in other families,
/// as its values, which has all channels here.
const NAMES: &[(&str, &[&str])] = &[
    (
        "sliding_window",
        &[
            "window_size",
            "sliding_window_size",
            "attention_window",
            "attention_window_size",
        ],
    ),
    (
        "max_position_embeddings",
        &[
            "max_positions",
            "max_position",
            "n_positions",
            "n_ctx",
            "max_seq_len",
            "max_seq_length",
            "max_sequence_length",
            "seq_len",
            "seq_length",
            "max_context_length",
            "max_context_len",
            "context_length",
            "context_len",
            "context_window",
            "model_max_length",
            "max_model_len",
            "max_sequence_len",
            "max_target_positions",
        ],
    ),
    (
        "scoring_func",
        &[
            "score_func",
            "score_function",
            "moe_router_activation_func",
            "moe_router_score_function",
            "moe_router_score_func",
            "router_score_func",
            "moe_router_activation",
        ],
    ),
    (
        "routed_scaling_factor",
        &[
            "route_scale",
            "moe_router_topk_scaling_factor",
            "moe_router_scaling_factor",
            "router_scaling_factor",
        ],
    ),
    (
        "norm_topk_prob",
        &[
            "route_norm",
            "moe_renormalize",
            "moe_norm_topk_prob",
            "norm_expert_weight",
        ],
    ),
    (
        "num_experts_per_tok",
        &[
            "num_experts_per_token",
            "experts_per_token",
            "n_activated_experts",
            "num_activated_experts",
            "moe_router_topk",
            "moe_topk",
            "moe_top_k",
            "moe_k",
            "top_k_experts",
        ],
    ),
    (
        "qk_rope_head_dim",
        &["rope_head_dim", "qk_rope_dim", "rope_dim", "rotary_emb_dim"],
    ),
    (
        "head_dim",
        &[
            "v_head_dim",
            "value_head_dim",
            "qk_head_dim",
            "head_size",
            "attention_head_size",
            "attention_head_dim",
            "kv_channels",
            "d_head",
        ],
    ),
    (
        "index_topk",
        &["index_top_k", "indexer_topk", "indexer_top_k"],
    ),
    (
        "rms_norm_eps",
        &[
            "norm_eps",
            "norm_epsilon",
            "rms_norm_epsilon",
            "layer_norm_eps",
            "layer_norm_epsilon",
            "layernorm_epsilon",
        ],
    ),
];

/// Notes every other name in an object that says something else than the decoder's part, `text`.
pub(super) fn check(f: &mut Fields<'_>, text: &Map<String, Value>) {
    for (key, names) in NAMES {
        // Where it is absent, that is noted already.
        let Some(value) = text.get(*key).filter(|value| !value.is_null()) else {
            continue;
        };
        let expected = format!("{}, as {key} has it", quoted(value));
        for name in *names {
            f.optional(name, &expected, (), |v| same(v, value).then_some(()));
        }
    }
}

/// Whether two values are the same; 1 and 1.0 are.
pub(super) fn same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}
