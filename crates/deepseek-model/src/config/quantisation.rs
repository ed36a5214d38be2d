//! `quantization_config`: which formats the weights have. They are read as their tensors say, which do not
//! tell formats of one width from each other, nor how many values share a scale.

use serde_json::{Map, Value};

use super::{error::quoted, fields::Fields};

/// Keys, what they may hold, and how a message says it.
const KEYS: [(&str, &[&str], &str); 5] = [
    ("activation_scheme", &["dynamic"], "\"dynamic\""),
    ("quant_method", &["fp8"], "\"fp8\""),
    ("fmt", &["e4m3"], "\"e4m3\""),
    ("scale_fmt", &["ue8m0"], "\"ue8m0\""),
    (
        "expert_dtype",
        &["fp4", "fp8", "bf16"],
        "\"fp4\", \"fp8\" or \"bf16\"",
    ),
];

/// Those of the keys that some files have outside of the object, too.
const OUTSIDE: [&str; 4] = ["quant_method", "fmt", "scale_fmt", "expert_dtype"];

/// The object's own key.
pub(super) const OBJECT: &str = "quantization_config";

/// Notes every key outside of the object that asks for a format that is not read, or for another than the
/// object `inside`.
pub(super) fn check_outside(f: &mut Fields<'_>, inside: Option<&Map<String, Value>>) {
    for (key, names, shown) in KEYS.iter().filter(|(key, ..)| OUTSIDE.contains(key)) {
        let inside = inside.and_then(|inside| inside.get(*key));
        let inside = inside.filter(|value| !value.is_null());
        let expected = match inside {
            Some(value) => format!("{}, as {OBJECT} has it", quoted(value)),
            None => format!("{shown} (nothing else is supported)"),
        };
        f.optional(key, &expected, (), |v| match inside {
            Some(value) => (v == value).then_some(()),
            None => names.contains(&v.as_str()?).then_some(()),
        });
    }
}

/// Rows and columns of a matrix in fp8 that share a scale.
const BLOCK: [u64; 2] = [32, 32];

/// Notes every key that asks for a format that is not read.
pub(super) fn check(f: &mut Fields<'_>) {
    for (key, names, shown) in KEYS {
        let expected = format!("{shown} (nothing else is supported)");
        f.optional(key, &expected, (), |v| {
            names.contains(&v.as_str()?).then_some(())
        });
    }
    for key in ["bits", "group_size", "quant_algo"] {
        f.optional(key, "null (nothing else is supported)", (), |_| None);
    }
    let [rows, columns] = BLOCK;
    let expected = format!("[{rows},{columns}] (nothing else is supported)");
    f.optional("weight_block_size", &expected, (), |v| {
        let found: Option<Vec<u64>> = v.as_array()?.iter().map(Value::as_u64).collect();
        (found? == BLOCK).then_some(())
    });
}
