//! Chat templates at work: a conversation to the one text that the model goes on from, as Hugging Face's
//! transformers makes it.

use std::error::Error as _;
use std::fmt::{Display, Formatter, Write};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value, ValueKind};
use minijinja::{Environment, Error, State, context};
use minijinja_contrib::pycompat;
use serde::{Deserialize, Serialize};
use serde_json::ser::{Formatter as JsonFormatter, PrettyFormatter, Serializer};

use super::template::Template;
use crate::io::escaped;

/// What a rendering may cost, in minijinja's unit: an instruction, or 64 bytes of a result. Conversations
/// of megabytes take a fraction; a loop without end comes to one.
const FUEL: u64 = 16_000_000;

/// How deep the values that a template writes as JSON may be nested, and how many they may be: they are
/// written without a step of the template, and one that holds itself twice has twice as many at each depth.
const MOST_DEPTH: usize = 128;
const MOST_VALUES: usize = 1_000_000;

/// Under which name the template is known in messages.
const NAME: &str = "chat_template";

/// Characters of a template's own words that a client gets to read.
const MOST_WORDS: usize = 1000;

/// A message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Message {
    pub(super) role: String,
    pub(super) content: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) name: Option<String>,
}

/// A template, compiled.
#[derive(Debug)]
pub(super) struct Compiled {
    environment: Environment<'static>,
    template: Template,
}

impl Compiled {
    /// # Errors
    /// What is wrong with the source.
    pub(super) fn new(mut template: Template) -> Result<Self, String> {
        let source = std::mem::take(&mut template.source);
        let environment = environment(source).map_err(|error| error.to_string())?;
        Ok(Self {
            environment,
            template,
        })
    }

    /// The text of a conversation, up to where the assistant is to go on.
    ///
    /// # Errors
    /// What the template raises, or what it cannot do with these messages.
    pub(super) fn render(&self, messages: &[Message]) -> Result<String, String> {
        let template = self.environment.get_template(NAME);
        let text = template.and_then(|template| {
            template.render(context! {
                messages => Value::from(Serde(messages)),
                bos_token => self.template.bos_token.as_deref().unwrap_or_default(),
                eos_token => self.template.eos_token.as_deref().unwrap_or_default(),
                add_generation_prompt => true,
            })
        });
        text.map_err(|error| self.fault(&error))
    }

    /// What a client is told of a template that has failed.
    fn fault(&self, error: &Error) -> String {
        let place = &self.template.place;
        let text = match error.kind() {
            minijinja::ErrorKind::OutOfFuel => format!(
                "{place}: expected a rendering of at most {FUEL} steps (an instruction, or 64 bytes of a text \
                 that it makes), got more: mend a loop in it that does not end, or shorten the messages"
            ),
            // The template's own words, for who wrote the messages.
            minijinja::ErrorKind::InvalidOperation
                if error
                    .source()
                    .is_some_and(<dyn std::error::Error>::is::<Raised>) =>
            {
                format!(
                    "refused by {place}: {}",
                    cut(error.detail().unwrap_or_default())
                )
            }
            _ => format!("{place} fails on them: {error}"),
        };
        escaped(&text, |_| false)
    }
}

/// As transformers sets one up.
fn environment(source: String) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    let mut syntax = SyntaxConfig::builder();
    syntax.trim_blocks(true).lstrip_blocks(true);
    environment.set_syntax(syntax.build()?);
    environment.set_unknown_method_callback(pycompat::unknown_method_callback);
    environment.set_fuel(Some(FUEL));
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("tojson", tojson);
    environment.add_template_owned(NAME, source)?;
    Ok(environment)
}

/// The beginning of what a template says, which may be the whole conversation.
fn cut(words: &str) -> String {
    match words.char_indices().nth(MOST_WORDS) {
        Some((end, _)) => format!("{}..", &words[..end]),
        None => words.to_owned(),
    }
}

/// Marks what a template raises itself.
#[derive(Debug)]
struct Raised;

impl Display for Raised {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str("raised by the template")
    }
}

impl std::error::Error for Raised {}

fn raise_exception(message: String) -> Result<Value, Error> {
    let error = Error::new(minijinja::ErrorKind::InvalidOperation, message);
    Err(error.with_source(Raised))
}

/// The local time, as Python's `datetime.now().strftime` writes it.
fn strftime_now(format: &str) -> Result<String, Error> {
    let mut text = String::new();
    let written = write!(text, "{}", chrono::Local::now().format(format));
    written.map_err(|_| {
        let message = format!("strftime_now: {format:?} is no format");
        Error::new(minijinja::ErrorKind::InvalidOperation, message)
    })?;
    Ok(text)
}

