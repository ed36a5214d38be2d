//! What templates of Hugging Face's transformers may say and minijinja's language has not, in its words.

use minijinja::machinery::{Span, Token, tokenize};
use minijinja::syntax::SyntaxConfig;

/// The filter that `'..' % value` becomes.
pub(super) const PERCENT: &str = "percent_of_python";

/// What stands in the place of some bytes of a template.
struct Edit {
    start: u32,
    end: u32,
    text: String,
}

/// A template of the same lines, that minijinja understands. One that cannot be read at all is left as it is.
///
/// `{% generation %}` and its end mark for training what the assistant says: their body stands for itself, with
/// names of its own. A `%` behind a text that is written out is Python's way to fill it in, and a backslash at the
/// end of a line in one joins lines.
pub(super) fn translate(source: &str, syntax: SyntaxConfig) -> String {
    let tokens: Result<Vec<_>, _> = tokenize(source, false, syntax).collect();
    let Ok(tokens) = tokens else {
        return source.to_owned();
    };
    let mut edits = Vec::new();
    for (at, (token, span)) in tokens.iter().enumerate() {
        if matches!(token, Token::Str(_) | Token::String(_)) {
            edits.extend(joined_lines(source, span));
        }
        let before = at.checked_sub(1).map(|before| &tokens[before].0);
        match (before, token) {
            (Some(Token::BlockStart), Token::Ident("generation")) => {
                edits.push(Edit::of(span, "with"));
            }
            (Some(Token::BlockStart), Token::Ident("endgeneration")) => {
                edits.push(Edit::of(span, "endwith"));
            }
            (Some(Token::Str(_) | Token::String(_)), Token::Mod) => {
                let Some((_, last)) = operand(&tokens[at + 1..]) else {
                    continue;
                };
                edits.push(Edit::of(span, &format!("|{PERCENT}(")));
                edits.push(Edit {
                    start: last.end_offset,
                    end: last.end_offset,
                    text: ")".to_owned(),
                });
            }
            _ => {}
        }
    }
    // What is inside another ends before it, at the same place too.
    edits.sort_by_key(|edit| edit.start);
    apply(source, &edits)
}

impl Edit {
    fn of(span: &Span, text: &str) -> Self {
        Self {
            start: span.start_offset,
            end: span.end_offset,
            text: text.to_owned(),
        }
    }
}

/// Takes a backslash at the end of a line out of a text that is written out, with the end of the line, as Python
/// does.
fn joined_lines(source: &str, span: &Span) -> Vec<Edit> {
    let (start, end) = (span.start_offset as usize, span.end_offset as usize);
    let mut edits = Vec::new();
    let mut chars = source[start..end].char_indices();
    while let Some((at, c)) = chars.next() {
        if c == '\\' && matches!(chars.next(), Some((_, '\n'))) {
            let start = span.start_offset + at as u32;
            edits.push(Edit {
                start,
                end: start + 2,
                text: String::new(),
            });
        }
    }
    edits
}

fn apply(source: &str, edits: &[Edit]) -> String {
    let mut text = String::with_capacity(source.len());
    let mut done = 0;
    for edit in edits {
        text += &source[done..edit.start as usize];
        text += &edit.text;
        done = edit.end as usize;
    }
    text + &source[done..]
}

