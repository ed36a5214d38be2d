//! Fields that both kinds of requests share: how many tokens, how they are chosen, where a text ends.

use serde_json::{Value, json};

use super::error::{ApiError, Result};
use super::fields::{Fields, expected, text};
use crate::sampling::SamplingArgs;
use crate::values;

/// Texts that end an output, at most.
pub(super) const MAX_STOPS: usize = 4;

/// Texts that one request can ask for, at most, where more can run and wait.
pub(super) const MAX_CHOICES: usize = 128;

/// Fields that change nothing here, whatever they say: who asks, and how OpenAI bills and stores it.
const IGNORED: [&str; 8] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
];

/// What a client wants of a text.
#[derive(Debug, Clone)]
pub(super) struct Params {
    /// Texts for each prompt.
    pub(super) n: usize,
    /// As given, behind the field's name.
    pub(super) max_tokens: Option<(&'static str, usize)>,
    /// Temperature, top-k and top-p, as given.
    pub(super) sampling: SamplingArgs,
    /// As given.
    pub(super) seed: Option<u64>,
    pub(super) stop: Vec<String>,
    pub(super) stream: bool,
    /// Whether the stream ends with what it took.
    pub(super) include_usage: bool,
}

impl Params {
    /// Takes the fields out of a request, which may ask for so many `texts`. `max_tokens` has one of these
    /// names.
    ///
    /// # Errors
    /// Names the field.
    pub(super) fn take(
        fields: &mut Fields,
        max_tokens: &[&'static str],
        texts: usize,
    ) -> Result<Self> {
        let most = self::max_tokens(fields, max_tokens)?;
        let n = fields.count("n", 1, texts)?.unwrap_or(1);
        let stream = fields.take("stream", "true or false", Value::as_bool)?;
        let params = Self {
            n,
            max_tokens: most,
            sampling: sampling(fields)?,
            seed: fields.take("seed", "a whole number of 64 bits", seed)?,
            stop: stop(fields)?,
            stream: stream.unwrap_or(false),
            include_usage: include_usage(fields, stream.unwrap_or(false))?,
        };
        for (name, neutral) in neutral() {
            fields.neutral(name, &neutral)?;
        }
        fields.ignore(&IGNORED);
        Ok(params)
    }
}

/// Fields that ask for what is not there, with the values that ask for nothing. Those of other servers
/// that clients send by habit are among them.
fn neutral() -> [(&'static str, Vec<Value>); 10] {
    [
        ("presence_penalty", vec![json!(0)]),
        ("frequency_penalty", vec![json!(0)]),
        ("logit_bias", vec![json!({})]),
        ("repetition_penalty", vec![json!(1)]),
        ("length_penalty", vec![json!(1)]),
        ("min_p", vec![json!(0)]),
        ("min_tokens", vec![json!(0)]),
        ("ignore_eos", vec![json!(false)]),
        ("use_beam_search", vec![json!(false)]),
        ("stop_token_ids", vec![json!([])]),
    ]
}

/// The field of one of these names. Of two that differ, none can be what is meant.
fn max_tokens(
    fields: &mut Fields,
    names: &[&'static str],
) -> Result<Option<(&'static str, usize)>> {
    let mut most = None;
    for &name in names {
        let Some(given) = fields.count(name, 0, usize::MAX)? else {
            continue;
        };
        match most {
            Some((before, other)) if other != given => {
                let message = format!(
                    "expected {other}, as {before} says, or one of both fields, got {given}"
                );
                return Err(fields.refuse(name, &message));
            }
            _ => most = Some((name, given)),
        }
    }
    Ok(most)
}

fn sampling(fields: &mut Fields) -> Result<SamplingArgs> {
    let sampling = SamplingArgs {
        temperature: fields.take("temperature", "a number, 0 or above", |value| {
            value.as_f64().filter(|t| t.is_finite() && *t >= 0.0)
        })?,
        top_p: fields.take("top_p", "a number above 0 and at most 1", |value| {
            value.as_f64().filter(|p| *p > 0.0 && *p <= 1.0)
        })?,
        ..SamplingArgs::default()
    };
    let most = usize::MAX;
    let top_k = fields.take_or("top_k", |value| match value.as_i64() {
        // All tokens are those of a vocabulary, so that a checkpoint's own number does not stand in.
        Some(-1 | 0) => Ok(most),
        _ => values::whole_from(1, value).map_err(|_| {
            let what = "a whole number, 1 or above, or 0 or -1 for all";
            values::not_above(most as u64, value).unwrap_or_else(|| expected(what, value))
        }),
    })?;
    Ok(SamplingArgs { top_k, ..sampling })
}

/// OpenAI's seeds may be below zero.
fn seed(value: &Value) -> Option<u64> {
    value
        .as_u64()
        .or_else(|| value.as_i64().map(|seed| seed as u64))
}

fn stop(fields: &mut Fields) -> Result<Vec<String>> {
    let what = "a text, or a list of texts";
    let stops = fields.take("stop", what, |value| match value {
        Value::String(one) => Some(vec![one.clone()]),
        Value::Array(several) => several.iter().map(text).collect(),
        _ => None,
    })?;
    let stops = stops.unwrap_or_default();
    if stops.len() > MAX_STOPS {
        let message = format!("expected at most {MAX_STOPS} texts, got {}", stops.len());
        return Err(fields.refuse("stop", &message));
    }
    if stops.iter().any(String::is_empty) {
        let message = "expected texts that are not empty, got \"\"";
        return Err(fields.refuse("stop", message));
    }
    Ok(stops)
}

fn include_usage(fields: &mut Fields, stream: bool) -> Result<bool> {
    let Some(options) = fields.value("stream_options") else {
        return Ok(false);
    };
    if !stream {
        return Err(fields.refuse("stream_options", "expected only where stream is true"));
    }
    let mut options = Fields::of(fields.path("stream_options"), options)?;
    let include = options.take("include_usage", "true or false", Value::as_bool)?;
    // Noise against eavesdroppers, on encrypted connections.
    options.ignore(&["include_obfuscation"]);
    options.finish()?;
    Ok(include.unwrap_or(false))
}

/// Refuses a request for more texts than the `most` that one can ask for.
pub(super) fn check_choices(prompts: usize, n: usize, most: usize) -> Result<()> {
    match prompts.saturating_mul(n) {
        texts if texts > most => Err(ApiError::field(
            if prompts > 1 { "prompt" } else { "n" },
            format!("the request asks for {texts} texts: expected at most {most}"),
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(value: Value) -> std::result::Result<Params, String> {
        let mut fields = Fields::of(String::new(), value).ok().unwrap();
        let names = ["max_tokens", "max_completion_tokens"];
        let params = Params::take(&mut fields, &names, MAX_CHOICES);
        let params = params.and_then(|params| fields.finish().map(|()| params));
        params.map_err(|error| error.message)
    }

    /// A parameter that is accepted and changes nothing looks as if it did.
    #[test]
    fn what_is_not_followed_is_refused_by_name() {
        let refuse = |value| take(value).unwrap_err();
        let refusals = [
            json!({"presence_penalty": 0.5}),
            json!({"frequency_penalty": -1}),
            json!({"logit_bias": {"5": 1}}),
            json!({"repetition_penalty": 1.1}),
            json!({"min_p": 0.1}),
            json!({"stop_token_ids": [5]}),
            json!({"max_token": 5}),
            json!({"n": 129}),
            json!({"n": 1e9}),
            json!({"n": 0}),
            json!({"temperature": -1}),
            json!({"temperature": "0"}),
            json!({"top_p": 0}),
            json!({"top_k": 1.5}),
            json!({"top_k": 1e30}),
            json!({"seed": 1.5}),
            json!({"max_tokens": -1}),
            json!({"max_tokens": 1e30}),
            json!({"max_tokens": 5, "max_completion_tokens": 6}),
            json!({"stop": ["a", 1]}),
            json!({"stop": ["a", "b", "c", "d", "e"]}),
            json!({"stop": ""}),
            json!({"stream": 1}),
            json!({"stream_options": {"include_usage": true}}),
            json!({"stream": true, "stream_options": {"include_usage": 1}}),
            json!({"stream": true, "stream_options": {"usage": true}}),
        ]
        .map(refuse);
        insta::assert_snapshot!(refusals.join("\n"), @r#"
        presence_penalty: not supported: expected 0, or no such field, got 0.5
        frequency_penalty: not supported: expected 0, or no such field, got -1
        logit_bias: not supported: expected {}, or no such field, got {"5":1}
        repetition_penalty: not supported: expected 1, or no such field, got 1.1
        min_p: not supported: expected 0, or no such field, got 0.1
        stop_token_ids: not supported: expected [], or no such field, got [5]
        max_token: no field of this name is known
        n: expected a whole number from 1 to 128, got 129
        n: expected a whole number from 1 to 128, got 1000000000.0
        n: expected a whole number from 1 to 128, got 0
        temperature: expected a number, 0 or above, got -1
        temperature: expected a number, 0 or above, got "0"
        top_p: expected a number above 0 and at most 1, got 0
        top_k: expected a whole number, 1 or above, or 0 or -1 for all, got 1.5
        top_k: expected at most 18446744073709551615, got 1e+30
        seed: expected a whole number of 64 bits, got 1.5
        max_tokens: expected a whole number, 0 or above, got -1
        max_tokens: expected at most 18446744073709551615, got 1e+30
        max_completion_tokens: expected 5, as max_tokens says, or one of both fields, got 6
        stop: expected a text, or a list of texts, got ["a",1]
        stop: expected at most 4 texts, got 5
        stop: expected texts that are not empty, got ""
        stream: expected true or false, got 1
        stream_options: expected only where stream is true
        stream_options.include_usage: expected true or false, got 1
        stream_options.usage: no field of this name is known
        "#);
    }

    /// What clients send that ask for nothing of it.
    #[test]
    fn neutral_values_pass() {
        let params = take(json!({
            "presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}, "min_p": 0,
            "user": "someone", "metadata": {"a": 1}, "store": false, "service_tier": "auto",
            "stop": null, "n": null, "stream_options": null, "seed": -3, "top_k": -1,
            "max_tokens": 6, "max_completion_tokens": 6,
        }))
        .unwrap();
        assert_eq!(
            (params.n, params.max_tokens, params.stop.len()),
            (1, Some(("max_completion_tokens", 6)), 0)
        );
        assert_eq!(params.seed, Some((-3i64) as u64));
        for (given, expected) in [
            (json!(-1), usize::MAX),
            (json!(0), usize::MAX),
            (json!(7), 7),
        ] {
            let params = take(json!({"top_k": given})).unwrap();
            assert_eq!(params.sampling.top_k, Some(expected), "{given}");
        }
    }

    /// The last that 64 bits hold are taken as they are, and the next are not taken for others.
    #[test]
    fn whole_numbers_are_kept_or_refused() {
        let seed = |text: &str| {
            let fields: Value = serde_json::from_str(&format!("{{\"seed\": {text}}}")).unwrap();
            take(fields).map(|params| params.seed)
        };
        assert_eq!(seed("18446744073709551615"), Ok(Some(u64::MAX)));
        assert_eq!(seed("9007199254740993"), Ok(Some((1 << 53) + 1)));
        assert_eq!(seed("-9223372036854775808"), Ok(Some(1 << 63)));
        for out in ["18446744073709551616", "-9223372036854775809", "5.0", "1e3"] {
            assert!(seed(out).is_err(), "{out}");
        }
        let most = take(json!({"top_k": u64::MAX, "max_tokens": u64::MAX})).unwrap();
        assert_eq!(
            (most.sampling.top_k, most.max_tokens),
            (Some(usize::MAX), Some(("max_tokens", usize::MAX)))
        );
    }
}
