//! The process that runs a chat template, seen from inside: `serve` starts itself again for each conversation,
//! since a template can end its process, fill its memory, or never come to an end.
//!
//! It reads a question, as JSON, and writes two lines of JSON: how much memory it may take, and the answer.

use std::borrow::Cow;
use std::io::{self, Read, Write};
use std::process::ExitCode;

use serde::{Deserialize, Serialize};

use super::jinja::{Compiled, Message};
use super::template::Template;

/// The one argument that makes `serve` this process.
pub(super) const ARGUMENT: &str = "--render-chat-templates";

/// What it is asked.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Question<'a> {
    pub(super) template: Cow<'a, Template>,
    /// Bytes that the process may take beyond those that it starts with.
    pub(super) memory: u64,
    /// The conversation; none asks whether the template is one.
    pub(super) messages: Option<Cow<'a, [Message]>>,
}

/// What bounds the memory of a process: said before the template is looked at, which may end it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Bound {
    /// Bytes that it may take beyond those that it starts with; none if nothing bounds them.
    pub(super) memory: Option<u64>,
    /// Whether the process was started with a lower limit than what it was told.
    pub(super) inherited: bool,
}

/// A text, of no length without a conversation; or what is wrong with the template, or with the conversation.
pub(super) type Answer = Result<String, String>;

/// Whether this process is to run a template and no server.
pub fn is_renderer() -> bool {
    let mut args = std::env::args_os().skip(1);
    args.next().is_some_and(|first| first == ARGUMENT) && args.next().is_none()
}

/// Runs the template that standard input asks for.
pub fn render() -> ExitCode {
    match answer(io::stdin().lock(), io::stdout().lock(), bound) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "error: {ARGUMENT}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn answer(
    input: impl Read,
    mut out: impl Write,
    bound: impl FnOnce(u64) -> Bound,
) -> io::Result<()> {
    let question: Question<'_> = serde_json::from_str(&io::read_to_string(input)?)?;
    let mut say = |line: Vec<u8>| {
        out.write_all(&line)?;
        out.write_all(b"\n")?;
        out.flush()
    };
    say(serde_json::to_vec(&bound(question.memory))?)?;
    let compiled = Compiled::new(question.template.into_owned());
    let answer: Answer = compiled.and_then(|compiled| match question.messages {
        Some(messages) => compiled.render(&messages),
        None => Ok(String::new()),
    });
    say(serde_json::to_vec(&answer)?)
}

/// Lets the process take so many bytes more than it has, leave no file of its memory, and end with the one
/// that started it.
#[cfg(target_os = "linux")]
fn bound(memory: u64) -> Bound {
    use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
    // Where one of these cannot be had, time is still bounded from outside.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    let _ = setrlimit(Resource::Core, none);
    let pages = std::fs::read_to_string("/proc/self/statm");
    let pages = pages.ok().and_then(|text| {
        let first = text.split(' ').next()?;
        first.parse::<u64>().ok()
    });
    let taken = pages.map_or(0, |pages| {
        pages.saturating_mul(rustix::param::page_size() as u64)
    });
    let now = getrlimit(Resource::As);
    let limit = taken.saturating_add(memory);
    if let Some(now) = now.current.filter(|now| *now <= limit) {
        return Bound {
            memory: Some(now.saturating_sub(taken)),
            inherited: true,
        };
    }
    let lower = Rlimit {
        current: Some(limit),
        maximum: now.maximum,
    };
    let set = pages.is_some() && setrlimit(Resource::As, lower).is_ok();
    Bound {
        memory: set.then_some(memory),
        inherited: false,
    }
}

/// Elsewhere only time is bounded, from outside.
#[cfg(not(target_os = "linux"))]
fn bound(_: u64) -> Bound {
    Bound {
        memory: None,
        inherited: false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn answered(source: &str, content: Option<&str>) -> String {
        let template =
            json!({"source": source, "place": "FILE", "bos_token": "<b>", "eos_token": null});
        let messages = content.map(|content| json!([{"role": "user", "content": content}]));
        let question = json!({"template": template, "memory": 7, "messages": messages});
        let mut out = Vec::new();
        let bound = |memory| Bound {
            memory: Some(memory),
            inherited: false,
        };
        answer(question.to_string().as_bytes(), &mut out, bound).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_question_has_its_bound_and_its_answer_in_a_line_each() {
        let source = "{{ bos_token }}{% if messages[0].content == 'no' %}{{ raise_exception('never') }}{% endif %}{{ messages[0].content }}";
        insta::assert_snapshot!(answered(source, Some("a\nb")), @r#"
        {"memory":7,"inherited":false}
        {"Ok":"<b>a\nb"}
        "#);
        insta::assert_snapshot!(answered(source, Some("no")), @r#"
        {"memory":7,"inherited":false}
        {"Err":"refused by FILE: never"}
        "#);
        // Nothing is rendered.
        insta::assert_snapshot!(answered("{{ raise_exception('never') }}", None), @r#"
        {"memory":7,"inherited":false}
        {"Ok":""}
        "#);
        insta::assert_snapshot!(answered("{% if %}", None), @r#"
        {"memory":7,"inherited":false}
        {"Err":"syntax error: unexpected end of block (in chat_template:1)"}
        "#);
    }
}
