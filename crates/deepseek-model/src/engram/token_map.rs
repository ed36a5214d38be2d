//! Token id to compressed id.

use std::borrow::Cow;
use std::collections::HashMap;

use rayon::prelude::*;
use tokenizers::normalizers::{Lowercase, NFD, NFKC, StripAccents};
use tokenizers::{NormalizedString, Normalizer};

use super::EngramError;
use crate::config::EngramConfig;
use crate::tokenizer::Tokenizer;

/// Stands for a token that is exactly one space, while spaces are stripped at both ends.
const LONE_SPACE: char = '\u{e000}';

/// The compressed id of each token: tokens that differ only in case, accents, compatibility form or
/// spacing share one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMap {
    /// By token id.
    compressed: Vec<u32>,
    /// Distinct compressed ids.
    count: usize,
    /// The compressed id that stands for a place before the text.
    pad: u32,
}

impl TokenMap {
    /// Folds the vocabulary of `tokenizer`.
    ///
    /// Compressed ids are numbered by the first token id that has them.
    ///
    /// # Errors
    /// Refuses a tokenizer that folds to another number of ids than
    /// [`EngramConfig::compressed_vocab_size`], or that lacks the pad token.
    pub fn from_tokenizer(
        tokenizer: &Tokenizer,
        config: &EngramConfig,
    ) -> Result<Self, EngramError> {
        let vocab_size = tokenizer.vocab_size();
        let keys = (0..vocab_size as u32)
            .into_par_iter()
            .map(|id| key(tokenizer, id))
            .collect::<Result<Vec<String>, EngramError>>()?;

        let mut numbers = HashMap::with_capacity(vocab_size);
        let mut compressed = Vec::with_capacity(vocab_size);
        for key in keys {
            let next = numbers.len() as u32;
            compressed.push(*numbers.entry(key).or_insert(next));
        }

        let (found, expected) = (numbers.len(), config.compressed_vocab_size);
        if found != expected {
            return Err(EngramError::CompressedVocabulary {
                path: tokenizer.path().to_owned(),
                found,
                expected,
            });
        }
        let id = config.pad_token_id;
        let pad = *compressed
            .get(id as usize)
            .ok_or_else(|| EngramError::PadToken {
                path: tokenizer.path().to_owned(),
                id,
                vocab_size,
            })?;
        Ok(Self {
            compressed,
            count: found,
            pad,
        })
    }

    /// Distinct compressed ids.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The compressed id of each token id, in order.
    pub fn as_slice(&self) -> &[u32] {
        &self.compressed
    }

    /// The compressed id that stands for a place before the text.
    pub fn pad(&self) -> u32 {
        self.pad
    }

    /// The compressed id of a token; `index` serves the error only.
    pub(super) fn get(&self, id: u32, index: usize) -> Result<u32, EngramError> {
        self.compressed
            .get(id as usize)
            .copied()
            .ok_or(EngramError::UnknownToken {
                id,
                index,
                vocab_size: self.compressed.len(),
            })
    }
}

/// What tokens that share a compressed id have in common.
fn key(tokenizer: &Tokenizer, id: u32) -> Result<String, EngramError> {
    let text = tokenizer.decode(&[id])?;
    if text.contains(char::REPLACEMENT_CHARACTER) {
        // Part of a character: its bytes have no text of their own.
        return Ok(tokenizer.token(id).unwrap_or(text));
    }
    let folded = fold(&text).map_err(|reason| EngramError::Fold {
        path: tokenizer.path().to_owned(),
        id,
        reason,
    })?;
    Ok(if folded.is_empty() { text } else { folded })
}

/// NFKC, NFD, no accents, lower case, each run of blanks one space, no space at the ends of
/// anything but a lone one.
fn fold(text: &str) -> Result<String, String> {
    let letters = fold_letters(text)?;
    let spaced = collapse_blanks(&letters);
    // A mark that a token really holds reads as a space too: so the tables were trained.
    let marked = if spaced == " " {
        LONE_SPACE.to_string()
    } else {
        spaced
    };
    Ok(marked.trim().replace(LONE_SPACE, " "))
}

/// The part of the folding that looks at letters. Most tokens are ASCII, where it is only a change
/// of case; the others go through the normalizers the tables were trained with.
fn fold_letters(text: &str) -> Result<Cow<'_, str>, String> {
    if text.is_ascii() {
        return Ok(Cow::Owned(text.to_ascii_lowercase()));
    }
    let mut normalized = NormalizedString::from(text);
    let steps: [&dyn Normalizer; 4] = [&NFKC, &NFD, &StripAccents, &Lowercase];
    for step in steps {
        step.normalize(&mut normalized)
            .map_err(|error| error.to_string())?;
    }
    Ok(Cow::Owned(normalized.get().to_owned()))
}

/// Each run of `[ \t\r\n]` becomes one space.
fn collapse_blanks(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut in_run = false;
    for c in text.chars() {
        let blank = matches!(c, ' ' | '\t' | '\r' | '\n');
        if !blank {
            out.push(c);
        } else if !in_run {
            out.push(' ');
        }
        in_run = blank;
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokenizers::normalizers::replace::ReplacePattern;
    use tokenizers::normalizers::{Replace, Strip};

    use super::*;

    /// The folding spelled in the `tokenizers` crate's own normalizers.
    fn oracle(text: &str) -> String {
        let replace = |pattern: &str, by: &str| {
            Replace::new(ReplacePattern::Regex(pattern.to_owned()), by).unwrap()
        };
        let steps: [&dyn Normalizer; 8] = [
            &NFKC,
            &NFD,
            &StripAccents,
            &Lowercase,
            &replace(r"[ \t\r\n]+", " "),
            &replace("^ $", "\u{e000}"),
            &Strip::new(true, true),
            &replace("\u{e000}", " "),
        ];
        let mut normalized = NormalizedString::from(text);
        for step in steps {
            step.normalize(&mut normalized).unwrap();
        }
        normalized.get().to_owned()
    }

    proptest! {
        /// The short cuts for ASCII and for white space change nothing.
        #[test]
        fn folding_is_the_normalizers(text in r"(\PC|[ -~]|[ \t\r\n\x0b\x0c\u{85}\u{2028}\u{e000}]){0,6}") {
            prop_assert_eq!(fold(&text).unwrap(), oracle(&text));
        }
    }

    #[track_caller]
    fn check(text: &str, folded: &str) {
        assert_eq!(fold(text).unwrap(), folded, "fold of {text:?}");
    }

    #[test]
    fn case_accents_and_compatibility_forms_fold() {
        check(" Café", "cafe");
        check("ＦＵＬＬ", "full");
        check("ﬁx²", "fix2");
        check("Å", "a");
        check("İ", "i");
        check("ß", "ß");
        check("日本", "日本");
    }

    #[test]
    fn blanks_collapse_and_a_lone_one_stays() {
        check("\t a \r\n b ", "a b");
        check(" ", " ");
        check("\n\n\t ", " ");
        check("\u{3000}", " ");
        check("\u{e000}x", " x");
    }

    #[test]
    fn other_white_space_strips_to_nothing() {
        check("\u{b}", "");
        check("\u{2028}", "");
        check("", "");
    }
}
