//! How values look in Python, for chat templates that print them or fill them in.

use minijinja::value::{Tuple, Value, ValueKind};
use minijinja::{Error, Output, State};

/// `text % value`, where the value is one, or a tuple of some.
///
/// # Errors
/// The text asks for others.
pub(super) fn percent(
    state: &mut State<'_, '_>,
    text: &Value,
    value: Value,
) -> Result<Value, Error> {
    let mut args = vec![text.clone()];
    match value.downcast_object_ref::<Tuple>() {
        Some(_) => args.extend(value.try_iter()?),
        None => args.push(value),
    }
    state.apply_filter("format", &args)
}

/// Prints a value.
pub(super) fn print(
    out: &mut Output<'_>,
    state: &mut State<'_, '_>,
    value: &Value,
) -> Result<(), Error> {
    if value.kind() == ValueKind::Number
        && !value.is_integer()
        && let Ok(number) = f64::try_from(value.clone())
    {
        return Ok(out.write_str(&float(number))?);
    }
    minijinja::escape_formatter(out, state, value)
}

/// A number as Python's `repr` has it: both take a power of ten from the same sizes on, and write it in
/// another way.
pub(super) fn float(number: f64) -> String {
    let text = format!("{number:?}");
    let Some((digits, power)) = text.split_once('e') else {
        return text.to_ascii_lowercase();
    };
    let (sign, power) = match power.strip_prefix('-') {
        Some(power) => ('-', power),
        None => ('+', power),
    };
    format!("{digits}e{sign}{power:0>2}")
}

#[cfg(test)]
mod tests {
    use crate::serve::jinja::tests::render;

    /// The expected texts are those of Jinja2 3.1.6, as transformers sets it up.
    #[test]
    fn values_look_as_in_python() {
        let cases = [
            ("1e20", "1e+20"),
            ("1e16", "1e+16"),
            ("1e15", "1000000000000000.0"),
            ("0.00001", "1e-05"),
            ("0.0001", "0.0001"),
            ("2.0", "2.0"),
            ("1.5e-7", "1.5e-07"),
            (
                "[1e20, 0.1, 1e-5, 3.0] | tojson",
                "[1e+20, 0.1, 1e-05, 3.0]",
            ),
            ("1 / 3", "0.3333333333333333"),
            ("cycler('a', 'b').next()", "a"),
            (r#""%s and %05.1f" % ('a', 2.25)"#, "a and 002.2"),
            ("'a' ~ none ~ true ~ 1", "aNoneTrue1"),
            ("['a', none, true]", "['a', None, True]"),
            ("{'a': 1}", "{'a': 1}"),
            ("'%x' % 255", "ff"),
            ("'%5s|' % 'a'", "    a|"),
            ("'%-5s|' % 'a'", "a    |"),
            ("'%s' % none", "None"),
            ("'%s' % true", "True"),
            ("'%s %s' % (1, 2.0)", "1 2.0"),
            ("'%s' % ['a']", "['a']"),
        ];
        for (expression, expected) in cases {
            let rendered = render(&format!("{{{{ {expression} }}}}"));
            assert_eq!(rendered.as_deref(), Ok(expected), "{expression}");
        }
    }
}
