//! Keys by which other families of models ask for another computation over the same tensors, so that
//! no missing tensor would tell: each with the value that asks for what is computed here.
//!
//! Sizes are not among them: a tensor of another shape is refused by itself.

use serde_json::{Map, Value};

use super::{fields::Fields, per_layer, rope};

/// What a key may hold. It may also be absent or `null`.
enum Neutral {
    /// Nothing but `null`.
    Null,
    /// 0, or `false` for a feature that is off.
    Zero,
    /// 1.
    One,
    /// 1, or two of them, one for each of a layer's parts.
    Ones,
    False,
    True,
    /// An empty list.
    Empty,
    /// One of these names.
    Name(&'static [&'static str]),
}

use Neutral::{Empty, False, Name, Null, One, Ones, True, Zero};

/// What is computed here, and the keys whose other values ask for something else.
const KEYS: &[(Neutral, &str, &[&str])] = &[
    (
        One,
        "nothing else is supported",
        &["num_key_value_heads", "n_group", "topk_group"],
    ),
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
            "scale_emb",
        ],
    ),
    (False, "embeddings are not scaled", &["scale_embedding"]),
    (
        One,
        "what a layer adds is not scaled",
        &[
            "residual_multiplier",
            "residual_scale",
            "attention_in_multiplier",
            "attention_out_multiplier",
            "attn_output_multiplier",
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
        &["hidden_act", "hidden_activation", "activation_function"],
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
        &["scale_attn_by_inverse_layer_idx", "alibi", "use_alibi"],
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
        &["attn_output_gate", "attention_output_gate"],
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
        "the head has its own weights",
        &["tie_word_embeddings", "tie_embeddings"],
    ),
];

/// Notes every key of an object that asks for something else. `text` is the decoder's part, whose
/// sizes and schedule say what some keys may hold.
pub(super) fn check(f: &mut Fields<'_>, text: &Map<String, Value>) {
    for (neutral, why, keys) in KEYS {
        for key in *keys {
            neutral.check(f, key, why);
        }
    }
    // The families that cap spell it in many ways.
    for key in f.names().filter(|key| caps(key)) {
        Zero.check(f, key, "nothing is capped");
    }
    scales(f, text);
    rotated_channels(f, text);
    base(f, text, &["rotary_emb_base", "rotary_base", "rope_base"]);
    per_layer::check(f, text);
    if let Some(mut f) = f.object("attn_config") {
        check(&mut f, text);
        base(&mut f, text, &["rope_theta"]);
    }
}

impl Neutral {
    fn check(&self, f: &mut Fields<'_>, key: &str, why: &str) {
        let value = match self {
            Null => "null".to_owned(),
            Zero => "0 or null".to_owned(),
            One => "1".to_owned(),
            Ones => "1, or a list of two ones".to_owned(),
            False => "false".to_owned(),
            True => "true".to_owned(),
            Empty => "an empty list".to_owned(),
            Name(names) => format!("{:?}", names[0]),
        };
        let expected = format!("{value} ({why})");
        f.optional(key, &expected, (), |value| self.is(value).then_some(()));
    }

    fn is(&self, value: &Value) -> bool {
        match self {
            Null => false,
            Zero => value.as_f64() == Some(0.0) || value == &Value::Bool(false),
            One => value.as_f64() == Some(1.0),
            Ones => match value {
                Value::Array(all) => all.len() == 2 && all.iter().all(|value| One.is(value)),
                value => One.is(value),
            },
            False => value == &Value::Bool(false),
            True => value == &Value::Bool(true),
            Empty => value.as_array().is_some_and(Vec::is_empty),
            Name(names) => value.as_str().is_some_and(|name| names.contains(&name)),
        }
    }
}

/// `attn_logit_softcapping`, `logits_soft_cap`, `final_logit_cap` and others.
fn caps(key: &str) -> bool {
    let key = key.replace('_', "");
    key.contains("softcap") || key.ends_with("logitcap") || key.ends_with("logitscap")
}

/// Other names of the base that `rope_theta` has here.
fn base(f: &mut Fields<'_>, text: &Map<String, Value>, keys: &[&str]) {
    let Some((name, theta)) = rope::theta(text) else {
        return;
    };
    let expected = format!("{theta}, as {name} has it");
    for key in keys {
        f.optional(key, &expected, (), |v| (v.as_f64()? == theta).then_some(()));
    }
}

/// Keys that replace the factor of attention scores, which is that of `head_dim` here.
fn scales(f: &mut Fields<'_>, text: &Map<String, Value>) {
    let Some(dim) = text.get("head_dim").and_then(Value::as_f64) else {
        return;
    };
    let factor = format!("1 / sqrt(head_dim) ({})", 1.0 / dim.sqrt());
    let is_factor = |x: f64| (x * dim.sqrt() - 1.0).abs() < 1e-4;
    for key in ["attention_multiplier", "softmax_scale"] {
        f.optional(key, &factor, (), |v| is_factor(v.as_f64()?).then_some(()));
    }
    let expected = format!("head_dim ({dim})");
    f.optional("query_pre_attn_scalar", &expected, (), |v| {
        (v.as_f64()? == dim).then_some(())
    });
}

/// The keys that say which channels rotate.
pub(super) const CHANNELS: [&str; 5] = [
    "partial_rotary_factor",
    "rotary_pct",
    "rotary_percent",
    "rope_pct",
    "rotary_dim",
];

/// Keys that say which channels rotate, as a number or as a share: `qk_rope_head_dim` says it here. A
/// share of 1 is that of the channels that rotate.
pub(super) fn rotated_channels(f: &mut Fields<'_>, text: &Map<String, Value>) {
    let width = |key| text.get(key).and_then(Value::as_f64);
    let (Some(rotated), Some(all)) = (width("qk_rope_head_dim"), width("head_dim")) else {
        return;
    };
    let share = rotated / all;
    let expected = format!("qk_rope_head_dim / head_dim ({share}), or 1");
    let [shares @ .., width] = CHANNELS;
    for key in shares {
        f.optional(key, &expected, (), |v| {
            let found = v.as_f64()?;
            (found == 1.0 || (found - share).abs() < 1e-6).then_some(())
        });
    }
    let expected = format!("qk_rope_head_dim ({rotated})");
    f.optional(width, &expected, (), |v| {
        (v.as_f64()? == rotated).then_some(())
    });
}
