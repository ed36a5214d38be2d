//! What is said of the decoder beside its part of a file. Only the part is read, so that every key that
//! is read there must say the same beside it, or nothing.

use std::collections::{BTreeSet, HashSet};

use serde_json::{Map, Value};

use super::{
    Violation,
    error::quoted,
    json,
    parts::{Parts, READ_BESIDE},
};

/// Notes what is said beside the decoder's part, by one of the keys `read` in it, and not in it.
pub(super) fn contradictions(
    Parts { top, text }: Parts<'_>,
    read: &BTreeSet<String>,
    violations: &mut Vec<Violation>,
) {
    let beside = READ_BESIDE
        .into_iter()
        .chain(read.iter().map(String::as_str));
    for key in beside {
        let (Some(outer), inner) = (held(top, key), held(text, key)) else {
            continue;
        };
        let noted = match inner {
            None if READ_BESIDE.contains(&key) => None,
            None => {
                let expected = "no such key, or the same in text_config, which has none";
                Some(Violation::value(key, expected, outer))
            }
            // Not compared in their order.
            Some(inner) if key == "eos_token_id" => {
                (!same_ids(outer, inner)).then(|| Violation::value(key, &as_inside(inner), outer))
            }
            Some(inner) => difference(key, outer, inner),
        };
        violations.extend(noted);
    }
}

/// Whether two values are the same ids, in whatever order; one may stand alone.
fn same_ids(a: &Value, b: &Value) -> bool {
    let ids = |value: &Value| -> Option<HashSet<u64>> {
        match value {
            Value::Array(ids) => ids.iter().map(Value::as_u64).collect(),
            id => id.as_u64().map(|id| HashSet::from([id])),
        }
    };
    ids(a).is_some_and(|a| Some(a) == ids(b))
}

/// The first place at which two values differ; 1 and 1.0 do not. As a whole two long values can differ
/// where a message does not show them any more.
fn difference(key: &str, outer: &Value, inner: &Value) -> Option<Violation> {
    match (outer, inner) {
        (Value::Number(a), Value::Number(b)) if a.as_f64() == b.as_f64() => None,
        (Value::Array(a), Value::Array(b)) => (0..a.len().max(b.len())).find_map(|at| {
            let (a, b) = (a.get(at), b.get(at));
            part(|| format!("{key}[{at}]"), "entry", a, b)
        }),
        (Value::Object(a), Value::Object(b)) => a.keys().chain(b.keys()).find_map(|name| {
            let (a, b) = (held(a, name), held(b, name));
            part(|| json::dotted(key, name), "key", a, b)
        }),
        (a, b) if a == b => None,
        _ => Some(Violation::value(key, &as_inside(inner), outer)),
    }
}

/// The same for parts of two values, of which one may lack the part.
fn part(
    key: impl Fn() -> String,
    what: &str,
    outer: Option<&Value>,
    inner: Option<&Value>,
) -> Option<Violation> {
    match (outer, inner) {
        (None, None) => None,
        (Some(outer), Some(inner)) => difference(&key(), outer, inner),
        (Some(outer), None) => {
            let expected = format!("no such {what}, as text_config has none");
            Some(Violation::value(&key(), &expected, outer))
        }
        (None, Some(inner)) => {
            let found = format!("no such {what}");
            Some(Violation::new(&key(), as_inside(inner), found))
        }
    }
}

fn as_inside(inner: &Value) -> String {
    format!("{}, as text_config has it", quoted(inner))
}

/// What an object holds under a key; `null` is nothing. A type of rotation has two names, of which one
/// says it all.
fn held<'a>(map: &'a Map<String, Value>, key: &str) -> Option<&'a Value> {
    let get = |key: &str| map.get(key).filter(|value| !value.is_null());
    let other = match key {
        "rope_type" => "type",
        "type" => "rope_type",
        _ => return get(key),
    };
    get(key).or_else(|| get(other))
}
