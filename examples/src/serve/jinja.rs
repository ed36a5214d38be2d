//! Chat templates at work: a conversation to the one text that the model goes on from, as Hugging Face's
//! transformers makes it.

use std::error::Error as _;
use std::fmt::{Display, Formatter, Write};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Rest, Serde, Value};
use minijinja::{Environment, Error, context};
use minijinja_contrib::globals::cycler;
use serde::{Deserialize, Serialize};

use super::template::Template;
use super::tojson::tojson;
use super::{dialect, methods, python};
use crate::io::escaped;

/// What a rendering may cost, in minijinja's unit: an instruction, or 64 bytes of a result. Conversations
/// of megabytes take a fraction; a loop without end comes to one.
pub(super) const FUEL: u64 = 16_000_000;

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
        let environment = environment(&source).map_err(|error| told(&error))?;
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
                // There, and none: a template asks whether they are.
                tools => (),
                documents => (),
            })
        });
        text.map_err(|error| self.fault(&error))
    }

    /// What a client is told of a template that has failed.
    fn fault(&self, error: &Error) -> String {
        let place = &self.template.place;
        match error.kind() {
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
                let words = cut(error.detail().unwrap_or_default());
                format!("refused by {place}: {}", escaped(&words, |_| false))
            }
            _ => format!("{place} fails on them: {}", told(error)),
        }
    }
}

/// As transformers sets one up.
fn environment(source: &str) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    let mut syntax = SyntaxConfig::builder();
    syntax.trim_blocks(true).lstrip_blocks(true);
    let syntax = syntax.build()?;
    environment.set_syntax(syntax.clone());
    environment.set_unknown_method_callback(methods::method);
    environment.set_formatter(python::print);
    minijinja_contrib::add_to_environment(&mut environment);
    // That of minijinja takes them as a list.
    environment.add_function("cycler", |items: Rest<Value>| cycler(items.to_vec()));
    environment.set_fuel(Some(FUEL));
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("tojson", tojson);
    environment.add_filter(dialect::PERCENT, python::percent);
    // As Jinja reads one, on whatever system it was written.
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    environment.add_template_owned(NAME, dialect::translate(&source, syntax))?;
    Ok(environment)
}

/// What minijinja says of a template, which may be as long as that.
fn told(error: &Error) -> String {
    let (whole, line) = (error.to_string(), error.line().unwrap_or(0));
    let short = cut(&whole);
    if short.len() == whole.len() {
        return escaped(&whole, |_| false);
    }
    format!("{} (in {NAME}:{line})", escaped(&short, |_| false))
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

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    fn message(role: &str, content: &str) -> Message {
        Message {
            role: role.to_owned(),
            content: content.to_owned(),
            name: None,
        }
    }

    /// The text that a template makes of a short conversation.
    pub(in crate::serve) fn render(source: &str) -> Result<String, String> {
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
        let ascii = "{{ '\u{1f600}é\"' | tojson(ensure_ascii=true) }}";
        assert_eq!(render(ascii).unwrap(), r#""\ud83d\ude00\u00e9\"""#);
        let none = "{% if tools is not none %}T{% endif %}{{ tools is none }}{{ documents is defined }}\r\n{% if true %}\r\nb\r\n{% endif %}\r\nc\rd";
        assert_eq!(render(none).unwrap(), "TrueTrue\nb\nc\nd");
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
        insta::assert_snapshot!(render("{% frob %}").unwrap_err(), @"syntax error: unknown statement frob (in chat_template:1)");
        insta::assert_snapshot!(render("{{ messages[0].content.frob() }}").unwrap_err(), @"FILE fails on them: unknown method: string has no method named frob (in chat_template:1)");
        insta::assert_snapshot!(render("{{ messages.append(1) }}").unwrap_err(), @"FILE fails on them: invalid operation: append: a template cannot change a list or a dict: make a new one, as by + or in a namespace (in chat_template:1)");
        insta::assert_snapshot!(render("{% set f = '%s' %}{{ f % 1 }}").unwrap_err(), @"FILE fails on them: invalid operation: tried to use % operator on unsupported types string and number (in chat_template:1)");
    }

    /// A template may make up any name, and a value may be as long as all messages.
    #[test]
    fn what_is_said_of_a_template_has_a_bound() {
        let long = "x".repeat(1 << 20);
        for template in [
            format!("{{{{ 1 | {long} }}}}"),
            format!("{{% {long} %}}"),
            format!("{{{{ {long}() }}}}"),
            format!("{{{{ ''.{long}() }}}}"),
            format!("{{{{ 1 is {long} }}}}"),
            "{{ strftime_now('x' * 1000000 ~ '%') }}".to_owned(),
            "{{ 1 | int(frob='x' * 1000000) }}".to_owned(),
            "{{ raise_exception('x' * 1000000) }}".to_owned(),
        ] {
            let told = render(&template).unwrap_err();
            assert!(told.len() < 1200, "{}", &told[..100]);
        }
        let hidden = render("{{ strftime_now('\u{1b}[2J%') }}").unwrap_err();
        assert!(!hidden.contains('\u{1b}'), "{hidden:?}");
        let hidden = render("{% a\u{202e}b %}").unwrap_err();
        assert!(!hidden.contains('\u{202e}'), "{hidden:?}");
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
}
