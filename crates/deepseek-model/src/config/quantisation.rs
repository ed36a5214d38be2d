//! `quantization_config`: which formats the weights have. They are read as their tensors say, which do not
//! tell formats of one width from each other, nor how many values share a scale.

use serde_json::Value;

use super::fields::Fields;

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
