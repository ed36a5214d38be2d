//! Tables in a file that would make the library allocate without bound.

use serde_json::Value;

/// Refuses a table of a `Precompiled` normalizer that announces more bytes than it has: the library
/// allocates what is announced, up to 8 GiB, before it looks.
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
    // Base64: 4 digits are 3 bytes. What is none is for the library to refuse.
    const DIGITS: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let announced = table.chars().take(6).try_fold(0_u64, |bits, digit| {
        Some(bits << 6 | DIGITS.find(digit)? as u64)
    });
    let Some(bits) = announced.filter(|_| table.len() >= 6) else {
        return Ok(());
    };
    let announced = ((bits >> 4) as u32).swap_bytes();
    let bytes = table.trim_end_matches('=').len() * 3 / 4;
    let found = bytes.saturating_sub(size_of::<u32>());
    if announced as usize > found {
        return Err(format!(
            "precompiled_charsmap announces a trie of {announced} bytes, expected at most the {found} \
             that follow"
        ));
    }
    Ok(())
}
