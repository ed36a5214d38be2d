//! What reading takes of the host's memory: the JSON files of a checkpoint, and texts that become
//! tokens. The allocator would end the program in the middle of either.

use std::{
    fs::File,
    io::{self, BufRead, BufReader},
    path::Path,
};

use super::{MemoryError, Shortage, fits::largest_below, host};

/// What takes less is not looked at: asking the system takes as long as to read it.
const SMALL: u64 = 1 << 20;

/// Bytes of the longest file that is looked at. Whoever reads one refuses what is longer, unread.
const LONGEST: u64 = 512 << 20;

/// Bytes for each byte of JSON: as it is read, as a string of its own, and as that string grew.
const PER_BYTE: u64 = 3;
/// Bytes for each comma: a value, where the list or the object that holds it has grown, and what the
/// `tokenizers` crate makes of it. Of a vocabulary and its merges as many were seen; of plain values at
/// most 160.
const PER_COMMA: u64 = 350;
/// Bytes for each list beyond a value: room for four. With what is seen of merges as pairs.
const PER_LIST: u64 = 200;
/// Bytes for each object beyond a value: a node of a tree, with room for eleven entries.
const PER_OBJECT: u64 = 700;

/// Bytes for each byte of a text that is encoded: the most that was seen, of words of one byte. Words of
/// a usual length take a third.
const PER_BYTE_OF_TEXT: u64 = 384;

/// Refuses a file of JSON, of which memory does not hold what is made of it when it is read.
///
/// Nothing is said of what cannot be read, is no regular file or has more than 512 MiB.
///
/// # Errors
/// [`MemoryError::File`].
pub(crate) fn check_json(path: &Path) -> Result<(), MemoryError> {
    let Ok(bytes) = needed(path) else {
        return Ok(());
    };
    check(bytes).map_err(|shortage| MemoryError::File {
        path: path.to_owned(),
        bytes,
        shortage,
    })
}

/// The same of JSON that is a part of a file: the bytes that it may take, and what there is.
pub(crate) fn check_json_text(text: &[u8]) -> Result<(), (u64, Shortage)> {
    let bytes = taken(text).unwrap_or(u64::MAX);
    check(bytes).map_err(|shortage| (bytes, shortage))
}

/// Refuses a text of so many bytes, of which memory does not hold what a
/// [`Tokenizer`](crate::tokenizer::Tokenizer) makes of it on the way to its tokens.
///
/// # Errors
/// [`MemoryError::Text`].
pub fn check_text(text_bytes: usize) -> Result<(), MemoryError> {
    let of = |text_bytes: usize| (text_bytes as u64).saturating_mul(PER_BYTE_OF_TEXT);
    let bytes = of(text_bytes);
    check(bytes).map_err(|shortage| MemoryError::Text {
        text_bytes: text_bytes as u64,
        bytes,
        shortage,
        fits: largest_below(text_bytes, |fewer| host::fits(of(fewer))) as u64,
    })
}

fn check(bytes: u64) -> Result<(), Shortage> {
    if bytes < SMALL {
        return Ok(());
    }
    host::check(bytes)
}

fn needed(path: &Path) -> io::Result<u64> {
    // Asked before opening: to open a pipe is to wait for who writes to it.
    let metadata = path.metadata()?;
    if !metadata.is_file() || metadata.len() > LONGEST {
        return Ok(0);
    }
    taken(BufReader::with_capacity(1 << 16, File::open(path)?))
}

/// Bytes that parsing takes at most, by what makes values. What stands in strings makes none.
fn taken(mut text: impl BufRead) -> io::Result<u64> {
    let (mut bytes, mut in_string, mut escaped) = (0, false, false);
    loop {
        let part = text.fill_buf()?;
        let len = part.len();
        if len == 0 {
            return Ok(bytes);
        }
        for &byte in part {
            bytes += PER_BYTE;
            if in_string {
                in_string = escaped || byte != b'"';
                escaped = !escaped && byte == b'\\';
                continue;
            }
            bytes += match byte {
                b',' => PER_COMMA,
                b'[' => PER_LIST,
                b'{' => PER_OBJECT,
                _ => 0,
            };
            in_string = byte == b'"';
        }
        text.consume(len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> u64 {
        taken(text.as_bytes()).unwrap() - PER_BYTE * text.len() as u64
    }

    /// A vocabulary is full of brackets and commas, and with them escaped quotes.
    #[test]
    fn values_count_and_what_stands_in_strings_does_not() {
        assert_eq!(of(r#"{"a": [1, 2]}"#), PER_OBJECT + PER_LIST + PER_COMMA);
        assert_eq!(of(r#"{"a[,{": 1}"#), PER_OBJECT);
        assert_eq!(of(r#"{"\"[,": 1}"#), PER_OBJECT);
        assert_eq!(of(r#"{"\\": [1]}"#), PER_OBJECT + PER_LIST);
    }

    /// Small reads must count as one does.
    #[test]
    fn parts_change_nothing() {
        let text = r#"{"a\\\"[": [1, "é,", {"b": []}]}"#;
        for capacity in 1..text.len() {
            let parts = BufReader::with_capacity(capacity, text.as_bytes());
            assert_eq!(taken(parts).unwrap(), taken(text.as_bytes()).unwrap());
        }
    }

    /// Of these the reader says what is wrong; a pipe must not be waited for.
    #[test]
    fn what_cannot_be_read_is_left_to_who_reads_it() {
        check_json("no/such.json".as_ref()).unwrap();
        check_json("src".as_ref()).unwrap();
        #[cfg(unix)]
        check_json("/dev/zero".as_ref()).unwrap();
    }

    #[test]
    fn what_no_memory_holds_is_refused_with_what_would_fit() {
        check_text(100).unwrap();
        let refusal = check_text(usize::MAX).unwrap_err();
        let MemoryError::Text { bytes, fits, .. } = refusal else {
            panic!("{refusal}");
        };
        assert_eq!(bytes, u64::MAX);
        assert!((1..1 << 48).contains(&fits), "{fits}");
    }
}
