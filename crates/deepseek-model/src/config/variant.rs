//! Keys that name a variant of the model of which only one is supported. Each may be absent; with
//! another value the file asks for another computation than this one.

use serde_json::{Map, Value};

use super::{fields::Fields, raw::holder};

/// Notes every key that asks for something else.
pub(super) fn check(
    top: &Map<String, Value>,
    text: &Map<String, Value>,
    violations: &mut Vec<super::Violation>,
) {
    family(&mut Fields::new(top, violations));
    let f = &mut Fields::new(text, violations);
    // In a flat file the two are the same object.
    if !std::ptr::eq(top, text) {
        family(f);
    }
    for key in [
        "num_key_value_heads",
        "n_shared_experts",
        "n_group",
        "topk_group",
    ] {
        f.optional(key, "1 (nothing else is supported)", 1, |v| {
            v.as_u64().filter(|&n| n == 1)
        });
    }
    for (key, expected, only) in [
        ("first_k_dense_replace", "0 (every layer has experts)", 0),
        ("n_hash_layers", "0 (no layer routes by token id)", 0),
        ("num_hash_layers", "0 (no layer routes by token id)", 0),
    ] {
        f.optional(key, expected, only, |v| v.as_u64().filter(|&n| n == only));
    }
    f.optional("moe_layer_freq", "1 (every layer has experts)", 1, |v| {
        // One for all layers, or one for each.
        let all = v.as_array().map_or(std::slice::from_ref(v), Vec::as_slice);
        all.iter().all(|n| n.as_u64() == Some(1)).then_some(1)
    });
    f.optional("gate_temp", "1 (router logits are not divided)", 1.0, |v| {
        v.as_f64().filter(|&x| x == 1.0)
    });
    for key in [
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "logit_softcap",
    ] {
        f.optional(key, "0 or null (nothing is capped)", 0.0, |v| {
            v.as_f64().filter(|&x| x == 0.0)
        });
    }
    for (key, expected) in [
        ("use_qk_norm", "true (queries and keys are normed)"),
        ("rope_interleave", "true (neighbouring channels are a pair)"),
    ] {
        f.optional(key, expected, true, |v| v.as_bool().filter(|&set| set));
    }
    only_text(f, "hidden_act", "silu");
    only_text(f, "topk_method", "noaux_tc");
    only_false(
        f,
        "attention_bias",
        "false (the projections have no biases)",
    );
    // A tied head would otherwise surface as a missing tensor.
    let tied = &mut Fields::new(holder("tie_word_embeddings", top, text), violations);
    only_false(
        tied,
        "tie_word_embeddings",
        "false (the head has its own weights)",
    );
    let quantised = &mut Fields::new(holder("quantization_config", top, text), violations);
    if let Some(mut f) = quantised.object("quantization_config") {
        only_text(&mut f, "quant_method", "fp8");
    }
}

/// The attention factors that the `YaRN` of other models has. `mscale` and `mscale_all_dim` weigh the
/// logarithm of the factor, so that 0 stands for none.
pub(super) fn check_yarn(f: &mut Fields<'_>) {
    for key in ["mscale", "mscale_all_dim"] {
        f.optional(key, "0 (nothing else is supported)", 0.0, |v| {
            v.as_f64().filter(|&x| x == 0.0)
        });
    }
    f.optional(
        "attention_factor",
        "1 (nothing else is supported)",
        1.0,
        |v| v.as_f64().filter(|&x| x == 1.0),
    );
}

/// `architectures` and `model_type`, as the decoder's part and the file around it have them.
fn family(f: &mut Fields<'_>) {
    let expected = "a name that begins with \"deepseek_v41\"";
    f.optional("model_type", expected, "", |v| {
        v.as_str().filter(|name| is_ours(name))
    });
    let expected = "a list with a name that begins with \"DeepseekV41\"";
    f.optional("architectures", expected, &[][..], |v| {
        let names = v.as_array()?;
        let ours = names.iter().any(|name| name.as_str().is_some_and(is_ours));
        (names.is_empty() || ours).then_some(&names[..])
    });
}

/// Both spellings of the family, with whatever part of it they name.
fn is_ours(name: &str) -> bool {
    let letters = name.chars().filter(|&c| c != '_');
    let plain: String = letters.map(|c| c.to_ascii_lowercase()).collect();
    plain.starts_with("deepseekv41")
}

fn only_text(f: &mut Fields<'_>, key: &str, only: &str) {
    let expected = format!("{only:?} (nothing else is supported)");
    f.optional(key, &expected, only, |v| {
        v.as_str().filter(|&text| text == only)
    });
}

fn only_false(f: &mut Fields<'_>, key: &str, expected: &str) {
    f.optional(key, expected, false, |v| v.as_bool().filter(|set| !set));
}
