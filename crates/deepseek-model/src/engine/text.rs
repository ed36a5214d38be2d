//! The text of a request's tokens, as far as it is certain.

use std::sync::Arc;

use super::stops::{Certain, StopTexts};
use crate::{
    Result,
    tokenizer::{TextStream, Tokenizer},
};

/// Tokens to text, up to a stop text.
#[derive(Debug)]
pub(super) struct OutputText {
    stream: TextStream<Arc<Tokenizer>>,
    stops: StopTexts,
}

impl OutputText {
    /// At the beginning of the output.
    pub(super) fn new(tokenizer: Arc<Tokenizer>, stops: Vec<String>) -> Self {
        Self {
            stream: TextStream::new(tokenizer),
            stops: StopTexts::new(stops),
        }
    }

    /// Takes the next token.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub(super) fn push(&mut self, id: u32) -> Result<Certain> {
        let piece = self.stream.push(id)?;
        Ok(self.stops.push(&piece))
    }

    /// No token follows.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub(super) fn finish(&mut self) -> Result<Certain> {
        let piece = self.stream.finish()?;
        let mut certain = self.stops.push(&piece);
        if certain.stop.is_none() {
            let rest = self.stops.finish();
            certain.text.push_str(&rest.text);
            certain.stop = rest.stop;
        }
        Ok(certain)
    }
}
