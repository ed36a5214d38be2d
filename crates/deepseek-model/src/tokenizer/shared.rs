//! Tokens that share an id, or lose theirs.

use std::{collections::HashMap, path::Path};

use serde_json::Value;

use super::error::{TokenizerError, cut};

/// Refuses a vocabulary with two tokens of one id: the library takes it, and reads the id as either
/// of the two.
pub(super) fn check_ids_differ(
    tokenizer: &tokenizers::Tokenizer,
    path: &Path,
) -> Result<(), TokenizerError> {
    let vocabulary = tokenizer.get_vocab(true);
    let mut by_id: HashMap<u32, &str> = HashMap::with_capacity(vocabulary.len());
    let mut shared: Option<(u32, [&str; 2])> = None;
    for (token, &id) in &vocabulary {
        if let Some(other) = by_id.insert(id, token) {
            let mut tokens = [other, token.as_str()];
            tokens.sort_unstable();
            // The map has no order: the lowest pair, so that the error is the same every time.
            shared = Some(shared.map_or((id, tokens), |lowest| lowest.min((id, tokens))));
        }
    }
    match shared {
        None => Ok(()),
        Some((id, tokens)) => Err(TokenizerError::SharedId {
            path: path.to_owned(),
            tokens: tokens.map(cut),
            id,
        }),
    }
}

/// Refuses an added token whose id in the file is not the one it has: the library counts those that
/// the vocabulary lacks on from its end, whatever the file says.
pub(super) fn check_ids_stay(
    tokenizer: &tokenizers::Tokenizer,
    added: &Value,
    path: &Path,
) -> Result<(), TokenizerError> {
    for token in added.as_array().into_iter().flatten() {
        let (Some(id), Some(content)) = (token["id"].as_u64(), token["content"].as_str()) else {
            continue;
        };
        // One without a text has no id at all.
        match tokenizer.token_to_id(content) {
            Some(renumbered) if u64::from(renumbered) != id => {
                return Err(TokenizerError::Renumbered {
                    path: path.to_owned(),
                    token: cut(content),
                    id,
                    renumbered,
                });
            }
            _ => {}
        }
    }
    Ok(())
}
