//! The bytes that a token stands for, where a text cannot show them: a part of a character.

use tokenizers::DecoderWrapper;

use super::Tokenizer;

impl Tokenizer {
    /// The bytes of the token `id`, which need not be whole characters. `None` for an id without a
    /// token, and where tokens are not spelled in byte letters (a decoder other than `ByteLevel`).
    pub fn bytes(&self, id: u32) -> Option<Vec<u8>> {
        let Some(DecoderWrapper::ByteLevel(_)) = self.inner.get_decoder() else {
            return None;
        };
        let spelling = self.token(id)?;
        // Special tokens are spelled as they are, and may hold what is no byte letter.
        let bytes: Option<Vec<u8>> = spelling.chars().map(byte_of).collect();
        Some(bytes.unwrap_or_else(|| spelling.into_bytes()))
    }
}

/// The byte that a byte letter stands for: itself if it can be printed, else the place among those
/// that cannot, from U+0100 on.
fn byte_of(letter: char) -> Option<u8> {
    let prints = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match u32::from(letter).checked_sub(0x100) {
        None => u8::try_from(letter).ok().filter(prints),
        Some(place) => (0..=u8::MAX)
            .filter(|byte| !prints(byte))
            .nth(place as usize),
    }
}
