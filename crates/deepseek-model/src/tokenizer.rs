//! Text to token ids and back.
//!
//! A thin layer over the `tokenizers` crate that adds what a program around a model needs: errors
//! that name the file, a check of ids a caller brings along, and [`TextStream`], which turns ids
//! into text one at a time without ever showing half a character.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
};

use serde_json::Value;
use tokenizers::{
    DecoderWrapper, Model, ModelWrapper, NormalizerWrapper, OffsetReferential, OffsetType,
    PostProcessorWrapper, PreTokenizedString, PreTokenizer, PreTokenizerWrapper,
    SplitDelimiterBehavior,
};

use crate::config::{
    Violation, Violations,
    file::{self, MAX_TOKENIZER},
    json, unreadable,
};

/// The release of the `tokenizers` crate this one is built with, for error messages: a file that
/// it refuses was most likely written by a newer one.
pub const LIBRARY_VERSION: &str = "0.23";

/// Why a tokenizer file, a text or an id cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The file is missing or unreadable.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not whole JSON: most often a download that broke off.
    #[error("{} {}", path.display(), unreadable("valid JSON (truncated?)", key))]
    Json {
        /// The file.
        path: PathBuf,
        /// The key at which the parser stopped, dotted if nested; empty if at none.
        key: String,
        /// Where and why the parser stopped.
        source: serde_json::Error,
    },
    /// The file holds a key twice, most likely a token with two ids.
    #[error("{} breaks {}", path.display(), Violations(violations))]
    Repeated {
        /// The file.
        path: PathBuf,
        /// Every such key.
        violations: Vec<Violation>,
    },
    /// The file is JSON, but the `tokenizers` crate knows no such tokenizer.
    #[error(
        "the tokenizers crate {LIBRARY_VERSION} cannot read the {part} of {}, which is damaged or \
         newer than the library: {reason}",
        path.display()
    )]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The part that is refused, with its type if it has one: `normalizer "Frobnicate"`.
        part: String,
        /// What the crate said.
        reason: String,
    },
    /// The vocabulary has no token for a part of a text, and the file names no token for what is
    /// unknown: the library would leave it out and say nothing.
    #[error(
        "{} has no token for {text:?} at byte {at} of the text, nor one for what is unknown",
        path.display()
    )]
    NoToken {
        /// The file.
        path: PathBuf,
        /// The word, or its beginning.
        text: String,
        /// Where it begins.
        at: usize,
    },
    /// A text of which nothing is left.
    #[error("{} leaves no token of a text that is not empty, expected at least 1", path.display())]
    NothingLeft {
        /// The file.
        path: PathBuf,
    },
    /// A token that has no row in the model's embedding.
    #[error(
        "{} gives the token {token:?} the id {id}, expected less than the model's vocab_size \
         ({vocab_size}): tokenizer.json and config.json do not belong together",
        path.display()
    )]
    Vocabulary {
        /// The file.
        path: PathBuf,
        /// The token of the highest id, or its beginning.
        token: String,
        /// Its id.
        id: u32,
        /// Ids the model knows.
        vocab_size: usize,
    },
    /// A text that is too long whatever its tokens are.
    #[error(
        "expected a text of at most {max_tokens} tokens of {longest} bytes or less, so {} bytes, got \
         {bytes} bytes",
        max_tokens.saturating_mul(*longest)
    )]
    TooLong {
        /// Bytes of the text.
        bytes: usize,
        /// Tokens that it may have.
        max_tokens: usize,
        /// Bytes of text that the longest token stands for.
        longest: usize,
    },
    /// The `tokenizers` crate failed on a text or on ids.
    #[error("the tokenizer {} cannot {action}: {reason}", path.display())]
    Failed {
        /// The file.
        path: PathBuf,
        /// `encode` or `decode`.
        action: &'static str,
        /// What the crate said.
        reason: String,
    },
    /// A token id has no row in the model's embedding.
    #[error(
        "token id {id} at index {index} is outside the vocabulary: expected less than {vocab_size}"
    )]
    OutsideVocabulary {
        /// The id.
        id: u32,
        /// Its place in the list, from 0.
        index: usize,
        /// Ids the model knows.
        vocab_size: usize,
    },
}

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
    /// Each failure names the file: it cannot be read, is no regular file or longer than 512 MiB, is
    /// not whole JSON, or holds a part that the `tokenizers` crate does not know.
    ///
    /// That crate answers some damaged files with a panic. It becomes an error here like any other,
    /// but its message passes the panic hook first, which belongs to the program and by default
    /// writes to the standard error stream.
    pub fn load(dir: impl AsRef<Path>) -> Result<Self> {
        let path = dir.as_ref().join("tokenizer.json");
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
            let (path, violations) = (path.to_owned(), repeated);
            return Err(TokenizerError::Repeated { path, violations });
        }
        let normalizer = &value["normalizer"];
        check_charsmaps(normalizer).map_err(|reason| TokenizerError::Unsupported {
            path: path.to_owned(),
            part: describe("normalizer", normalizer),
            reason,
        })?;
        let mut inner = caught(|| tokenizers::Tokenizer::from_bytes(bytes))
            .map_err(|reason| refusal(&value, path, reason))?;
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
        let vocab_size = inner.get_vocab_size(true);
        let longest = longest_token_bytes(&inner);
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
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let words = caught(|| self.words(text)).map_err(|reason| self.failed("encode", reason))?;
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
    /// not tell what it leaves out.
    fn words(&self, text: &str) -> Result<PreTokenizedString, tokenizers::Error> {
        let (tokenizer, model) = (&self.inner, self.inner.get_model());
        let added = tokenizer.get_added_vocabulary();
        let mut words = added.extract_and_normalize(tokenizer.get_normalizer(), text);
        if let Some(splitter) = tokenizer.get_pre_tokenizer() {
            splitter.pre_tokenize(&mut words)?;
        }
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
    pub fn stream(&self) -> TextStream<'_> {
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

/// The beginning of a text, for errors.
fn cut(text: &str) -> String {
    const LONGEST: usize = 60;
    let mut cut: String = text.chars().take(LONGEST).collect();
    if cut.len() < text.len() {
        cut.push_str("..");
    }
    cut
}

/// See [`Tokenizer::longest_token_bytes`].
fn longest_token_bytes(tokenizer: &tokenizers::Tokenizer) -> Option<usize> {
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

/// Refuses a table of a `Precompiled` normalizer that announces more bytes than it has: the library
/// allocates what is announced, up to 8 GiB, before it looks.
fn check_charsmaps(normalizer: &Value) -> Result<(), String> {
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

/// What the library returns, or why it failed: it answers some damaged files with a panic, such as a
/// `Precompiled` normalizer that is no base64.
fn caught<T, E: ToString>(action: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    // Nothing of ours is changed in there, so nothing is left half done.
    match catch_unwind(AssertUnwindSafe(action)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            Err(format!("it panicked: {}", cut(text.unwrap_or("?"))))
        }
    }
}

/// Says which part of a syntactically sound file the library refuses: its own message does not.
fn refusal(file: &Value, path: &Path, reason: String) -> TokenizerError {
    fn probe<T: serde::de::DeserializeOwned>(part: &Value) -> Result<(), String> {
        caught(|| serde_json::from_value::<Option<T>>(part.clone()).map(drop))
    }
    type Probe = fn(&Value) -> Result<(), String>;
    let parts: [(&str, Probe); 5] = [
        ("normalizer", probe::<NormalizerWrapper>),
        ("pre_tokenizer", probe::<PreTokenizerWrapper>),
        ("post_processor", probe::<PostProcessorWrapper>),
        ("decoder", probe::<DecoderWrapper>),
        ("model", probe::<ModelWrapper>),
    ];
    let refused = parts.into_iter().find_map(|(name, probe)| {
        let part = &file[name];
        let reason = probe(part).err()?;
        Some((describe(name, part), reason))
    });
    let (part, reason) = refused.unwrap_or_else(|| ("tokenizer".to_owned(), reason));
    TokenizerError::Unsupported {
        path: path.to_owned(),
        part,
        reason,
    }
}

/// The part's name with its type: `normalizer "NFC"`. Of a sequence, the types of its members
/// follow, since the refused one is among them.
fn describe(name: &str, part: &Value) -> String {
    let Some(kind) = part["type"].as_str() else {
        return name.to_owned();
    };
    let members = [
        &part["normalizers"],
        &part["pretokenizers"],
        &part["processors"],
        &part["decoders"],
    ];
    let kinds: Vec<&str> = members
        .into_iter()
        .filter_map(Value::as_array)
        .flatten()
        .map(|member| member["type"].as_str().unwrap_or("?"))
        .collect();
    match kinds.as_slice() {
        [] => format!("{name} \"{kind}\""),
        kinds => format!("{name} \"{kind}\" of {}", kinds.join(", ")),
    }
}

/// Turns ids into text one at a time, yielding only what later ids cannot change.
///
/// A character of several bytes may be spread over several tokens; until the last of them, decoding
/// gives U+FFFD in its place. The stream holds such a tail back until it is complete, or until
/// [`TextStream::finish`]. What all calls yield, put together, is what [`Tokenizer::decode`] gives
/// for all ids at once.
#[derive(Debug, Clone)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Ids still needed: the last group whose text is out, then those whose text is not. The group
    /// stays because a decoder may treat the first token it sees in a special way.
    window: Vec<u32>,
    /// How many ids of `window` belong to that group.
    done_ids: usize,
    /// How many bytes of the window's text are out.
    done_bytes: usize,
}

impl<'a> TextStream<'a> {
    /// A stream at the beginning of a text.
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self {
            tokenizer,
            window: Vec::new(),
            done_ids: 0,
            done_bytes: 0,
        }
    }

    /// Takes the next id and returns the text that is now certain, often empty.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.window.push(id);
        let text = self.tokenizer.decode(&self.window)?;
        // U+FFFD at the end may be the beginning of a character that the next id completes.
        let certain = text.trim_end_matches(char::REPLACEMENT_CHARACTER).len();
        let new = self.take(&text, certain);
        if certain == text.len() {
            self.window.drain(..self.done_ids);
            self.done_ids = self.window.len();
            self.done_bytes = self.tokenizer.decode(&self.window)?.len();
        }
        Ok(new)
    }

    /// Returns the text still held back, U+FFFD for bytes that never became a character, and
    /// starts afresh.
    pub fn finish(&mut self) -> Result<String> {
        let text = self.tokenizer.decode(&self.window)?;
        let rest = self.take(&text, text.len());
        *self = Self::new(self.tokenizer);
        Ok(rest)
    }

    /// The bytes of `text` up to `certain` that are not out yet.
    fn take(&mut self, text: &str, certain: usize) -> String {
        let new = text
            .get(self.done_bytes..certain)
            .unwrap_or_default()
            .to_owned();
        self.done_bytes = self.done_bytes.max(certain);
        new
    }
}
