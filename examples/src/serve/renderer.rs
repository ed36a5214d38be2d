//! The process that runs chat templates, seen from inside: `serve` starts itself again for it, since a
//! template can end its process, fill its memory, or never come to an end.
//!
//! It reads lines of JSON and answers each with a line: first the template, then conversations.

use std::io::{self, BufRead, Write};
use std::process::ExitCode;

use serde::{Deserialize, Serialize};

use super::jinja::{Compiled, Message};
use super::template::Template;

/// The one argument that makes `serve` this process.
pub(super) const ARGUMENT: &str = "--render-chat-templates";

/// The first line.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Setup {
    pub(super) template: Template,
    /// Bytes that the process may take beyond those that it starts with.
    pub(super) memory: u64,
}

/// The answer to a line: nothing to the first one, else a text; or what is wrong with the template, or with
/// the conversation.
pub(super) type Answer = Result<String, String>;

/// Whether this process is to run templates and no server.
pub fn is_renderer() -> bool {
    let mut args = std::env::args_os().skip(1);
    args.next().is_some_and(|first| first == ARGUMENT) && args.next().is_none()
}

/// Runs templates until standard input ends.
pub fn render() -> ExitCode {
    match answer_all(io::stdin().lock(), io::stdout().lock(), bound) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "error: {ARGUMENT}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn answer_all(input: impl BufRead, mut out: impl Write, bound: impl FnOnce(u64)) -> io::Result<()> {
    let mut lines = input.lines();
    let mut answer = |answer: &Answer| {
        serde_json::to_writer(&mut out, answer)?;
        out.write_all(b"\n")?;
        out.flush()
    };
    let Some(first) = lines.next() else {
        return Ok(());
    };
    let setup: Setup = serde_json::from_str(&first?)?;
    bound(setup.memory);
    let compiled = match Compiled::new(setup.template) {
        Ok(compiled) => compiled,
        Err(fault) => return answer(&Err(fault)),
    };
    answer(&Ok(String::new()))?;
    for line in lines {
        let messages: Vec<Message> = serde_json::from_str(&line?)?;
        answer(&compiled.render(&messages))?;
    }
    Ok(())
}

/// Lets the process take so many bytes more than it has, leave no file of its memory, and end with the one
/// that started it.
#[cfg(target_os = "linux")]
fn bound(memory: u64) {
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
    let Some(pages) = pages else {
        return;
    };
    let taken = pages.saturating_mul(rustix::param::page_size() as u64);
    let now = getrlimit(Resource::As);
    let limit = taken.saturating_add(memory);
    let limit = now.current.map_or(limit, |now| now.min(limit));
    let _ = setrlimit(
        Resource::As,
        Rlimit {
            current: Some(limit),
            maximum: now.maximum,
        },
    );
}

/// Elsewhere only time is bounded, from outside.
#[cfg(not(target_os = "linux"))]
fn bound(_: u64) {}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn setup(source: &str) -> String {
        let template =
            json!({"source": source, "place": "FILE", "bos_token": "<b>", "eos_token": null});
        json!({"template": template, "memory": 1}).to_string()
    }

    fn answers(lines: &[String]) -> Vec<String> {
        let mut out = Vec::new();
        answer_all(lines.join("\n").as_bytes(), &mut out, |_| ()).unwrap();
        let text = String::from_utf8(out).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn each_line_has_an_answer_in_a_line() {
        let messages = |content: &str| json!([{"role": "user", "content": content}]).to_string();
        let source = "{{ bos_token }}{% if messages[0].content == 'no' %}{{ raise_exception('never') }}{% endif %}{{ messages[0].content }}";
        let lines = [
            setup(source),
            messages("a\nb"),
            messages("no"),
            messages("c"),
        ];
        insta::assert_snapshot!(answers(&lines).join("\n"), @r#"
        {"Ok":""}
        {"Ok":"<b>a\nb"}
        {"Err":"refused by FILE: never"}
        {"Ok":"<b>c"}
        "#);
        let broken = answers(&[setup("{% if %}"), messages("a")]);
        insta::assert_snapshot!(broken.join("\n"), @r#"{"Err":"syntax error: unexpected end of block (in chat_template:1)"}"#);
        assert!(answers(&[]).is_empty());
    }
}
