//! A line of results: how it is written, and what makes one that was read a result of its request.

use anyhow::{bail, ensure};
use deepseek_model::engine::{EndReason, EngineRequest};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

use super::id::Id;
use super::request::Request;
use crate::io;

/// What can be done about a line that is not what it should be.
const REMEDY: &str = "choose another file, or remove the line";

/// Nats by which sums in f32 can put a log-probability above that of what is certain.
const ROUNDING: f64 = 1e-3;

/// Of a line of another kind.
pub(super) const NO_RESULT: &str =
    "expected a result of a batch, got something else: choose another file";

/// What came of a request: a line of JSON. Its first field is how such lines are told from others.
#[derive(Serialize)]
pub(super) struct Record<'a> {
    line: usize,
    id: &'a Id,
    request: &'a str,
    #[serde(flatten)]
    outcome: Outcome<'a>,
}

/// What a record says beside which request it answers.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum Outcome<'a> {
    Answer {
        text: &'a str,
        ids: &'a [u32],
        finish: Finish,
        #[serde(skip_serializing_if = "Option::is_none")]
        stop: Option<&'a str>,
        prompt_tokens: usize,
        cached_tokens: usize,
        time_to_first_token_s: Option<f64>,
        #[serde(skip_serializing_if = "Option::is_none")]
        prompt_logprobs_nats: Option<Vec<Option<f32>>>,
        #[serde(skip_serializing_if = "Option::is_none")]
        logprobs_nats: Option<&'a [f32]>,
    },
    Error {
        error: String,
    },
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Finish {
    Stop,
    StopText,
    Length,
    Positions,
    /// Nobody sets a deadline, or goes away.
    Cancelled,
}

impl From<EndReason> for Finish {
    fn from(reason: EndReason) -> Self {
        match reason {
            EndReason::Stop => Self::Stop,
            EndReason::StopText { .. } => Self::StopText,
            EndReason::Length => Self::Length,
            EndReason::Positions => Self::Positions,
            EndReason::Deadline | EndReason::Cancelled => Self::Cancelled,
        }
    }
}

impl<'a> Record<'a> {
    pub(super) fn new(request: &'a Request, outcome: Outcome<'a>) -> Self {
        Self {
            line: request.line,
            id: &request.id,
            request: &request.digest,
            outcome,
        }
    }
}

/// The fields that a line of results has, whether it is an answer or an error.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Known {
    line: usize,
    pub(super) id: Id,
    request: String,
    error: Option<String>,
    text: Option<String>,
    ids: Option<Vec<u32>>,
    finish: Option<Finish>,
    stop: Option<String>,
    prompt_tokens: Option<usize>,
    cached_tokens: Option<usize>,
    /// Whether it is there, be it null.
    #[serde(default, deserialize_with = "seconds")]
    time_to_first_token_s: bool,
    // A number that JSON has none for is null.
    prompt_logprobs_nats: Option<Vec<Option<f64>>>,
    logprobs_nats: Option<Vec<Option<f64>>>,
}

fn seconds<'de, D: Deserializer<'de>>(from: D) -> Result<bool, D::Error> {
    match Option::<f64>::deserialize(from)? {
        Some(seconds) if seconds < 0.0 => Err(D::Error::custom(format!(
            "expected 0 seconds or more, got {seconds}"
        ))),
        _ => Ok(true),
    }
}

impl Known {
    /// What a line of results says.
    ///
    /// # Errors
    /// It is none.
    pub(super) fn parse(line: &[u8]) -> anyhow::Result<Self> {
        serde_json::from_slice(line).map_err(|error| {
            let object = serde_json::from_slice::<serde_json::Map<_, serde_json::Value>>(line);
            // What is wrong with a text of another kind is no matter.
            if object.is_ok_and(|object| object.contains_key("line")) {
                let text = error.to_string();
                // Its own count of lines would mislead.
                let text = text.split(" at line ").next().unwrap_or_default();
                let text = io::beginning(text);
                anyhow::anyhow!("expected a result of a batch: {text}: {REMEDY}")
            } else {
                anyhow::anyhow!(NO_RESULT)
            }
        })
    }

    /// Whether it says only why there is no result.
    pub(super) fn is_error(&self) -> bool {
        self.error.is_some()
    }

