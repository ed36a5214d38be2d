//! Keys that the library does not know. Most of them it passes over, so that what a newer file, or one with
//! a slip of the pen, asks for would not be done.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::config::json;

/// Keys of a file that the library reads. At any other it stops as if the JSON were broken there.
const FILE: &[&str] = &[
    "version",
    "truncation",
    "padding",
    "added_tokens",
    "normalizer",
    "pre_tokenizer",
    "post_processor",
    "decoder",
    "model",
];

/// Keys of each type of model.
const MODELS: [(&str, &[&str]); 4] = [
    (
        "BPE",
        &[
            "type",
            "dropout",
            "unk_token",
            "continuing_subword_prefix",
            "end_of_word_suffix",
            "fuse_unk",
            "byte_fallback",
            "ignore_merges",
            "vocab",
            "merges",
        ],
    ),
    (
        "WordPiece",
        &[
            "type",
            "unk_token",
            "continuing_subword_prefix",
            "max_input_chars_per_word",
            "vocab",
        ],
    ),
    ("WordLevel", &["type", "vocab", "unk_token"]),
    ("Unigram", &["type", "vocab", "unk_id", "byte_fallback"]),
];

/// Keys of an added token.
const ADDED: &[&str] = &[
    "id",
    "content",
    "single_word",
    "lstrip",
    "rstrip",
    "normalized",
    "special",
];

/// Keys of `Metaspace` that are read and not written.
const OF_METASPACE: [&str; 2] = ["add_prefix_space", "str_rep"];

/// A key that is not known, as a part of a file, and what is.
type Unknown = (String, String);

/// The first such key of a file.
pub(super) fn of_file(file: &Value) -> Option<Unknown> {
    first("", file.as_object()?, FILE)
}

/// The first such key of a file's model or of one of its added tokens.
pub(super) fn of_lists(file: &Value) -> Option<Unknown> {
    of_model(&file["model"]).or_else(|| {
        let added = file["added_tokens"].as_array()?.iter().enumerate();
        let mut objects = added.filter_map(|(at, token)| Some((at, token.as_object()?)));
        objects.find_map(|(at, token)| first(&format!("added_tokens[{at}]"), token, ADDED))
    })
}

fn of_model(model: &Value) -> Option<Unknown> {
    let kind = model["type"].as_str()?;
    let (_, known) = MODELS.iter().find(|(name, _)| *name == kind)?;
    first("model", model.as_object()?, known)
}

/// The first such key of a part, by what the library makes of it: it writes every key that it reads.
pub(super) fn of_part(
    (name, part): (&str, &Value),
    read: Option<&impl Serialize>,
) -> Option<Unknown> {
    let written = serde_json::to_value(read?).ok()?;
    unwritten(name, part, &written)
}

fn unwritten(path: &str, part: &Value, written: &Value) -> Option<Unknown> {
    match (part, written) {
        (Value::Object(part), Value::Object(written)) => {
            let mut known: Vec<&str> = written.keys().map(String::as_str).collect();
            if part.get("type").is_some_and(|kind| kind == "Metaspace") {
                known.extend(OF_METASPACE);
            }
            first(path, part, &known).or_else(|| {
                part.iter().find_map(|(key, value)| {
                    unwritten(&json::dotted(path, key), value, written.get(key)?)
                })
            })
        }
        (Value::Array(part), Value::Array(written)) => {
            let mut members = part.iter().zip(written).enumerate();
            members.find_map(|(at, (part, written))| {
                unwritten(&format!("{path}[{at}]"), part, written)
            })
        }
        _ => None,
    }
}

/// The first key that is not `known`. One that holds `null` asks for nothing.
fn first(path: &str, object: &Map<String, Value>, known: &[&str]) -> Option<Unknown> {
    let unknown = |key: &str| !known.contains(&key);
    // At the top the library stops at any.
    let asks = |value: &Value| path.is_empty() || !value.is_null();
    let (key, _) = object
        .iter()
        .find(|(key, value)| unknown(key) && asks(value))?;
    let part = format!("key {}", json::dotted(path, key));
    Some((part, format!("expected no key but {}", known.join(", "))))
}
