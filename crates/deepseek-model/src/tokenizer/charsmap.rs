//! Tables in a file that would make the library allocate without bound, or fail at a text.

use serde_json::Value;

use super::trie;
use crate::config::quoted;

/// The key of a table in a `Precompiled` normalizer.
const KEY: &str = "precompiled_charsmap";

/// Refuses a `Precompiled` normalizer without a table that the library can read, which it answers with a
/// panic; a table that announces more bytes than it has: the library allocates what is announced, up to
/// 8 GiB, before it looks; and one that leads out of itself.
pub(super) fn check_charsmaps(normalizer: &Value) -> Result<(), String> {
    match normalizer {
        Value::Array(steps) => steps.iter().try_for_each(check_charsmaps),
        Value::Object(keys) => {
            let named = keys.get("type").is_some_and(|kind| kind == "Precompiled");
            match keys.get(KEY) {
                Some(Value::String(_)) => {}
                Some(other) if named => {
                    let found = quoted(other);
                    return Err(format!("{KEY}: expected a text in base64, found {found}"));
                }
                None if named => {
                    return Err(format!(
                        "{KEY}: expected a text in base64, found no such key"
                    ));
                }
                _ => {}
            }
            keys.iter().try_for_each(|(key, value)| match value {
                Value::String(table) if key == KEY => check_charsmap(table),
                _ => check_charsmaps(value),
            })
        }
        _ => Ok(()),
    }
}

fn check_charsmap(table: &str) -> Result<(), String> {
    let bytes = decoded(table)?;
    let Some((announced, rest)) = bytes.split_first_chunk() else {
        return Err(format!(
            "{KEY}: expected 4 bytes that announce a trie, found {} in all",
            bytes.len()
        ));
    };
    let (announced, found) = (u32::from_le_bytes(*announced), rest.len());
    if announced as usize > found {
        return Err(format!(
            "{KEY} announces a trie of {announced} bytes, expected at most the {found} that follow"
        ));
    }
    // The library reads whole units, and takes what is left of the last one for text.
    let (trie, texts) = rest.split_at(announced as usize / 4 * 4);
    if let Err(error) = std::str::from_utf8(texts) {
        let at = bytes.len() - texts.len() + error.valid_up_to();
        return Err(format!(
            "{KEY}: expected replacements in UTF-8 behind the trie, found none at byte {at}"
        ));
    }
    trie::check(trie, texts)
}

/// Bytes of the longest text that a table replaces another by. They stand behind the trie, each with
/// a 0 at its end.
pub(super) fn longest_replacement(table: &str) -> Option<usize> {
    let bytes = decoded(table).ok()?;
    let (announced, rest) = bytes.split_first_chunk()?;
    let texts = rest.get(u32::from_le_bytes(*announced) as usize..)?;
    texts.split(|&byte| byte == 0).map(<[u8]>::len).max()
}

/// The bytes that base64 stands for: 4 digits are 3 bytes. At the end there may be fewer, whose last bits are
/// 0, with or without what fills them up to 4.
fn decoded(base64: &str) -> Result<Vec<u8>, String> {
    let digits = base64.trim_end_matches('=').as_bytes();
    let refused = |at: usize| {
        let found = base64.get(at..).and_then(|rest| rest.chars().next());
        let found = found.map_or("its end".to_owned(), |c| quoted(&c.to_string().into()));
        format!("{KEY}: expected base64, found {found} at byte {at}")
    };
    if let Some(at) = digits
        .iter()
        .position(|&digit| digit_value(digit).is_none())
    {
        return Err(refused(at));
    }
    let filled = base64.len() - digits.len();
    if digits.len() % 4 == 1 || (filled > 0 && (filled > 2 || !base64.len().is_multiple_of(4))) {
        return Err(refused(digits.len()));
    }
    let mut bytes = Vec::with_capacity(digits.len() / 4 * 3 + 2);
    for group in digits.chunks(4) {
        let digit = |bits: u32, &digit: &u8| bits << 6 | u32::from(digit_value(digit).unwrap_or(0));
        let bits = group.iter().fold(0, digit) << (6 * (4 - group.len()));
        let whole = bits.to_be_bytes();
        let (held, left) = whole[1..].split_at(group.len() - 1);
        if left.iter().any(|&byte| byte != 0) {
            return Err(refused(digits.len() - 1));
        }
        bytes.extend_from_slice(held);
    }
    Ok(bytes)
}

fn digit_value(digit: u8) -> Option<u8> {
    Some(match digit {
        b'A'..=b'Z' => digit - b'A',
        b'a'..=b'z' => digit - b'a' + 26,
        b'0'..=b'9' => digit - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    })
}
