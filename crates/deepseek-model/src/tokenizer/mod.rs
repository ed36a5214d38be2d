//! Text to token ids and back.
//!
//! A thin layer over the `tokenizers` crate that adds what a program around a model needs: errors
//! that name the file, a check of ids a caller brings along, and [`TextStream`], which turns ids
//! into text one at a time without ever showing half a character.

mod bound;
mod bytes;
mod charsmap;
mod error;
mod growth;
mod keys;
mod panics;
mod probes;
mod refusal;
mod shared;
mod steps;
mod stream;
mod trie;

use std::cell::Cell;
use std::path::{Path, PathBuf};

use tokenizers::{
    Model, ModelWrapper, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer,
};

use crate::config::{
    file::{self, MAX_TOKENIZER},
    json,
};
use crate::memory::check_json;
use error::cut;
pub use error::{LIBRARY_VERSION, TokenizerError};
use growth::Bounded;
pub use panics::catches_panics;
use panics::caught;
use refusal::{describe, refusal};
pub use stream::TextStream;

type Result<T, E = TokenizerError> = std::result::Result<T, E>;

/// A checkpoint's tokenizer.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    vocab_size: usize,
    /// See [`Self::longest_token_bytes`].
    longest: Option<usize>,
    /// For errors.
    path: PathBuf,
}

impl Tokenizer {
    /// Reads `tokenizer.json` of the checkpoint directory `dir`.
    ///
    /// Truncation, padding and dropout that the file may ask for are switched off: a prompt is never
    /// shortened behind the caller's back, and a text has the same ids every time.
    ///
    /// # Errors
    /// Each failure names the file: it cannot be read, is no regular file or longer than 512 MiB, takes more
    /// memory than there is, is
    /// not whole JSON, holds a part that the `tokenizers` crate does not know, that it fails at or
    /// that can make a text too long, gives two tokens one id, or an added token an id that it would not keep.
    ///
    /// That crate answers some damaged files with a panic. It becomes an error here like any other,
    /// but the panic hook sees it first: see [`catches_panics`].
    pub fn load(dir: impl AsRef<Path>) -> Result<Self> {
        let path = dir.as_ref().join("tokenizer.json");
        check_json(&path)?;
        let bytes = file::read(&path, MAX_TOKENIZER).map_err(|source| TokenizerError::Read {
            path: path.clone(),
            source,
        })?;
        Self::parse(&bytes, &path)
    }

    fn parse(bytes: &[u8], path: &Path) -> Result<Self> {
        // The library folds syntax errors and unknown types into one text, and takes either of two
        // values for a token. A pass that only reads the JSON tells these apart.
        let json::Json { value, repeated } = json::parse(bytes).map_err(|stopped| {
            let (path, key, source) = (path.to_owned(), stopped.key, stopped.source);
            TokenizerError::Json { path, key, source }
        })?;
        if !repeated.is_empty() {
            return Err(TokenizerError::Repeated {
                path: path.to_owned(),
                violations: repeated.into_iter().map(|key| key.violation).collect(),
            });
        }
        let normalizer = &value["normalizer"];
        charsmap::check_charsmaps(normalizer).map_err(|reason| TokenizerError::Unsupported {
            path: path.to_owned(),
            part: describe("normalizer", normalizer),
            reason,
        })?;
        for (name, max) in [
            ("normalizer", growth::MAX_GROWTH),
            ("pre_tokenizer", growth::MAX_PRE_GROWTH),
            ("decoder", growth::MAX_GROWTH),
        ] {
            let part = &value[name];
            let growth = growth::growth(part);
            if growth > max {
                return Err(TokenizerError::Growth {
                    path: path.to_owned(),
                    part: describe(name, part),
                    growth,
                    max,
                });
            }
        }
        let unknown = |(part, reason)| TokenizerError::Unsupported {
            path: path.to_owned(),
            part,
            reason,
        };
        if let Some(found) = keys::of_lists(&value) {
            return Err(unknown(found));
        }
        if let Some(failing) = steps::by_its_keys(&value) {
            return Err(TokenizerError::failing(&failing, path));
        }
        let mut inner = caught(|| tokenizers::Tokenizer::from_bytes(bytes))
            .map_err(|reason| refusal(&value, path, reason))?;
        let part = |name: &'static str| (name, &value[name]);
        let found = keys::of_part(part("normalizer"), inner.get_normalizer())
            .or_else(|| keys::of_part(part("pre_tokenizer"), inner.get_pre_tokenizer()))
            .or_else(|| keys::of_part(part("post_processor"), inner.get_post_processor()))
            .or_else(|| keys::of_part(part("decoder"), inner.get_decoder()));
        if let Some(found) = found {
            return Err(unknown(found));
        }
        if let Some(normalizer) = inner.get_normalizer() {
            let added = inner.get_added_tokens_decoder();
            let failing = steps::by_trying(normalizer, &added.values().collect::<Vec<_>>());
            if let Some(failing) = failing {
                return Err(TokenizerError::failing(&failing, path));
            }
        }
        if let ModelWrapper::BPE(model) = inner.get_model()
            && model.dropout.is_some()
        {
            let mut model = model.clone();
            model.dropout = None;
            inner.with_model(model);
        }
        inner.with_padding(None);
        inner
            .with_truncation(None)
            .expect("only a stride longer than the truncation is refused");
        shared::check_ids_differ(&inner, path)?;
        shared::check_ids_stay(&inner, &value["added_tokens"], path)?;
        let vocab_size = inner.get_vocab_size(true);
        let longest = bound::longest_token_bytes(&inner);
        Ok(Self {
            inner,
            vocab_size,
            longest,
            path: path.to_owned(),
        })
    }

