//! Text to token ids and back.
//!
//! A thin layer over the `tokenizers` crate that adds what a program around a model needs: errors
//! that name the file, a check of ids a caller brings along, and [`TextStream`], which turns ids
//! into text one at a time without ever showing half a character.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tokenizers::{
    DecoderWrapper, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper,
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
    #[error("{} is not valid JSON (truncated?)", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why the parser stopped.
        source: serde_json::Error,
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
    /// The `tokenizers` crate failed on a text or on ids.
    #[error("the tokenizer cannot {action}: {reason}")]
    Failed {
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
}

impl Tokenizer {
    /// Reads `tokenizer.json` of the checkpoint directory `dir`.
    ///
    /// Truncation and padding that the file may ask for are switched off: a prompt is never
    /// shortened behind the caller's back.
    ///
    /// # Errors
    /// Each failure names the file: it cannot be read, is not whole JSON, or holds a part that the
    /// `tokenizers` crate does not know.
    pub fn load(dir: impl AsRef<Path>) -> Result<Self> {
        let path = dir.as_ref().join("tokenizer.json");
        let bytes = std::fs::read(&path).map_err(|source| TokenizerError::Read {
            path: path.clone(),
            source,
        })?;
        Self::parse(&bytes, &path)
    }

    /// `path` serves the errors only.
    fn parse(bytes: &[u8], path: &Path) -> Result<Self> {
        // The library folds syntax errors and unknown types into one text. A pass that only
        // checks the syntax costs milliseconds and tells the two apart.
        if let Err(source) = serde_json::from_slice::<serde::de::IgnoredAny>(bytes) {
            let path = path.to_owned();
            return Err(TokenizerError::Json { path, source });
        }
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes)
            .map_err(|error| refusal(bytes, path, &*error))?;
        inner.with_padding(None);
        inner
            .with_truncation(None)
            .expect("only a stride longer than the truncation is refused");
        let vocab_size = inner.get_vocab_size(true);
        Ok(Self { inner, vocab_size })
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
        // `encode_fast` leaves out the offsets into the text, which nobody reads here.
        let encoding = self
            .inner
            .encode_fast(text, false)
            .map_err(|error| failed("encode", &*error))?;
        Ok(encoding.get_ids().to_vec())
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
        self.inner
            .decode(ids, false)
            .map_err(|error| failed("decode", &*error))
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

fn failed(action: &'static str, error: &(dyn std::error::Error + Send + Sync)) -> TokenizerError {
    TokenizerError::Failed {
        action,
        reason: error.to_string(),
    }
}

/// Says which part of a syntactically sound file the library refuses: its own message does not.
fn refusal(
    bytes: &[u8],
    path: &Path,
    error: &(dyn std::error::Error + Send + Sync),
) -> TokenizerError {
    fn probe<T: serde::de::DeserializeOwned>(part: &Value) -> Result<(), String> {
        serde_json::from_value::<Option<T>>(part.clone())
            .map(drop)
            .map_err(|e| e.to_string())
    }
    type Probe = fn(&Value) -> Result<(), String>;
    let parts: [(&str, Probe); 5] = [
        ("normalizer", probe::<NormalizerWrapper>),
        ("pre_tokenizer", probe::<PreTokenizerWrapper>),
        ("post_processor", probe::<PostProcessorWrapper>),
        ("decoder", probe::<DecoderWrapper>),
        ("model", probe::<ModelWrapper>),
    ];
    let file: Value = serde_json::from_slice(bytes).unwrap_or_default();
    let refused = parts.into_iter().find_map(|(name, probe)| {
        let part = &file[name];
        let reason = probe(part).err()?;
        Some((describe(name, part), reason))
    });
    let (part, reason) = refused.unwrap_or_else(|| ("tokenizer".to_owned(), error.to_string()));
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
