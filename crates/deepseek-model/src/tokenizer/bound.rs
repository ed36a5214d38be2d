//! How many bytes of text a token can stand for.

use tokenizers::{ModelWrapper, NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior};

/// See [`super::Tokenizer::longest_token_bytes`].
pub(super) fn longest_token_bytes(tokenizer: &tokenizers::Tokenizer) -> Option<usize> {
    // What has no token is refused, so every byte of a text that is kept as it is has one.
    let ModelWrapper::BPE(model) = tokenizer.get_model() else {
        return None;
    };
    let normalizer = tokenizer.get_normalizer();
    let splitter = tokenizer.get_pre_tokenizer();
    if model.unk_token.is_some()
        || normalizer.is_some_and(changes_text)
        || splitter.is_some_and(removes_text)
    {
        return None;
    }
    let added = tokenizer.get_added_tokens_decoder();
    if added.values().any(|token| token.lstrip || token.rstrip) {
        return None;
    }
    let added = added.values().map(|token| token.content.len());
    // Byte letters are one character for each byte; in other spellings a character is some bytes.
    let bytes: fn(String) -> usize = if splitter.is_some_and(spells_bytes) {
        |token| token.chars().count()
    } else {
        |token| token.len()
    };
    let own = tokenizer.get_vocab(false).into_keys().map(bytes);
    own.chain(added).max()
}

/// Whether a normalizer may do anything at all.
fn changes_text(normalizer: &NormalizerWrapper) -> bool {
    match normalizer {
        NormalizerWrapper::Sequence(steps) => steps.as_ref().iter().any(changes_text),
        _ => true,
    }
}

/// Whether a pre-tokenizer may leave a part of the text out.
fn removes_text(splitter: &PreTokenizerWrapper) -> bool {
    match splitter {
        PreTokenizerWrapper::Sequence(steps) => steps.as_ref().iter().any(removes_text),
        PreTokenizerWrapper::Split(split) => split.behavior == SplitDelimiterBehavior::Removed,
        PreTokenizerWrapper::ByteLevel(_) | PreTokenizerWrapper::Digits(_) => false,
        _ => true,
    }
}

/// Whether a pre-tokenizer replaces each byte by a letter.
fn spells_bytes(splitter: &PreTokenizerWrapper) -> bool {
    match splitter {
        PreTokenizerWrapper::Sequence(steps) => steps.as_ref().iter().any(spells_bytes),
        PreTokenizerWrapper::ByteLevel(_) => true,
        _ => false,
    }
}
