//! Ids to text one at a time.

use std::borrow::Borrow;

use super::{Result, Tokenizer};

/// Turns ids into text one at a time, yielding only what later ids cannot change.
///
/// A character of several bytes may be spread over several tokens; until the last of them, decoding
/// gives U+FFFD in its place. The stream holds such a tail back until it is complete, or until
/// [`TextStream::finish`]. What all calls yield, put together, is what [`Tokenizer::decode`] gives
/// for all ids at once.
///
/// `T` is a tokenizer or leads to one: `&Tokenizer`, or `Arc<Tokenizer>` for a stream that outlives
/// what it was made in.
#[derive(Debug, Clone)]
pub struct TextStream<T> {
    tokenizer: T,
    /// Ids still needed: the last group whose text is out, then those whose text is not. The group
    /// stays because a decoder may treat the first token it sees in a special way.
    window: Vec<u32>,
    /// How many ids of `window` belong to that group.
    done_ids: usize,
    /// How many bytes of the window's text are out.
    done_bytes: usize,
}

impl<T: Borrow<Tokenizer>> TextStream<T> {
    /// A stream at the beginning of a text.
    pub fn new(tokenizer: T) -> Self {
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
        let text = self.decode()?;
        // U+FFFD at the end may be the beginning of a character that the next id completes.
        let certain = text.trim_end_matches(char::REPLACEMENT_CHARACTER).len();
        let new = self.take(&text, certain);
        if certain == text.len() {
            self.window.drain(..self.done_ids);
            self.done_ids = self.window.len();
            self.done_bytes = self.decode()?.len();
        }
        Ok(new)
    }

    /// Returns the text still held back, U+FFFD for bytes that never became a character, and
    /// starts afresh.
    pub fn finish(&mut self) -> Result<String> {
        let text = self.decode()?;
        let rest = self.take(&text, text.len());
        self.window.clear();
        (self.done_ids, self.done_bytes) = (0, 0);
        Ok(rest)
    }

    fn decode(&self) -> Result<String> {
        self.tokenizer.borrow().decode(&self.window)
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