/// JSON as Python's `json.dumps` writes it, which is what models saw in training: with blanks after
/// commas and colons, and, unlike Jinja's own filter, no escapes for HTML.
#[allow(
    clippy::needless_pass_by_value,
    reason = "minijinja hands arguments over"
)]
fn tojson(_: &State, value: Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // The default there, and texts have no other form here.
    let _: Option<bool> = options.get("ensure_ascii")?;
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
    Ok(Value::from_safe_string(json))
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

fn dump(value: &Value, formatter: impl JsonFormatter) -> Result<String, String> {
    let mut bytes = Vec::new();
    let mut serializer = Serializer::with_formatter(&mut bytes, formatter);
    let written = value.serialize(&mut serializer);
    written.map_err(|error| error.to_string())?;
    String::from_utf8(bytes).map_err(|error| error.to_string())
}

/// Blanks where Python puts them.
struct PythonFormatter;

impl JsonFormatter for PythonFormatter {
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
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(role: &str, content: &str) -> Message {
        Message {
            role: role.to_owned(),
            content: content.to_owned(),
            name: None,
        }
    }

    fn render(source: &str) -> Result<String, String> {
        let template = Template {
            source: source.to_owned(),
            place: "FILE".to_owned(),
            bos_token: Some("<b>".to_owned()),
            eos_token: Some("<e>".to_owned()),
        };
        let messages = [message("system", " Be short. "), message("user", "<x> & é")];
        Compiled::new(template)?.render(&messages)
    }

    /// What templates in the wild lean on. The expected texts are those of transformers 5.24.
    #[test]
    fn templates_render_as_in_transformers() {
        let blocks = "{{ bos_token }}\n  {% for m in messages %}\n  {% if loop.first %}\n{{ m['role'] | upper }}: {{ m.content.strip() }}{{ eos_token }}\n    {% continue %}\n  {% endif %}\n{{ m.role }}: {{ m['content'] }}\n  {% endfor %}\n{% if add_generation_prompt %}assistant:{% endif %}\n";
        assert_eq!(
            render(blocks).unwrap(),
            "<b>\nSYSTEM: Be short.<e>\nuser: <x> & é\nassistant:"
        );
        assert_eq!(
            render(
                "{{ messages[1] | tojson }}{{ [] | tojson }}{{ [1, 2.5, none, true] | tojson }}"
            )
            .unwrap(),
            r#"{"role": "user", "content": "<x> & é"}[][1, 2.5, null, true]"#
        );
        assert_eq!(
            render("{{ {'a': [1]} | tojson(indent=2, ensure_ascii=False) }}").unwrap(),
            "{\n  \"a\": [\n    1\n  ]\n}"
        );
        let space = "{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}{{ messages[0].nothing is defined }}";
        assert_eq!(render(space).unwrap(), "2False");
        let year = render("{{ strftime_now('%Y') }}").unwrap();
        assert!(year.len() == 4 && year.parse::<u32>().is_ok(), "{year}");
    }

    #[test]
    fn what_a_template_cannot_do_is_told() {
        insta::assert_snapshot!(render("{{ raise_exception('roles\\nmust alternate') }}").unwrap_err(), @r"refused by FILE: roles\nmust alternate");
        let long = render("{{ raise_exception('é' * 5000) }}").unwrap_err();
        assert_eq!(long, format!("refused by FILE: {}..", "é".repeat(1000)));
        insta::assert_snapshot!(render("{{ strftime_now('%') }}").unwrap_err(), @r#"FILE fails on them: invalid operation: strftime_now: "%" is no format (in chat_template:1)"#);
        insta::assert_snapshot!(render("{{ messages | frob }}").unwrap_err(), @"FILE fails on them: unknown filter: filter frob is unknown (in chat_template:1)");
        insta::assert_snapshot!(render("{% generation %}").unwrap_err(), @"syntax error: unknown statement generation (in chat_template:1)");
    }

    /// A client chooses how long the loop of a template is. Wherever it stands, what is said is ours.
    #[test]
    fn a_rendering_ends() {
        let long =
            "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}";
        insta::assert_snapshot!(render(long).unwrap_err(), @"FILE: expected a rendering of at most 16000000 steps (an instruction, or 64 bytes of a text that it makes), got more: mend a loop in it that does not end, or shorten the messages");
        let of_long = [
            format!("{{% macro one() %}}{long}{{% endmacro %}}{{{{ one() | upper }}}}"),
            format!("{{% set one %}}{long}{{% endset %}}{{{{ one }}}}"),
            format!("{{% filter upper %}}{long}{{% endfilter %}}"),
            format!(
                "{{% macro one() %}}{{{{ caller() }}}}{{% endmacro %}}{{% call one() %}}{long}{{% endcall %}}"
            ),
            "{% set all = namespace(x='ab') %}{% for a in range(99) %}{% set all.x = all.x ~ all.x %}{% endfor %}"
                .to_owned(),
            "{{ 'a' * 99999999999 }}".to_owned(),
            "{{ (range(99999) | list) | map('string') | join(messages[0].content * 9999) }}"
                .to_owned(),
        ];
        for template in of_long {
            assert_eq!(render(&template), render(long), "{template}");
        }
    }

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
