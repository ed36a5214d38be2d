//! Whether a file is about this model: its family, keys that ask for another computation, and what
//! stands beside the decoder's part.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::{Violation, beside, fields::Fields, neutral, parts::Parts, quantisation};

/// Notes every key that asks for something else. Beside the decoder's part it may be meant for it, too.
/// `read` are the keys that are read in that part.
pub(super) fn check(parts: Parts<'_>, read: &BTreeSet<String>, violations: &mut Vec<Violation>) {
    let Parts { top, text } = parts;
    let formats = quantisation::of_file(parts);
    if parts.are_two() {
        let mut noted = Vec::new();
        object(top, text, formats, &mut noted);
        beside::contradictions(parts, read, &mut noted);
        violations.extend(noted.into_iter().map(|violation| Violation {
            found: format!("{}, beside text_config", violation.found),
            ..violation
        }));
    }
    let mut noted = Vec::new();
    object(text, text, formats, &mut noted);
    violations.extend(parts.named(noted));
}

/// `formats` is what the file says of them in an object for them.
fn object(
    map: &Map<String, Value>,
    text: &Map<String, Value>,
    formats: Option<quantisation::Read<'_>>,
    violations: &mut Vec<Violation>,
) {
    let f = &mut Fields::new(map, violations);
    family(f);
    neutral::check(f, text);
    quantisation::check_outside(f, formats);
    quantisation::check_object(f, formats);
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