/// The last token of what a `%` applies to, which stands at the beginning: signs, a value, what is taken or
/// called of it, and filters. None if there is no such thing.
fn operand<'a, 's>(tokens: &'a [(Token<'s>, Span)]) -> Option<&'a (Token<'s>, Span)> {
    let is_sign = |(token, _): &&(Token<'_>, Span)| matches!(token, Token::Minus | Token::Plus);
    let mut last = tokens.iter().take_while(is_sign).count();
    last = bracketed(tokens, last)?;
    loop {
        last = match tokens.get(last + 1).map(|(token, _)| token) {
            Some(Token::Dot | Token::Pipe) => last + 2,
            Some(Token::ParenOpen | Token::BracketOpen) => bracketed(tokens, last + 1)?,
            _ => return tokens.get(last),
        };
    }
}

/// Where what begins at a token ends: there, or where its bracket is closed.
fn bracketed(tokens: &[(Token<'_>, Span)], at: usize) -> Option<usize> {
    let mut open = Vec::new();
    for (end, (token, _)) in tokens.iter().enumerate().skip(at) {
        match token {
            Token::ParenOpen | Token::BracketOpen | Token::BraceOpen => open.push(token),
            Token::ParenClose | Token::BracketClose | Token::BraceClose => {
                let closed = matches!(
                    (open.pop()?, token),
                    (Token::ParenOpen, Token::ParenClose)
                        | (Token::BracketOpen, Token::BracketClose)
                        | (Token::BraceOpen, Token::BraceClose)
                );
                closed.then_some(())?;
            }
            Token::BlockEnd | Token::VariableEnd => return None,
            _ => {}
        }
        if open.is_empty() {
            return Some(end);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::jinja::tests::render;

    /// Long texts of templates are written so. The expected ones are Python's.
    #[test]
    fn a_backslash_joins_lines() {
        let joined = "{{ 'a\\\nb\\\\\nc' }}{{ '%s\\\n!' % 'd\\\n' }}\\\n";
        assert_eq!(render(joined).unwrap(), "ab\\\ncd!\\");
    }

    /// The expected texts are those of transformers.
    #[test]
    fn marks_of_generation_stand_for_their_body() {
        let marked = "{% for m in messages %}\n{% if m.role == 'user' %}\n  {%- generation -%}\n  {% set a = 1 %}\n {{ m.content }}{{ a }}\n  {%- endgeneration %}\n{{ a is defined }}\n{% endif %}\n{% endfor %}";
        assert_eq!(render(marked).unwrap(), " <x> & é1False\n");
        let words = "{% raw %}{% generation %}{% endraw %}{{ '{% generation %}' }}{# {% generation %} #}{% set generation = 1 %}{{ generation }}";
        assert_eq!(render(words).unwrap(), "{% generation %}{% generation %}1");
        insta::assert_snapshot!(render("a\n{% generation %}").unwrap_err(), @"syntax error: unexpected end of input, expected end of block (in chat_template:2)");
    }

    #[test]
    fn a_text_is_filled_in_as_in_python() {
        let filled = [
            ("'%s: %d%%' % ('a', 3)", "a: 3%"),
            ("'%s' % messages[1].role | upper", "USER"),
            ("'%s' % messages[1]['role'].upper() ~ 'x'", "USERx"),
            ("'%s' % -1", "-1"),
            ("'%02d' % 7 + '|'", "07|"),
            ("'<%s>' % ('%s' % 'a')", "<a>"),
            ("'%s-%s' % ('%s' % 'a', '%s' % 'b')", "a-b"),
            ("'%.2f' % 1.5", "1.50"),
            ("'%(a)s' % {'a': 'b'}", "b"),
            ("'%s' % [1, 2]", "[1, 2]"),
            ("7 % 4 * 2 % 3", "0"),
            ("'%d' % 7 % 4 if false else '%'", "%"),
        ];
        for (expression, expected) in filled {
            let rendered = render(&format!("{{{{ {expression} }}}}"));
            assert_eq!(rendered.as_deref(), Ok(expected), "{expression}");
        }
        let translated = |source: &str| translate(source, SyntaxConfig::default());
        insta::assert_snapshot!(translated("{{ '%s' % ('%s' % a.b[c](d) | e(f)) ~ '%' %}"), @"{{ '%s' |percent_of_python( ('%s' |percent_of_python( a.b[c](d) | e(f)))) ~ '%' %}");
        // What is broken is left to be told of.
        assert_eq!(translated("{{ '%s' % }}"), "{{ '%s' % }}");
        assert_eq!(translated("{{ '%s' % (a }}"), "{{ '%s' % (a }}");
        insta::assert_snapshot!(render("{{ '%s %s' % 'a' }}").unwrap_err(), @"FILE fails on them: invalid operation: missing an argument for format spec at offset '4' (in chat_template:1)");
    }
}
