//! Whether a file is about this model: its family, keys that ask for another computation, and what
//! stands beside the decoder's part.

use serde_json::{Map, Value};

use super::{Violation, fields::Fields, neutral};

/// Notes every key that asks for something else. Beside the decoder's part it may be meant for it, too.
pub(super) fn check(
    top: &Map<String, Value>,
    text: &Map<String, Value>,
    violations: &mut Vec<Violation>,
) {
    // In a flat file the two are the same object.
    if !std::ptr::eq(top, text) {
        let mut beside = Vec::new();
        object(top, text, &mut beside);
        contradictions(top, text, &mut beside);
        violations.extend(beside.into_iter().map(|violation| Violation {
            found: format!("{}, beside text_config", violation.found),
            ..violation
        }));
    }
    object(text, text, violations);
}

fn object(map: &Map<String, Value>, text: &Map<String, Value>, violations: &mut Vec<Violation>) {
    let f = &mut Fields::new(map, violations);
    family(f);
    neutral::check(f, text);
    if let Some(mut f) = f.object("quantization_config") {
        let expected = "\"fp8\" (nothing else is supported)";
        f.optional("quant_method", expected, "fp8", |v| {
            v.as_str().filter(|&method| method == "fp8")
        });
    }
}

/// Keys of the decoder that no tensor's shape would contradict.
const DECIDING: &[&str] = &[
    "rope_theta",
    "compress_rope_theta",
    "rope_scaling",
    "rope_parameters",
    "scoring_func",
    "norm_topk_prob",
    "routed_scaling_factor",
    "num_experts_per_tok",
    "swiglu_limit",
    "rms_norm_eps",
    "sliding_window",
    "hc_sinkhorn_iters",
    "hc_eps",
    "index_topk",
    "compress_ratios",
    "kv_source_layer_ids",
    "index_source_layer_ids",
    "candidate_source_layer_id",
    "candidate_topk_blocks",
    "candidate_block_size",
    "engram_layer_ids",
];

/// Notes what is said beside the decoder's part and not in it. Only the latter is read.
fn contradictions(
    top: &Map<String, Value>,
    text: &Map<String, Value>,
    violations: &mut Vec<Violation>,
) {
    for key in DECIDING {
        let (outer, inner) = (top.get(*key), text.get(*key));
        let (outer, inner) = (outer.unwrap_or(&Value::Null), inner.unwrap_or(&Value::Null));
        if outer.is_null() || same(outer, inner) {
            continue;
        }
        let expected = if inner.is_null() {
            "no such key, or the same in text_config, which has none".to_owned()
        } else {
            let inner = Violation::value(key, "", inner).found;
            format!("{inner}, as text_config has it")
        };
        violations.push(Violation::value(key, &expected, outer));
    }
}

/// Whether two values are equal; 1 and 1.0 are.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            let equal = |key: &String, a| b.get(key).is_some_and(|b| same(a, b));
            a.len() == b.len() && a.iter().all(|(key, a)| equal(key, a))
        }
        (a, b) => a == b,
    }
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
