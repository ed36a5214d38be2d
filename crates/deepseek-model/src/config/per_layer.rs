//! Lists with an entry for each layer. Entries from `num_hidden_layers` on are those of draft layers.

use serde_json::{Map, Value};

use super::{Violation, fields::Fields, other_names::same};

/// Notes every such list of an object that asks for something else than the decoder's part, `text`.
pub(super) fn check(f: &mut Fields<'_>, text: &Map<String, Value>) {
    let Some(layers) = text.get("num_hidden_layers").and_then(Value::as_u64) else {
        return;
    };
    types(f, text, layers);
    if let Some(limit) = text.get("swiglu_limit").filter(|limit| limit.is_number()) {
        let expected = format!("{limit}, as swiglu_limit has it");
        for key in ["swiglu_limits", "swiglu_limits_shared"] {
            all(f, key, &expected, text, |v| same(v, limit));
        }
    }
    ones(f, "moe_layer_freq", "every layer has experts", layers);
    ones(f, "no_rope_layers", "every layer rotates", layers);
}

/// One value for all layers, or a list with one for each, of which every one is what `is` accepts.
pub(super) fn all(
    f: &mut Fields<'_>,
    key: &str,
    expected: &str,
    text: &Map<String, Value>,
    is: impl Fn(&Value) -> bool,
) {
    let Some(layers) = text.get("num_hidden_layers").and_then(Value::as_u64) else {
        return;
    };
    let expected = format!("{expected}, or num_hidden_layers ({layers}) of these or more");
    f.optional(key, &expected, (), |v| {
        let all = |all: &Vec<Value>| all.len() as u64 >= layers && all.iter().all(&is);
        (is(v) || v.as_array().is_some_and(all)).then_some(())
    });
}

/// A list in which 1 stands for what every layer does, or 1 for all of them. Of an empty list the families
/// that have it make another one.
fn ones(f: &mut Fields<'_>, key: &str, why: &str, layers: u64) {
    let expected = format!("1, or num_hidden_layers ({layers}) ones or more ({why})");
    f.optional(key, &expected, (), |v| {
        let one = |value: &Value| value.as_f64() == Some(1.0);
        let all = |all: &Vec<Value>| all.len() as u64 >= layers && all.iter().all(one);
        (one(v) || v.as_array().is_some_and(all)).then_some(())
    });
}

/// Lists that name what each layer does: its attention, which `compress_ratios` say here, and its
/// experts.
fn types(f: &mut Fields<'_>, text: &Map<String, Value>, layers: u64) {
    let ratios = text.get("compress_ratios").and_then(Value::as_array);
    let ratio = |layer: usize| ratios?.get(layer)?.as_u64();
    each_layer(f, "layer_types", layers, |layer, name| {
        let ratio = ratio(layer).unwrap_or(0);
        let (fits, what) = if ratio == 0 {
            (name == "sliding_attention", "\"sliding_attention\"")
        } else {
            (name.contains("compress"), "compressed attention by name")
        };
        (!fits).then(|| format!("{what}, as its ratio in compress_ratios is {ratio}"))
    });
    each_layer(f, "mlp_layer_types", layers, |_, name| {
        let fits = name == "moe" || name == "sparse";
        (!fits).then(|| "\"moe\" (every layer has experts)".to_owned())
    });
}

/// Notes the first layer of a list of names of which `wrong` says what it should be.
fn each_layer(
    f: &mut Fields<'_>,
    key: &str,
    layers: u64,
    wrong: impl Fn(usize, &str) -> Option<String>,
) {
    let expected = format!("a list of num_hidden_layers ({layers}) names or more");
    let names = f.optional(key, &expected, None, |v| {
        let names = v.as_array()?;
        (names.len() as u64 >= layers).then_some(Some(names))
    });
    let Some(Some(names)) = names else { return };
    for (layer, value) in names.iter().take(layers as usize).enumerate() {
        if let Some(expected) = wrong(layer, value.as_str().unwrap_or("")) {
            let name = format!("{}[{layer}]", f.name(key));
            f.note(Violation::value(&name, &expected, value));
            return;
        }
    }
}
