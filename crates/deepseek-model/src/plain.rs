//! Text from outside as messages show it.
//!
//! A name in a file can hold what moves the cursor of a terminal, colours or reorders the rest, or is
//! not seen at all.

use std::{fmt, path::Path};

/// Characters that are not seen or change where others are seen, beside the control characters: those
/// that Unicode calls default ignorable, but variation selectors, which emoji have; its line and
/// paragraph separators; and interlinear annotation.
const UNSEEN: &[(char, char)] = &[
    ('\u{ad}', '\u{ad}'),
    ('\u{34f}', '\u{34f}'),
    ('\u{61c}', '\u{61c}'),
    ('\u{115f}', '\u{1160}'),
    ('\u{17b4}', '\u{17b5}'),
    ('\u{180e}', '\u{180e}'),
    // Among them the marks and embeddings of bidirectional text.
    ('\u{200b}', '\u{200f}'),
    ('\u{2028}', '\u{202e}'),
    ('\u{2060}', '\u{206f}'),
    ('\u{3164}', '\u{3164}'),
    ('\u{feff}', '\u{feff}'),
    ('\u{ffa0}', '\u{ffa0}'),
    ('\u{fff0}', '\u{fffb}'),
    ('\u{1bca0}', '\u{1bca3}'),
    ('\u{1d173}', '\u{1d17a}'),
    // Tags, which spell ASCII unseen. The variation selectors among them have no use in a name.
    ('\u{e0000}', '\u{e0fff}'),
];

/// Whether a message can show a character as it is: it is seen, and leaves the others where they are.
pub fn is_plain(c: char) -> bool {
    let unseen = |&(first, last): &(char, char)| (first..=last).contains(&c);
    !c.is_control() && !UNSEEN.iter().any(unseen)
}

/// Text with what is not plain escaped.
pub(crate) struct Plain<'a>(pub(crate) &'a str);

impl fmt::Display for Plain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use fmt::Write;
        for c in self.0.chars() {
            if is_plain(c) {
                f.write_char(c)?;
            } else {
                write!(f, "{}", c.escape_default())?;
            }
        }
        Ok(())
    }
}

/// The same in quotes, for what may be empty or have blanks at its ends. A quote and a backslash in it are
/// escaped, too, so that no two texts look the same.
pub(crate) struct InQuotes<'a>(pub(crate) &'a str);

impl fmt::Display for InQuotes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use fmt::Write;
        f.write_char('"')?;
        for c in self.0.chars() {
            if matches!(c, '"' | '\\') {
                f.write_char('\\')?;
            }
            Plain(c.encode_utf8(&mut [0; 4])).fmt(f)?;
        }
        f.write_char('"')
    }
}

/// A path as errors show it, as [`ShownBytes`].
#[derive(Debug, Clone, Copy)]
pub struct Shown<'a>(pub &'a Path);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        ShownBytes(self.0.as_os_str().as_encoded_bytes()).fmt(f)
    }
}

/// Bytes that should be text as errors show them: what is not plain is escaped, and a byte that is no text
/// is `\xff`.
#[derive(Debug, Clone, Copy)]
pub struct ShownBytes<'a>(pub &'a [u8]);

impl fmt::Display for ShownBytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for chunk in self.0.utf8_chunks() {
            Plain(chunk.valid()).fmt(f)?;
            for byte in chunk.invalid() {
                write!(f, "\\x{byte:02x}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// U+FFFD in its place would make one name of many.
    #[test]
    fn bytes_that_are_no_text_are_shown() {
        let bytes = b"a\xff\xe9 \xc3\xa9\n\xe2\x82";
        insta::assert_snapshot!(ShownBytes(bytes), @r"a\xff\xe9 é\n\xe2\x82");
    }

    /// A name that ends in a quote would look like one that does not.
    #[test]
    fn quotes_in_quotes_are_escaped() {
        insta::assert_snapshot!(InQuotes("a\"b\\n\n\u{202e}é "), @r#""a\"b\\n\n\u{202e}é ""#);
        assert_eq!(InQuotes("").to_string(), "\"\"");
    }

    /// An override turns `exe.txt` around; a tag or a blank of no width makes two names look the same.
    #[test]
    fn what_reorders_or_hides_is_escaped() {
        let text = "a\u{1b}[31m\nb\u{9b}\u{202e}txt.\u{2066}exe\u{200b}\u{61c}\u{2028}\u{e0041}";
        insta::assert_snapshot!(Plain(text), @r"a\u{1b}[31m\nb\u{9b}\u{202e}txt.\u{2066}exe\u{200b}\u{61c}\u{2028}\u{e0041}");
        for c in ('\u{202a}'..='\u{202e}').chain('\u{2066}'..='\u{2069}') {
            assert!(!is_plain(c), "{:x}", c as u32);
        }
        for c in "\u{200e}\u{200f}\u{61c}\u{2028}\u{2029}\u{feff}\u{ad}".chars() {
            assert!(!is_plain(c), "{:x}", c as u32);
        }
        // Also letters of any script with their marks, and an emoji with its selector.
        let plain = "models/é e\u{301} 模型 نموذج \u{2764}\u{fe0f} .txt";
        assert_eq!(Plain(plain).to_string(), plain);
    }
}
