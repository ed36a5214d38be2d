//! Chat templates: where a checkpoint has one.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use serde::{Deserialize, Serialize};

use crate::io::{read_text, shown};

/// Bytes of a template. It is read for each conversation anew; those of released models have a hundredth.
pub(super) const MOST_SOURCE: usize = 1 << 20;

/// A model's template as it is written, with the tokens that it names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Template {
    pub(super) source: String,
    /// Where it stands in the checkpoint, for messages.
    pub(super) place: String,
    pub(super) bos_token: Option<String>,
    pub(super) eos_token: Option<String>,
}

impl Template {
    /// The template of the checkpoint in `dir`, and the file that it is in: `chat_template.jinja`, else the
    /// `chat_template` of `tokenizer_config.json`; of several there, the one called `default`. `None` if
    /// there is none.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(super) fn load(dir: &Path) -> anyhow::Result<Option<(Self, PathBuf)>> {
        let path = dir.join("tokenizer_config.json");
        let config: serde_json::Value = match read(&path)? {
            Some(text) => serde_json::from_str(&text).with_context(|| shown(&path))?,
            None => serde_json::Value::Null,
        };
        let jinja = dir.join("chat_template.jinja");
        let (source, path, place) = match read(&jinja)? {
            Some(source) => (source, jinja, "chat_template.jinja"),
            None => match template(&config["chat_template"]).with_context(|| shown(&path))? {
                Some(source) => (source, path, "chat_template of tokenizer_config.json"),
                None => return Ok(None),
            },
        };
        if source.len() > MOST_SOURCE {
            let (most, got) = (MOST_SOURCE >> 20, source.len());
            bail!(
                "{}: expected a chat template of at most {most} MiB, got {got} bytes",
                shown(&path)
            );
        }
        let template = Self {
            source,
            place: place.to_owned(),
            bos_token: token(&config["bos_token"]),
            eos_token: token(&config["eos_token"]),
        };
        Ok(Some((template, path)))
    }
}

/// A file's text; none if nothing has this name. A pipe would be waited for, and a device read for ever.
fn read(path: &Path) -> anyhow::Result<Option<String>> {
    // A link that leads nowhere is something.
    let named = path.symlink_metadata();
    if named.is_err_and(|error| error.kind() == ErrorKind::NotFound) {
        return Ok(None);
    }
    let text = match path.metadata() {
        Ok(found) if !found.is_file() && !found.is_dir() => Err(anyhow!(
            "expected a file, found a pipe, a socket or a device"
        )),
        _ => read_text(path),
    };
    text.map(Some).with_context(|| shown(path))
}

/// The template that a `chat_template` gives.
fn template(value: &serde_json::Value) -> anyhow::Result<Option<String>> {
    use serde_json::Value::{Array, Null, String};
    match value {
        Null => Ok(None),
        String(source) => Ok(Some(source.clone())),
        Array(named) => {
            let default = named.iter().find(|one| one["name"] == "default");
            match default.and_then(|one| one["template"].as_str()) {
                Some(source) => Ok(Some(source.to_owned())),
                None => bail!("chat_template: expected a template called default in the list"),
            }
        }
        _ => bail!("chat_template: expected a text, or a list of templates with names"),
    }
}

/// A special token, written as a text or as an object.
fn token(value: &serde_json::Value) -> Option<String> {
    let text = value.as_str().or_else(|| value["content"].as_str());
    text.map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn templates_are_found_where_checkpoints_have_them() {
        let dir = tempfile::tempdir().unwrap();
        let load = || -> Result<Option<(String, String, String)>, String> {
            let loaded = Template::load(dir.path());
            let told = |e| format!("{e:#}").replace(dir.path().to_str().unwrap(), "DIR");
            let found = loaded.map_err(told)?;
            Ok(found.map(|(template, path)| {
                let name = path.file_name().unwrap().to_str().unwrap().to_owned();
                (template.source, template.place, name)
            }))
        };
        let config = |value: serde_json::Value| {
            std::fs::write(dir.path().join("tokenizer_config.json"), value.to_string()).unwrap();
        };
        assert_eq!(load(), Ok(None));
        config(json!({"bos_token": "<b>"}));
        assert_eq!(load(), Ok(None));
        let found = |text: &str, place: &str, file: &str| {
            Ok(Some((text.to_owned(), place.to_owned(), file.to_owned())))
        };
        let in_config = |text| {
            let place = "chat_template of tokenizer_config.json";
            found(text, place, "tokenizer_config.json")
        };
        config(json!({"chat_template": "one"}));
        assert_eq!(load(), in_config("one"));
        config(
            json!({"chat_template": [{"name": "tools", "template": "two"}, {"name": "default", "template": "three"}]}),
        );
        assert_eq!(load(), in_config("three"));
        config(json!({"chat_template": [{"name": "tools", "template": "two"}]}));
        insta::assert_snapshot!(load().unwrap_err(), @"DIR/tokenizer_config.json: chat_template: expected a template called default in the list");
        config(json!({"chat_template": 7}));
        insta::assert_snapshot!(load().unwrap_err(), @"DIR/tokenizer_config.json: chat_template: expected a text, or a list of templates with names");
        config(
            json!({"bos_token": {"content": "<b>"}, "eos_token": "<e>", "chat_template": "one"}),
        );
        let (template, _) = Template::load(dir.path()).unwrap().unwrap();
        let tokens = (template.bos_token.as_deref(), template.eos_token.as_deref());
        assert_eq!(tokens, (Some("<b>"), Some("<e>")));
        let jinja = "chat_template.jinja";
        std::fs::write(dir.path().join(jinja), "four").unwrap();
        assert_eq!(load(), found("four", jinja, jinja), "the file comes first");
        std::fs::write(dir.path().join(jinja), "x".repeat(MOST_SOURCE + 1)).unwrap();
        insta::assert_snapshot!(load().unwrap_err(), @"DIR/chat_template.jinja: expected a chat template of at most 1 MiB, got 1048577 bytes");
    }
    /// Nobody may write to a pipe, and a link to nowhere is a mistake that is told.
    #[cfg(unix)]
    #[test]
    fn what_is_no_file_is_refused_and_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let told = || {
            let error = Template::load(dir.path()).unwrap_err();
            format!("{error:#}").replace(dir.path().to_str().unwrap(), "DIR")
        };
        let path = dir.path().join("chat_template.jinja");
        std::os::unix::fs::symlink("no/such", &path).unwrap();
        insta::assert_snapshot!(told(), @"DIR/chat_template.jinja: expected a file, found a symbolic link to no/such, which is not there");
        std::fs::remove_file(&path).unwrap();
        let (read, write) = std::io::pipe().unwrap();
        let pipe = std::os::fd::AsRawFd::as_raw_fd(&read);
        std::os::unix::fs::symlink(format!("/proc/self/fd/{pipe}"), &path).unwrap();
        insta::assert_snapshot!(told(), @"DIR/chat_template.jinja: expected a file, found a pipe, a socket or a device");
        drop(write);
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        insta::assert_snapshot!(told(), @"DIR/chat_template.jinja: expected a file, found a directory");
    }
}