    /// # Errors
    /// It is not the result of this request, or not all of it, or not one of a model with so many token ids.
    pub(super) fn check(&self, request: &Request, vocabulary: usize) -> anyhow::Result<()> {
        let id = &self.id;
        ensure!(
            request.digest == self.request,
            "the result of id {id} is that of another request, model or precision: {REMEDY}"
        );
        // That of the file as it was then: requests may have been put before this one since.
        ensure!(
            self.line > 0,
            "the result of id {id} is that of line 0, and lines are counted from 1: {REMEDY}"
        );
        let asked = &request.engine;
        let is_error = self.is_error();
        let stopped = self.finish == Some(Finish::StopText);
        // Each with whether it is there and whether it belongs there.
        let fields = [
            ("text", self.text.is_some(), !is_error),
            ("ids", self.ids.is_some(), !is_error),
            ("finish", self.finish.is_some(), !is_error),
            ("stop", self.stop.is_some(), stopped),
            ("prompt_tokens", self.prompt_tokens.is_some(), !is_error),
            ("cached_tokens", self.cached_tokens.is_some(), !is_error),
            (
                "time_to_first_token_s",
                self.time_to_first_token_s,
                !is_error,
            ),
            (
                "prompt_logprobs_nats",
                self.prompt_logprobs_nats.is_some(),
                asked.logprobs.is_some() && !is_error,
            ),
            (
                "logprobs_nats",
                self.logprobs_nats.is_some(),
                asked.logprobs.is_some() && !is_error,
            ),
        ];
        for (name, there, expected) in fields {
            match (there, expected) {
                (false, true) => bail!("the result of id {id} has no {name}: {REMEDY}"),
                (true, false) => {
                    bail!("the result of id {id} has a {name} where none belongs: {REMEDY}")
                }
                _ => {}
            }
        }
        self.check_counts(asked)?;
        self.check_values(asked, vocabulary)
    }

    /// # Errors
    /// There is more or less of something than its request can have led to.
    fn check_counts(&self, asked: &EngineRequest) -> anyhow::Result<()> {
        let (prompt, most) = (asked.prompt.len(), asked.max_new_tokens);
        let ids = match self.finish {
            Some(Finish::Length) => most..=most,
            // The model said so in place of one more.
            Some(Finish::Stop) => 0..=most.saturating_sub(1),
            Some(Finish::StopText) => 1..=most,
            _ => 0..=most,
        };
        let new = self.ids.as_ref().map(Vec::len);
        let each = |count: usize| count..=count;
        let of_prompt = self.prompt_logprobs_nats.as_ref().map(Vec::len);
        let of_output = self.logprobs_nats.as_ref().map(Vec::len);
        // Each with how much there is of it and how much there can be.
        let counts = [
            ("ids", new, ids),
            ("logprobs_nats", of_output, each(new.unwrap_or(0))),
            ("prompt_tokens", self.prompt_tokens, each(prompt)),
            ("prompt_logprobs_nats", of_prompt, each(prompt)),
            // The last token of a prompt is always computed.
            ("cached_tokens", self.cached_tokens, 0..=prompt - 1),
        ];
        let id = &self.id;
        for (name, there, expected) in counts {
            let Some(count) = there.filter(|count| !expected.contains(count)) else {
                continue;
            };
            let (least, most) = expected.into_inner();
            let expected = if least == most {
                most.to_string()
            } else {
                format!("{least} to {most}")
            };
            bail!("the result of id {id}: {name}: expected {expected}, got {count}: {REMEDY}");
        }
        Ok(())
    }

    /// # Errors
    /// Something is not what any request can have led to.
    fn check_values(&self, asked: &EngineRequest, vocabulary: usize) -> anyhow::Result<()> {
        let id = &self.id;
        let mut ids = self.ids.iter().flatten();
        if let Some(unknown) = ids.find(|token| **token as usize >= vocabulary) {
            bail!(
                "the result of id {id}: ids: expected token ids below {vocabulary}, got {unknown}: {REMEDY}"
            );
        }
        for (name, values) in [
            ("logprobs_nats", &self.logprobs_nats),
            ("prompt_logprobs_nats", &self.prompt_logprobs_nats),
        ] {
            let mut values = values.iter().flatten().flatten();
            let known = |value: f64| value <= ROUNDING && value >= f32::MIN.into();
            if let Some(other) = values.find(|value| !known(**value)) {
                bail!(
                    "the result of id {id}: {name}: expected log-probabilities of at most 0 that f32 holds, got \
                     {other}: {REMEDY}"
                );
            }
        }
        let stop = self.stop.as_ref();
        ensure!(
            stop.is_none_or(|stop| asked.stop_texts.contains(stop)),
            "the result of id {id}: stop: expected one of the request's: {REMEDY}"
        );
        Ok(())
    }
}

/// No request has the id of a result.
pub(super) fn unknown(id: &Id) -> anyhow::Error {
    anyhow::anyhow!("the result of id {id}, which no request has: {REMEDY}")
}
