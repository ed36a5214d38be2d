//! What chat templates write as JSON: as Python does, and no more than can be written.

use std::fmt::Write;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, State};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

use super::python::float;

/// How deep the values that a template writes as JSON may be nested, and how many they may be: they are
/// written without a step of the template, and one that holds itself twice has twice as many at each depth.
pub(super) const MOST_DEPTH: usize = 128;
pub(super) const MOST_VALUES: usize = 1_000_000;

/// JSON as Python's `json.dumps` writes it, which is what models saw in training: with blanks after
/// commas and colons, and, unlike Jinja's own filter, no escapes for HTML.
#[allow(
    clippy::needless_pass_by_value,
    reason = "minijinja hands arguments over"
)]
pub(super) fn tojson(_: &State, value: Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let ensure_ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    check_size(&value)?;
    let json = match indent {
        Some(width) => {
            let blanks = " ".repeat(width.min(64));
            dump(&value, PrettyFormatter::with_indent(blanks.as_bytes()))
        }
        None => dump(&value, PythonFormatter),
    };
    let json = json.map_err(|error| {
        let kind = minijinja::ErrorKind::BadSerialization;
        Error::new(kind, format!("tojson: {error}"))
    })?;
    Ok(Value::from_safe_string(if ensure_ascii == Some(true) {
        ascii(&json)
    } else {
        json
    }))
}

/// JSON in which what is not ASCII, so what stands in a text, is written by its numbers in UTF-16.
fn ascii(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        if c.is_ascii() {
            text.push(c);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                write!(text, "\\u{unit:04x}").expect("a string takes all that is written");
            }
        }
    }
    text
}

/// # Errors
/// A value is nested deeper, or has more parts, than what can be written.
fn check_size(value: &Value) -> Result<(), Error> {
    let too_large = |what| {
        let kind = minijinja::ErrorKind::BadSerialization;
        Err(Error::new(
            kind,
            format!("tojson: expected {what}, got more"),
        ))
    };
    let mut left = vec![(value.clone(), 0)];
    let mut seen = 0;
    while let Some((value, depth)) = left.pop() {
        seen += 1;
        if depth > MOST_DEPTH {
            return too_large(format!("values nested at most {MOST_DEPTH} deep"));
        }
        if seen + left.len() > MOST_VALUES {
            return too_large(format!("at most {MOST_VALUES} values"));
        }
        let parts = match value.kind() {
            ValueKind::Map => value.try_iter()?.map(|key| value.get_item(&key)).collect(),
            ValueKind::Seq | ValueKind::Iterable => {
                value.try_iter()?.take(MOST_VALUES).map(Ok).collect()
            }
            _ => Ok(Vec::new()),
        };
        left.extend(parts?.into_iter().map(|part| (part, depth + 1)));
    }
    Ok(())
}

fn dump(value: &Value, formatter: impl Formatter) -> Result<String, String> {
    let mut bytes = Vec::new();
    let mut serializer = Serializer::with_formatter(&mut bytes, formatter);
    let written = value.serialize(&mut serializer);
    written.map_err(|error| error.to_string())?;
    String::from_utf8(bytes).map_err(|error| error.to_string())
}

/// Blanks where Python puts them.
struct PythonFormatter;

impl Formatter for PythonFormatter {
    fn begin_array_value<W: std::io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: std::io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: std::io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        writer.write_all(b": ")
    }

    fn write_f64<W: std::io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
        value: f64,
    ) -> std::io::Result<()> {
        writer.write_all(float(value).as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use crate::serve::jinja::tests::render;

    /// What is nested too deep would end the program, and what holds itself twice would have no end.
    #[test]
    fn only_so_much_is_written_as_json() {
        let nested = |depth: usize| {
            let of = "{% set n = namespace(l=[1]) %}{% for i in range(DEPTH) %}{% set n.l = [n.l] %}{% endfor %}{{ n.l | tojson | length }}";
            render(&of.replace("DEPTH", &depth.to_string()))
        };
        assert_eq!(nested(127).unwrap(), (2 * 128 + 1).to_string());
        insta::assert_snapshot!(nested(20_000).unwrap_err(), @"FILE fails on them: could not serialize to value: tojson: expected values nested at most 128 deep, got more (in chat_template:1)");
        let twice = "{% set n = namespace(l={'a': [1]}) %}{% for i in range(60) %}{% set n.l = {'a': n.l, 'b': n.l} %}{% endfor %}{{ n.l | tojson }}";
        insta::assert_snapshot!(render(twice).unwrap_err(), @"FILE fails on them: could not serialize to value: tojson: expected at most 1000000 values, got more (in chat_template:1)");
    }
}
