//! How rotation is stretched, said outside of any object. Only objects are read, so that these keys must
//! say what the object says.

use serde_json::{Map, Value};

use super::{error::quoted, fields::Fields, other_names::same, rope};

/// What an object of stretching says, and its names outside of objects.
const NAMES: [(&str, &[&str]); 4] = [
    ("factor", &["rope_factor", "rope_scaling_factor"]),
    (
        "original_max_position_embeddings",
        &["original_max_position_embeddings", "original_seq_len"],
    ),
    ("beta_fast", &["beta_fast"]),
    ("beta_slow", &["beta_slow"]),
];

/// Notes what an object says of stretching by itself and the decoder's part, `text`, does not.
pub(super) fn check(f: &mut Fields<'_>, text: &Map<String, Value>) {
    let Some((path, object)) = rope::stretching(text) else {
        for key in ["rope_type", "rope_scaling_type"] {
            let expected = "\"default\" (no rope_scaling stretches anything)";
            f.optional(key, expected, (), |v| (v == "default").then_some(()));
        }
        for key in NAMES.iter().flat_map(|(_, names)| *names) {
            let expected = "null (no rope_scaling stretches anything)";
            f.optional(key, expected, (), |_| None);
        }
        return;
    };
    let held = |key: &str| object.get(key).filter(|value| !value.is_null());
    let kind = ["rope_type", "type"]
        .into_iter()
        .find_map(|key| Some((key, held(key)?)));
    if let Some((name, kind)) = kind {
        let expected = format!("{kind}, as {path}.{name} has it");
        for key in ["rope_type", "rope_scaling_type"] {
            f.optional(key, &expected, (), |v| same(v, kind).then_some(()));
        }
    }
    for (name, others) in NAMES {
        // Where it is absent, that is noted already.
        let Some(value) = held(name) else { continue };
        let expected = format!("{}, as {path}.{name} has it", quoted(value));
        for key in others {
            f.optional(key, &expected, (), |v| same(v, value).then_some(()));
        }
    }
}