    /// Token ids, added tokens included. The model's vocabulary may be larger: checkpoints pad
    /// their embedding.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The ids of `text`, with nothing put before or after them.
    ///
    /// That suits a text that goes on from another one. A prompt begins with the beginning-of-text
    /// token, which models expect: [`Self::encode_with_bos`] puts it there. The spelling of a special
    /// token within the text becomes that token.
    ///
    /// # Errors
    /// If a part of the text has no token, or all of it has none; if the normalizer could make a text of
    /// more than 64 MiB, and more than eight times as long, of it; or if the `tokenizers` crate fails, for a
    /// step of the file or for another reason.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let bounded = self.inner.get_normalizer();
        let bounded = bounded.map(|normalizer| Bounded::new(normalizer, text.len()));
        let step = Cell::new("");
        let words = caught(|| self.words(text, bounded.as_ref(), &step));
        if let Some((could, max)) = bounded.as_ref().and_then(Bounded::refused) {
            let (path, bytes) = (self.path.clone(), text.len());
            return Err(TokenizerError::Grown {
                path,
                bytes,
                could,
                max,
            });
        }
        if let Some(failed) = bounded.as_ref().and_then(Bounded::failed) {
            return Err(TokenizerError::failing(failed, &self.path));
        }
        let words =
            words.map_err(|reason| self.failed("encode", format!("{}: {reason}", step.get())))?;
        let mut ids = Vec::new();
        for (word, place, tokens) in words.get_splits(OffsetReferential::Original, OffsetType::Byte)
        {
            let tokens = tokens.as_deref().unwrap_or_default();
            // Of the library's models only BPE passes over what it has no token for.
            let covered: usize = tokens.iter().map(|t| t.offsets.1 - t.offsets.0).sum();
            if matches!(self.inner.get_model(), ModelWrapper::BPE(_)) && covered < word.len() {
                return Err(TokenizerError::NoToken {
                    path: self.path.clone(),
                    text: cut(text.get(place.0..place.1).unwrap_or(word)),
                    at: place.0,
                });
            }
            ids.extend(tokens.iter().map(|token| token.id));
        }
        if ids.is_empty() && !text.is_empty() {
            let path = self.path.clone();
            return Err(TokenizerError::NothingLeft { path });
        }
        Ok(ids)
    }

    /// Bytes of text that the longest token stands for: `n` tokens stand for at most `n` times as
    /// many. `None` where a token, or no token at all, can stand for any number of bytes: with a
    /// normalizer, a pre-tokenizer that removes what it splits at, added tokens that take the blanks
    /// beside them in, or a token for what is unknown.
    pub fn longest_token_bytes(&self) -> Option<usize> {
        self.longest
    }

    /// Refuses a text that has more than `max_tokens` tokens whatever they are, from its length
    /// alone. Encoding takes memory many times the text's own and time in proportion, so a program
    /// that takes texts from outside should ask this first. A text that passes can still have more
    /// tokens; where [`Self::longest_token_bytes`] is `None`, every text passes.
    ///
    /// # Errors
    /// [`TokenizerError::TooLong`].
    pub fn check_length(&self, text: &str, max_tokens: usize) -> Result<()> {
        let bytes = text.len();
        match self.longest {
            Some(longest) if bytes.div_ceil(longest.max(1)) > max_tokens => {
                Err(TokenizerError::TooLong {
                    bytes,
                    max_tokens,
                    longest,
                })
            }
            _ => Ok(()),
        }
    }

    /// The words of a text with their tokens: the steps of the library's own `encode`, which does
    /// not tell what it leaves out. `step` is the one that runs.
    fn words(
        &self,
        text: &str,
        normalizer: Option<&Bounded<'_>>,
        step: &Cell<&'static str>,
    ) -> Result<PreTokenizedString, tokenizers::Error> {
        let (tokenizer, model) = (&self.inner, self.inner.get_model());
        let added = tokenizer.get_added_vocabulary();
        step.set("its normalizer or its added tokens");
        let mut words = added.extract_and_normalize(normalizer, text);
        // What was given up needs no tokens.
        if normalizer.is_some_and(Bounded::is_given_up) {
            return Ok(words);
        }
        step.set("its pre-tokenizer, on what its normalizer made of the text");
        if let Some(splitter) = tokenizer.get_pre_tokenizer() {
            splitter.pre_tokenize(&mut words)?;
        }
        step.set("its model, on what its other steps made of the text");
        words.tokenize(|word| model.tokenize(word.get()))?;
        Ok(words)
    }

    /// The ids of `text` behind the beginning-of-text id `bos`, as the model saw texts in training.
    /// The id is [`Config::bos_token_id`](crate::Config::bos_token_id).
    pub fn encode_with_bos(&self, bos: u32, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.encode(text)?;
        ids.insert(0, bos);
        Ok(ids)
    }

    /// The text of `ids`, special tokens spelled out. Ids without a token give no text; bytes that
    /// are no UTF-8 give U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        // Some decoders of the library fail where there is nothing.
        if ids.iter().all(|&id| self.inner.id_to_token(id).is_none()) {
            return Ok(String::new());
        }
        caught(|| self.inner.decode(ids, false)).map_err(|reason| self.failed("decode", reason))
    }

    /// Checks that a model with `vocab_size` embedding rows knows every token, so that no text can
    /// become an id that it has not. The model may have more rows.
    ///
    /// # Errors
    /// Names the file and the token with the highest id.
    pub fn check_fits(&self, vocab_size: usize) -> Result<()> {
        let highest = self.inner.get_vocab(true).into_iter().max_by_key(|t| t.1);
        match highest {
            Some((token, id)) if id as usize >= vocab_size => Err(TokenizerError::Vocabulary {
                path: self.path.clone(),
                token: cut(&token),
                id,
                vocab_size,
            }),
            _ => Ok(()),
        }
    }

    /// The file, for errors.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn failed(&self, action: &'static str, reason: String) -> TokenizerError {
        let path = self.path.clone();
        TokenizerError::Failed {
            path,
            action,
            reason,
        }
    }

    /// The token's own spelling in the vocabulary (for a byte-level tokenizer: its byte letters).
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The id of a token given by its spelling in the vocabulary.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// A stream that turns ids into text as they come.
    pub fn stream(&self) -> TextStream<&Self> {
        TextStream::new(self)
    }
}

/// Checks that a model with `vocab_size` embedding rows knows every one of `ids`.
///
/// # Errors
/// Names the first id that is too large, and where it stands.
pub fn check_ids(ids: &[u32], vocab_size: usize) -> Result<()> {
    match ids.iter().position(|&id| id as usize >= vocab_size) {
        None => Ok(()),
        Some(index) => Err(TokenizerError::OutsideVocabulary {
            id: ids[index],
            index,
            vocab_size,
        }),
    }
}
