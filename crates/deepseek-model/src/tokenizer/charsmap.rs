//! Tables in a file that would make the library allocate without bound, or fail at a text.

use serde_json::Value;

use super::trie;

/// Refuses a table of a `Precompiled` normalizer that announces more bytes than it has: the library
/// allocates what is announced, up to 8 GiB, before it looks. And one that leads out of itself.
pub(super) fn check_charsmaps(normalizer: &Value) -> Result<(), String> {
    match normalizer {
        Value::Array(steps) => steps.iter().try_for_each(check_charsmaps),
        Value::Object(keys) => keys.iter().try_for_each(|(key, value)| match value {
            Value::String(table) if key == "precompiled_charsmap" => check_charsmap(table),
            _ => check_charsmaps(value),
        }),
        _ => Ok(()),
    }
}

fn check_charsmap(table: &str) -> Result<(), String> {
    // What is no base64 is for the library to refuse.
    let Some(bytes) = decoded(table) else {
        return Ok(());
    };
    let Some((announced, rest)) = bytes.split_first_chunk() else {
        return Ok(());
    };
    let (announced, found) = (u32::from_le_bytes(*announced), rest.len());
    if announced as usize > found {
        return Err(format!(
            "precompiled_charsmap announces a trie of {announced} bytes, expected at most the {found} \
             that follow"
        ));
    }
    // The library reads whole units, and takes what is left of the last one for text.
    let (trie, texts) = rest.split_at(announced as usize / 4 * 4);
    trie::check(trie, texts)
}

/// Bytes of the longest text that a table replaces another by. They stand behind the trie, each with
/// a 0 at its end.
pub(super) fn longest_replacement(table: &str) -> Option<usize> {
    let bytes = decoded(table)?;
    let (announced, rest) = bytes.split_first_chunk()?;
    let texts = rest.get(u32::from_le_bytes(*announced) as usize..)?;
    texts.split(|&byte| byte == 0).map(<[u8]>::len).max()
}

/// The bytes that base64 stands for: 4 digits are 3 bytes.
fn decoded(base64: &str) -> Option<Vec<u8>> {
    let digits = base64.trim_end_matches('=').as_bytes();
    let mut bytes = Vec::with_capacity(digits.len() / 4 * 3 + 2);
    for group in digits.chunks(4) {
        let value = |bits: u32, &digit: &u8| Some(bits << 6 | u32::from(digit_value(digit)?));
        let bits = group.iter().try_fold(0, value)? << (6 * (4 - group.len()));
        bytes.extend_from_slice(&bits.to_be_bytes()[1..group.len()]);
    }
    Some(bytes)
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
