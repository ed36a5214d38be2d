//! Rust source without its comments and the contents of its literals.

/// The text with comments and the contents of string and character literals blanked out. Line breaks
/// stay, and so does the byte offset of everything else.
pub(super) fn code_only(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let hidden = hidden_prefix(rest, out.chars().next_back());
        let shown = match hidden {
            0 => first.len_utf8(),
            _ => 0,
        };
        out.push_str(&rest[..shown]);
        for c in rest[shown..shown + hidden].chars() {
            match c {
                '\n' => out.push('\n'),
                _ => out.extend(std::iter::repeat_n(' ', c.len_utf8())),
            }
        }
        rest = &rest[shown + hidden..];
    }
    out
}

/// Bytes at the start of `rest` that are a comment or a literal; `before` is the character before.
fn hidden_prefix(rest: &str, before: Option<char>) -> usize {
    if rest.starts_with("//") {
        return rest.find('\n').unwrap_or(rest.len());
    }
    if rest.starts_with("/*") {
        return block_comment(rest);
    }
    if rest.starts_with('"') {
        return quoted(rest, 1, '"');
    }
    if rest.starts_with('\'') {
        return character(rest);
    }
    let in_word = before.is_some_and(|c| c.is_alphanumeric() || c == '_');
    if rest.starts_with('r') && (!in_word || matches!(before, Some('b' | 'c'))) {
        return raw_string(rest);
    }
    0
}

fn block_comment(rest: &str) -> usize {
    let (mut depth, mut at) = (0usize, 0);
    while at < rest.len() {
        if rest[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += rest[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    rest.len()
}

/// Length of a literal that runs from the opening quote to the first `quote` from byte `from` on
/// that no backslash escapes.
fn quoted(rest: &str, from: usize, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip_while(|(at, _)| *at < from) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if c == quote => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

/// Length of a character literal; 0 for a lifetime.
fn character(rest: &str) -> usize {
    let mut chars = rest.char_indices().skip(1);
    match (chars.next(), chars.next()) {
        (Some((_, '\\')), _) => quoted(rest, 1, '\''),
        (Some(_), Some((at, '\''))) => at + 1,
        _ => 0,
    }
}

/// Length of a raw string; 0 if this is none.
fn raw_string(rest: &str) -> usize {
    let hashes = rest[1..].bytes().take_while(|b| *b == b'#').count();
    if !rest[1 + hashes..].starts_with('"') {
        return 0;
    }
    let end = format!("\"{}", "#".repeat(hashes));
    let body = 2 + hashes;
    rest[body..]
        .find(&end)
        .map_or(rest.len(), |at| body + at + end.len())
}

#[cfg(test)]
mod tests {
    use super::code_only;

    #[test]
    fn comments_and_literals_are_blanked_and_offsets_stay() {
        for (text, expected) in [
            ("a // b\nc", "a     \nc"),
            ("a /* /* b */ c */ d", "a                 d"),
            (r#"f("a\"b", c)"#, "f(      , c)"),
            ("f(b\"x\", c)", "f(b   , c)"),
            ("f(r#\"a\"b\"#, c)", "f(        , c)"),
            ("f(br\"\\\", c)", "f(b    , c)"),
            ("fn f<'a>(x: &'a u8, y: 'b')", "fn f<'a>(x: &'a u8, y:    )"),
            (r"('\'', '\\', 'é')", "(    ,     ,     )"),
            ("r#type for xr", "r#type for xr"),
            ("\"a\nb\" c", "  \n   c"),
        ] {
            let got = code_only(text);
            assert_eq!(got, expected, "{text}");
            assert_eq!(got.len(), text.len(), "{text}");
        }
    }
}
