//! Texts that an expression may be found in, made of its own letters.

/// Texts to try `expression` on: its letters in a row, of all of it and of each alternative. What it says
/// of them, as how often they come, is passed over, so that an expression can be found in texts that are
/// not among these.
pub(super) fn probes(expression: &str) -> Vec<String> {
    let mut alternatives = vec![String::new()];
    let mut rest = expression.chars().peekable();
    while let Some(c) = rest.next() {
        let letter = match c {
            '|' => {
                alternatives.push(String::new());
                None
            }
            '(' => {
                if rest.next_if_eq(&'?').is_some() {
                    pass_group(&mut rest);
                }
                None
            }
            '[' => class(&mut rest),
            '\\' => escape(&mut rest),
            '{' => {
                rest.by_ref().find(|c| *c == '}');
                None
            }
            ')' | '^' | '$' | '*' | '+' | '?' => None,
            '.' => Some('a'),
            letter => Some(letter),
        };
        let last = alternatives
            .last_mut()
            .expect("there is one from the start");
        last.extend(letter);
    }
    let all = alternatives.concat();
    if alternatives.len() > 1 {
        alternatives.push(all);
    }
    alternatives.retain(|text| !text.is_empty());
    alternatives
}

/// Passes over what a group is, as `=` or `<name>`.
fn pass_group(rest: &mut std::iter::Peekable<std::str::Chars<'_>>) {
    while let Some(c) = rest.next() {
        match c {
            '<' if rest.next_if(|c| matches!(c, '=' | '!')).is_some() => return,
            '=' | '!' | ':' | '>' => return,
            _ => {}
        }
    }
}

/// The first letter of a class, behind its bracket; any other where it begins with what is not in it.
fn class(rest: &mut std::iter::Peekable<std::str::Chars<'_>>) -> Option<char> {
    let excluded = rest.next_if_eq(&'^').is_some();
    let first = match rest.next()? {
        '\\' => escape(rest),
        c => Some(c),
    };
    while let Some(c) = rest.next() {
        match c {
            '\\' => drop(rest.next()),
            ']' => break,
            _ => {}
        }
    }
    if excluded { Some('a') } else { first }
}

/// What stands for an escape, behind its backslash; nothing for one that takes nothing.
fn escape(rest: &mut std::iter::Peekable<std::str::Chars<'_>>) -> Option<char> {
    let c = rest.next()?;
    if matches!(c, 'p' | 'P' | 'x' | 'u') && rest.next_if_eq(&'{').is_some() {
        rest.find(|c| *c == '}');
    }
    match c {
        'n' => Some('\n'),
        't' => Some('\t'),
        'r' => Some('\r'),
        's' => Some(' '),
        'd' => Some('0'),
        'w' | 'p' | 'x' | 'u' | 'S' | 'D' => Some('a'),
        'W' | 'P' => Some('-'),
        'b' | 'B' | 'A' | 'z' | 'Z' | 'G' | 'K' => None,
        c => Some(c),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_of_an_expression_make_texts() {
        let of = |expression| probes(expression).join(" ");
        assert_eq!(of("(?=ROM)"), "ROM");
        assert_eq!(of(r"(?<=\d)(?![^x])\b"), "0a");
        assert_eq!(of(r"(?<name>a)(?P<n>b)(?i:c)\.{2,}"), "abc.");
        assert_eq!(of(r"cat|(?=[D\]]O[\p{L}x]G)"), "cat DOaG catDOaG");
        assert_eq!(of(r"^\s+$"), " ");
        for broken in ["", "(", "(?", "[", r"\", "{", r"[\"] {
            assert_eq!(of(broken), "", "{broken}");
        }
    }
}
