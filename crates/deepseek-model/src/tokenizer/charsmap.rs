//! Tables in a file that would make the library allocate without bound, or fail at a text.

use base64::{
    DecodeError, Engine,
    alphabet::STANDARD,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
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

/// The bytes that base64 stands for, with or without the signs at the end that fill it up.
fn decoded(base64: &str) -> Result<Vec<u8>, String> {
    const ENGINE: GeneralPurpose = GeneralPurpose::new(
        &STANDARD,
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
    );
    ENGINE.decode(base64).map_err(|error| {
        let at = match error {
            DecodeError::InvalidByte(at, _) | DecodeError::InvalidLastSymbol(at, _) => at,
            DecodeError::InvalidLength(_) | DecodeError::InvalidPadding => {
                base64.trim_end_matches('=').len()
            }
        };
        let found = base64.get(at..).and_then(|rest| rest.chars().next());
        let found = found.map_or("its end".to_owned(), |c| quoted(&c.to_string().into()));
        format!("{KEY}: expected base64, found {found} at byte {at}")
    })
}
