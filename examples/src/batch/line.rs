//! A line of a batch as it stands: which keys it may have, and of which type.

use anyhow::{anyhow, bail};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::id::Id;
use crate::json;
use crate::values::{self, count, field, field_or, quoted};

/// The keys that a line may have.
const KEYS: [&str; 11] = [
    "id",
    "prompt",
    "tokens",
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "stop",
    "logprobs",
    "policy",
];

/// A line; what is absent or null is for the flags to say.
#[derive(Debug)]
pub(super) struct Line {
    /// A string or a number.
    pub(super) id: Option<Id>,
    pub(super) prompt: Option<String>,
    pub(super) tokens: Option<Vec<u32>>,
    pub(super) max_new_tokens: Option<usize>,
    pub(super) temperature: Option<f64>,
    pub(super) top_k: Option<usize>,
    pub(super) top_p: Option<f64>,
    pub(super) seed: Option<u64>,
    /// None of them is empty.
    pub(super) stop: Option<Vec<String>>,
    pub(super) logprobs: Option<bool>,
    pub(super) policy: Option<String>,
}

/// The id alone.
#[derive(Deserialize)]
struct WithId {
    id: Option<Id>,
}

impl Line {
    /// # Errors
    /// It is no JSON object, or a key is unknown, comes twice or has a value of another type.
    pub(super) fn parse(text: &str) -> anyhow::Result<Self> {
        let parsed = json::parse(text.as_bytes());
        let fields = match parsed.map_err(|fault| without_line(&fault.error))? {
            Value::Object(fields) => fields,
            other => bail!("expected a JSON object, got {}", quoted(&other)),
        };
        if let Some(unknown) = fields.keys().find(|key| !KEYS.contains(&key.as_str())) {
            let unknown = quoted(&unknown.as_str().into());
            bail!("unknown key {unknown}: expected {}", KEYS.join(", "));
        }
        // As it is spelled: among the fields, a number may be altered.
        let WithId { id: spelled } = serde_json::from_str(text)?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let id = |value: &Value| (value.is_string() || value.is_number()).then_some(());
        let stops = "a text or a list of texts, none of them empty";
        Ok(Self {
            id: field(&fields, "id", "a string or a number", id)?.and(spelled),
            prompt: field(&fields, "prompt", "a text", text)?,
            tokens: tokens(&fields)?,
            max_new_tokens: count(&fields, "max_new_tokens", 0)?,
            temperature: field(&fields, "temperature", "a number", Value::as_f64)?,
            top_k: count(&fields, "top_k", 1)?,
            top_p: field(&fields, "top_p", "a number", Value::as_f64)?,
            seed: field_or(&fields, "seed", |value| values::whole(0..=u64::MAX, value))?,
            stop: field(&fields, "stop", stops, stop_texts)?,
            logprobs: field(&fields, "logprobs", "true or false", Value::as_bool)?,
            policy: field(&fields, "policy", "a text", text)?,
        })
    }
}

fn tokens(fields: &Map<String, Value>) -> anyhow::Result<Option<Vec<u32>>> {
    let list = |value: &Value| value.as_array().cloned();
    let list = field(fields, "tokens", "a list of token ids", list)?;
    let ids = list.map(|list| values::ids(&list)).transpose();
    ids.map_err(|(index, fault)| anyhow!("tokens[{index}]: {fault}"))
}

fn stop_texts(value: &Value) -> Option<Vec<String>> {
    let texts = match value {
        Value::Array(texts) => texts.as_slice(),
        text => std::slice::from_ref(text),
    };
    let text = |text: &Value| {
        text.as_str()
            .map(str::to_owned)
            .filter(|text| !text.is_empty())
    };
    texts.iter().map(text).collect()
}

/// What stopped the parser. A line is parsed alone, so that its own count of lines would mislead.
fn without_line(error: &serde_json::Error) -> anyhow::Error {
    let (column, text) = (error.column(), error.to_string());
    let place = format!(" at line {} column {column}", error.line());
    let text = text.strip_suffix(&place).unwrap_or(&text);
    // Of an object as a whole it knows none.
    let column = if column > 0 {
        format!(" (column {column})")
    } else {
        String::new()
    };
    anyhow!("{text}{column}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lines_that_are_no_requests_say_what_was_expected() {
        let lines = [
            "",
            "[1]",
            r#"{"prompt": "a""#,
            r#"{"promt": "a"}"#,
            r#"{"seed": 1, "seed": 2}"#,
            r#"{"prompt": 3}"#,
            r#"{"id": ["a"]}"#,
            r#"{"tokens": [1, -1]}"#,
            r#"{"tokens": [1, 4294967296]}"#,
            r#"{"tokens": "1"}"#,
            r#"{"max_new_tokens": 1.5}"#,
            r#"{"max_new_tokens": 1e23}"#,
            r#"{"seed": 18446744073709551616}"#,
            r#"{"top_k": -1}"#,
            r#"{"top_k": 0}"#,
            r#"{"temperature": "1"}"#,
            r#"{"stop": ["a", ""]}"#,
            r#"{"logprobs": 1}"#,
        ];
        let refuse = |line: &str| Line::parse(line).unwrap_err().to_string();
        insta::assert_snapshot!(lines.map(refuse).join("\n"), @r#"
        EOF while parsing a value
        expected a JSON object, got [1]
        EOF while parsing an object (column 14)
        unknown key "promt": expected id, prompt, tokens, max_new_tokens, temperature, top_k, top_p, seed, stop, logprobs, policy
        seed: the key comes twice (column 18)
        prompt: expected a text, got 3
        id: expected a string or a number, got ["a"]
        tokens[1]: expected a whole number, 0 or above, got -1
        tokens[1]: expected at most 4294967295, got 4294967296
        tokens: expected a list of token ids, got "1"
        max_new_tokens: expected a whole number, 0 or above, got 1.5
        max_new_tokens: expected at most 18446744073709551615, got 1e+23
        seed: expected at most 18446744073709551615, got 1.8446744073709552e+19
        top_k: expected a whole number, 1 or above, got -1
        top_k: expected a whole number, 1 or above, got 0
        temperature: expected a number, got "1"
        stop: expected a text or a list of texts, none of them empty, got ["a",""]
        logprobs: expected true or false, got 1
        "#);
        let long = "é".repeat(100_000);
        for line in [
            json!({ &long: 1 }).to_string(),
            format!("{{\"{long}\": 1, \"{long}\": 2}}"),
            json!(long).to_string(),
            json!({ "id": [long] }).to_string(),
        ] {
            let text = refuse(&line);
            assert!(text.len() < 400, "{} bytes", text.len());
        }
        let line = Line::parse(r#"{"id": 1.5, "prompt": null, "stop": "a", "tokens": []}"#);
        let line = line.unwrap();
        assert_eq!(line.id.unwrap().to_string(), "1.5");
        assert_eq!(line.prompt, None);
        assert_eq!(line.stop, Some(vec!["a".to_owned()]));
        assert_eq!(line.tokens, Some(Vec::new()));
    }
}
