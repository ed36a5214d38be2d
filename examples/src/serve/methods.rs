//! Python's methods of texts, lists and dicts, which chat templates call.

use minijinja::value::{Kwargs, Tuple, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};
use minijinja_contrib::pycompat;

/// A method of a value that minijinja itself does not have.
///
/// # Errors
/// There is none of this name, or it does not take these arguments.
pub(super) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let own = match value.kind() {
        ValueKind::String => value
            .as_str()
            .map_or(Ok(None), |text| of_text(state, text, name, args)),
        ValueKind::Seq => of_list(value, name, args),
        ValueKind::Map if CHANGING_A_DICT.contains(&name) => Err(changed(name)),
        ValueKind::Map if name == "copy" => {
            let () = from_args(args)?;
            Ok(Some(value.clone()))
        }
        _ => Ok(None),
    };
    match own? {
        Some(value) => Ok(value),
        None => pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// Methods that transformers lets no template call either.
const CHANGING_A_LIST: [&str; 8] = [
    "append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort",
];
const CHANGING_A_DICT: [&str; 5] = ["clear", "pop", "popitem", "setdefault", "update"];

fn changed(name: &str) -> Error {
    let message = format!(
        "{name}: a template cannot change a list or a dict: make a new one, as by + or in a namespace"
    );
    Error::new(ErrorKind::InvalidOperation, message)
}

fn of_list(list: &Value, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    match name {
        "copy" => {
            let () = from_args(args)?;
            Ok(Some(list.clone()))
        }
        "index" => {
            let (item,): (&Value,) = from_args(args)?;
            let found = list.try_iter()?.position(|other| other == *item);
            let found = found.ok_or_else(|| absent("list.index: the item"))?;
            Ok(Some(found.into()))
        }
        name if CHANGING_A_LIST.contains(&name) => Err(changed(name)),
        _ => Ok(None),
    }
}

fn of_text(
    state: &State<'_, '_>,
    text: &str,
    name: &str,
    args: &[Value],
) -> Result<Option<Value>, Error> {
    Ok(Some(match name {
        "title" => {
            let () = from_args(args)?;
            title(text).into()
        }
        "swapcase" => {
            let () = from_args(args)?;
            text.chars().flat_map(swapped).collect::<String>().into()
        }
        "casefold" => {
            let () = from_args(args)?;
            text.to_lowercase().replace('ß', "ss").into()
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            text.strip_prefix(prefix).unwrap_or(text).into()
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            text.strip_suffix(suffix).unwrap_or(text).into()
        }
        "split" | "rsplit" => split(text, args, name == "rsplit")?,
        "partition" | "rpartition" => {
            let (at,): (&str,) = from_args(args)?;
            partition(text, at, name == "rpartition")?
        }
        "index" | "rindex" => {
            let (part,): (&str,) = from_args(args)?;
            let at = match name {
                "index" => text.find(part),
                _ => text.rfind(part),
            };
            let at = at.ok_or_else(|| absent("str.index: the text"))?;
            text[..at].chars().count().into()
        }
        "zfill" => {
            let (width,): (usize,) = from_args(args)?;
            let (sign, digits) = match text.strip_prefix(['+', '-']) {
                Some(digits) => (&text[..1], digits),
                None => ("", text),
            };
            let zeros = missing(state, text, width)?;
            format!("{sign}{}{digits}", "0".repeat(zeros)).into()
        }
        "ljust" | "rjust" | "center" => {
            let (width, fill): (usize, Option<char>) = from_args(args)?;
            let left = missing(state, text, width)?;
            let left = match name {
                "ljust" => (0, left),
                "rjust" => (left, 0),
                // As Python shares out an odd one.
                _ => {
                    let before = left / 2 + (left & width & 1);
                    (before, left - before)
                }
            };
            let fill = |count: usize| fill.unwrap_or(' ').to_string().repeat(count);
            format!("{}{text}{}", fill(left.0), fill(left.1)).into()
        }
        "splitlines" => lines(text, args)?,
        _ => return Ok(None),
    }))
}

fn absent(what: &str) -> Error {
    let message = format!("{what} is not in it");
    Error::new(ErrorKind::InvalidOperation, message)
}

/// Characters that a text of some width takes beside its own, which count as steps.
fn missing(state: &State<'_, '_>, text: &str, width: usize) -> Result<usize, Error> {
    let missing = width.saturating_sub(text.chars().count());
    state.consume_fuel(missing as u64 / 16)?;
    Ok(missing)
}

/// Each run of letters with a capital at its beginning alone, also behind an apostrophe.
fn title(text: &str) -> String {
    let mut titled = String::with_capacity(text.len());
    let mut within = false;
    for c in text.chars() {
        if within {
            titled.extend(c.to_lowercase());
        } else {
            titled.extend(c.to_uppercase());
        }
        within = c.is_alphabetic();
    }
    titled
}

fn swapped(c: char) -> Vec<char> {
    if c.is_uppercase() {
        c.to_lowercase().collect()
    } else {
        c.to_uppercase().collect()
    }
}

/// The parts of a text, from its beginning or its end: `split(sep=None, maxsplit=-1)`.
fn split(text: &str, args: &[Value], from_end: bool) -> Result<Value, Error> {
    let (separator, most, options): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
    let separator = match separator {
        Some(separator) => Some(separator),
        None => options.get("sep")?,
    };
    let separator = separator.filter(|separator| !separator.is_none());
    let most = match most {
        Some(most) => Some(most),
        None => options.get("maxsplit")?,
    };
    options.assert_all_used()?;
    let parts = most.and_then(|most| usize::try_from(most).ok());
    let parts = parts.map_or(usize::MAX, |most| most.saturating_add(1));
    let Some(separator) = separator else {
        let words = words(text, parts, from_end);
        return Ok(words.into_iter().map(Value::from).collect());
    };
    let separator = separator.as_str().filter(|separator| !separator.is_empty());
    let separator = separator.ok_or_else(|| {
        let message = "split: expected a text of 1 character or more to split at";
        Error::new(ErrorKind::InvalidOperation, message)
    })?;
    if !from_end {
        return Ok(text.splitn(parts, separator).map(Value::from).collect());
    }
    let mut split: Vec<&str> = text.rsplitn(parts, separator).collect();
    split.reverse();
    Ok(split.into_iter().map(Value::from).collect())
}

/// Words between blanks; behind as many as there may be, or before them, the rest as it is.
fn words(text: &str, parts: usize, from_end: bool) -> Vec<&str> {
    let near = if from_end {
        str::trim_end
    } else {
        str::trim_start
    };
    let (mut words, mut rest) = (Vec::new(), near(text));
    while !rest.is_empty() {
        if words.len() + 1 == parts {
            words.push(rest);
            break;
        }
        let (word, more) = if from_end {
            let at = rest.trim_end_matches(|c: char| !c.is_whitespace()).len();
            (&rest[at..], &rest[..at])
        } else {
            rest.split_at(rest.find(char::is_whitespace).unwrap_or(rest.len()))
        };
        words.push(word);
        rest = near(more);
    }
    if from_end {
        words.reverse();
    }
    words
}

fn partition(text: &str, at: &str, from_end: bool) -> Result<Value, Error> {
    if at.is_empty() {
        let message = "partition: expected a text of 1 character or more to split at";
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    let found = if from_end {
        text.rsplit_once(at)
    } else {
        text.split_once(at)
    };
    let parts = match found {
        Some((before, after)) => [before, at, after],
        None if from_end => ["", "", text],
        None => [text, "", ""],
    };
    Ok(Value::from(Tuple::from(parts.map(Value::from))))
}

/// `splitlines(keepends=False)`: at all that ends a line for Python.
fn lines(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (kept, options): (Option<bool>, Kwargs) = from_args(args)?;
    let kept = match kept {
        Some(kept) => Some(kept),
        None => options.get("keepends")?,
    };
    options.assert_all_used()?;
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(ends_line).unwrap_or(rest.len());
        let behind = &rest[end..];
        let length = if behind.starts_with("\r\n") {
            2
        } else {
            behind.chars().next().map_or(0, char::len_utf8)
        };
        let whole = if kept == Some(true) { length } else { 0 };
        lines.push(&rest[..end + whole]);
        rest = &rest[end + length..];
    }
    Ok(lines.into_iter().map(Value::from).collect())
}

fn ends_line(c: char) -> bool {
    matches!(c, '\n'..='\r' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

#[cfg(test)]
mod tests {
    use crate::serve::jinja::tests::render;

    /// The expected texts are those of Jinja2 3.1.6, as transformers sets it up.
    #[test]
    fn methods_do_what_they_do_in_python() {
        let cases = [
            ("'a<x>b<x>c'.rsplit('<x>', 1)[0]", "a<x>b"),
            ("'a<x>b<x>c'.rsplit('<x>') | tojson", r#"["a", "b", "c"]"#),
            (
                "'a<x>b<x>c'.rsplit('<x>', maxsplit=1) | tojson",
                r#"["a<x>b", "c"]"#,
            ),
            (
                "'a<x>b<x>c'.split('<x>', maxsplit=1) | tojson",
                r#"["a", "b<x>c"]"#,
            ),
            (
                "'a<x>b<x>c'.split(sep='<x>') | tojson",
                r#"["a", "b", "c"]"#,
            ),
            ("'a<x>b<x>c'.split('<x>', 0) | tojson", r#"["a<x>b<x>c"]"#),
            ("' a  b c '.split() | tojson", r#"["a", "b", "c"]"#),
            ("' a  b c '.split(None, 1) | tojson", r#"["a", "b c "]"#),
            ("' a  b c '.rsplit(None, 1) | tojson", r#"[" a  b", "c"]"#),
            ("' a  b c '.rsplit() | tojson", r#"["a", "b", "c"]"#),
            ("' a '.split(none, 0) | tojson", r#"["a "]"#),
            ("''.split() | tojson", "[]"),
            ("''.split('x') | tojson", r#"[""]"#),
            ("'<think>a'.removeprefix('<think>')", "a"),
            ("'a</think>'.removesuffix('</think>')", "a"),
            ("'a'.removesuffix('')", "a"),
            ("'a=b=c'.partition('=') | tojson", r#"["a", "=", "b=c"]"#),
            ("'a=b=c'.rpartition('=') | tojson", r#"["a=b", "=", "c"]"#),
            ("'a'.partition('=') | tojson", r#"["a", "", ""]"#),
            ("'a'.rpartition('=') | tojson", r#"["", "", "a"]"#),
            (
                r#""it's a HAT-trick 3rd é".title()"#,
                "It'S A Hat-Trick 3Rd É",
            ),
            ("'aB1'.swapcase()", "Ab1"),
            ("'Straße'.casefold()", "strasse"),
            ("'éa'.index('a')", "1"),
            ("'abab'.rindex('a')", "2"),
            (
                "'-7'.zfill(4) ~ '7'.zfill(3) ~ 'abc'.zfill(2)",
                "-007007abc",
            ),
            (
                "'a'.ljust(3) ~ '|' ~ 'a'.rjust(3, '*') ~ '|' ~ 'ab'.center(5, '-') ~ 'a'.center(4, '-')",
                "a  |**a|--ab--a--",
            ),
            (
                r"'a\nb\r\nc\rd\x0be\n\nf'.splitlines() | tojson",
                r#"["a", "b", "c", "d", "e", "", "f"]"#,
            ),
            (
                r"'a\nb\r\nc'.splitlines(True) | tojson",
                r#"["a\n", "b\r\n", "c"]"#,
            ),
            (r"'a\n'.splitlines(keepends=true) | tojson", r#"["a\n"]"#),
            ("[1, 2, 3].index(2)", "1"),
            ("[1, 2].copy() | tojson", "[1, 2]"),
            ("'a'.startswith('a')", "True"),
            ("'{} {x}'.format(1, x=2)", "1 2"),
            ("'a b'.title() | upper", "A B"),
            ("'x'.isdigit() or '1'.isdigit()", "True"),
            (r#"" x ".strip() ~ 'xax'.strip('x')"#, "xa"),
            ("'abc'[::-1]", "cba"),
            ("'a-b'.replace('-', '+', 1)", "a+b"),
            ("'HELLO wORLD'.capitalize()", "Hello world"),
            ("'a,b' | replace(',', ';')", "a;b"),
        ];
        let differ = cases.into_iter().filter_map(|(expression, expected)| {
            let rendered = render(&format!("{{{{ {expression} }}}}"));
            (rendered.as_deref() != Ok(expected)).then_some((expression, rendered, expected))
        });
        let differ: Vec<_> = differ.collect();
        assert!(differ.is_empty(), "{differ:#?}");
    }

    #[test]
    fn what_a_method_cannot_do_is_told() {
        let told = [
            "'a'.index('b')",
            "'a'.split('')",
            "'a'.partition('')",
            "'a'.removeprefix(1)",
            "'a'.ljust(99999999999)",
            "messages.append(1)",
            "messages[0].update({})",
            "{}.pop('a')",
            "'%r' % 'a'",
        ]
        .map(|expression| render(&format!("{{{{ {expression} }}}}")).unwrap_err());
        insta::assert_snapshot!(told.join("\n"), @r"
        FILE fails on them: invalid operation: str.index: the text is not in it (in chat_template:1)
        FILE fails on them: invalid operation: split: expected a text of 1 character or more to split at (in chat_template:1)
        FILE fails on them: invalid operation: partition: expected a text of 1 character or more to split at (in chat_template:1)
        FILE fails on them: invalid operation: value is not a string (in chat_template:1)
        FILE: expected a rendering of at most 16000000 steps (an instruction, or 64 bytes of a text that it makes), got more: mend a loop in it that does not end, or shorten the messages
        FILE fails on them: invalid operation: append: a template cannot change a list or a dict: make a new one, as by + or in a namespace (in chat_template:1)
        FILE fails on them: invalid operation: update: a template cannot change a list or a dict: make a new one, as by + or in a namespace (in chat_template:1)
        FILE fails on them: invalid operation: pop: a template cannot change a list or a dict: make a new one, as by + or in a namespace (in chat_template:1)
        FILE fails on them: invalid operation: invalid conversion type 'r' in format spec at offset 1 (in chat_template:1)
        ");
    }
}
