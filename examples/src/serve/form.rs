//! The two forms of an answer, whole or in chunks, as OpenAI's clients read them.

use serde_json::{Map, Value, json};

use super::app::{now, random};
use super::reply::{Candidate, Piece, Token, Usage};

/// Which form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Completion,
    Chat,
}

/// What every part of one answer says.
#[derive(Debug, Clone)]
pub(super) struct Form {
    kind: Kind,
    id: String,
    created: u64,
    model: String,
    /// Whether tokens are told with their log-probabilities, and with how many of the likeliest.
    logprobs: Option<usize>,
    /// Whether chunks have a field for what the request took, which all but the last leave null.
    usage: bool,
}

impl Form {
    pub(super) fn new(kind: Kind, model: &str, logprobs: Option<usize>, usage: bool) -> Self {
        let prefix = match kind {
            Kind::Completion => "cmpl",
            Kind::Chat => "chatcmpl",
        };
        Self {
            kind,
            id: format!("{prefix}-{:016x}", random()),
            created: now(),
            model: model.to_owned(),
            logprobs,
            usage,
        }
    }

    /// The whole answer, of texts that have come to their ends.
    pub(super) fn whole(&self, texts: &[Piece], usage: Usage) -> Value {
        let choices = texts.iter().map(|text| {
            let mut choice = self.choice(text);
            match self.kind {
                Kind::Completion => choice["text"] = json!(text.text),
                Kind::Chat => {
                    let message =
                        json!({"role": "assistant", "content": text.text, "refusal": null});
                    choice["message"] = message;
                }
            }
            choice
        });
        let mut answer = self.part(&choices.collect::<Vec<_>>(), false);
        answer["usage"] = of_usage(usage);
        answer
    }

    /// What a stream of this text begins with, before anything is known of it: in a chat, who speaks.
    pub(super) fn opening(&self, index: usize) -> Option<Value> {
        (self.kind == Kind::Chat).then(|| {
            let mut choice = self.choice(&Piece {
                index,
                ..Piece::default()
            });
            choice["delta"] = json!({"role": "assistant", "content": ""});
            choice["logprobs"] = Value::Null;
            self.part(&[choice], true)
        })
    }

    /// A chunk of a stream.
    pub(super) fn chunk(&self, piece: &Piece) -> Value {
        let mut choice = self.choice(piece);
        if piece.tokens.is_empty() {
            choice["logprobs"] = Value::Null;
        }
        match self.kind {
            Kind::Completion => choice["text"] = json!(piece.text),
            Kind::Chat if piece.finish.is_some() && piece.text.is_empty() => {
                choice["delta"] = json!({});
            }
            Kind::Chat => choice["delta"] = json!({"content": piece.text}),
        }
        self.part(&[choice], true)
    }

    /// The chunk that says what a request took.
    pub(super) fn closing(&self, usage: Usage) -> Option<Value> {
        self.usage.then(|| {
            let mut part = self.part(&[], true);
            part["usage"] = of_usage(usage);
            part
        })
    }

    fn part(&self, choices: &[Value], is_chunk: bool) -> Value {
        let object = match (self.kind, is_chunk) {
            (Kind::Completion, _) => "text_completion",
            (Kind::Chat, false) => "chat.completion",
            (Kind::Chat, true) => "chat.completion.chunk",
        };
        let mut part = json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        });
        if self.usage {
            part["usage"] = Value::Null;
        }
        part
    }

    /// What a choice has in either form.
    fn choice(&self, piece: &Piece) -> Value {
        let logprobs = self.logprobs.map(|likeliest| match self.kind {
            Kind::Completion => of_completion(&piece.tokens, likeliest > 0),
            Kind::Chat => of_chat(&piece.tokens),
        });
        json!({"index": piece.index, "finish_reason": piece.finish, "logprobs": logprobs})
    }
}

fn of_completion(tokens: &[Token], likeliest: bool) -> Value {
    let chosen = tokens.iter().map(|token| &token.chosen);
    let texts: Vec<&str> = chosen.clone().map(|token| token.text.as_str()).collect();
    let logprobs: Vec<Option<f32>> = chosen.map(|token| token.logprob).collect();
    let offsets: Vec<usize> = tokens.iter().map(|token| token.offset).collect();
    let likeliest: Option<Vec<Value>> = likeliest.then(|| tokens.iter().map(by_text).collect());
    json!({
        "tokens": texts,
        "token_logprobs": logprobs,
        "text_offset": offsets,
        "top_logprobs": likeliest,
    })
}

/// The likeliest tokens of a place and the one that stands there, by their texts. Of several that are
/// spelled alike that one counts, else the likeliest.
fn by_text(token: &Token) -> Value {
    if token.chosen.logprob.is_none() {
        return Value::Null;
    }
    let mut by_text = Map::new();
    for candidate in std::iter::once(&token.chosen).chain(&token.likeliest) {
        let known = by_text.entry(&candidate.text);
        known.or_insert_with(|| json!(candidate.logprob));
    }
    Value::Object(by_text)
}

fn of_chat(tokens: &[Token]) -> Value {
    let content = tokens.iter().map(|token| {
        let mut told = of_candidate(&token.chosen);
        let likeliest = token.likeliest.iter().map(of_candidate);
        told["top_logprobs"] = likeliest.collect();
        told
    });
    json!({"content": content.collect::<Vec<_>>(), "refusal": null})
}

fn of_candidate(candidate: &Candidate) -> Value {
    json!({
        "token": candidate.text,
        "logprob": candidate.logprob,
        "bytes": candidate.bytes,
    })
}

fn of_usage(usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Else a token's own number would be another's, or the likeliest one's a lesser.
    #[test]
    fn of_tokens_that_are_spelled_alike_the_chosen_and_the_likeliest_count() {
        let candidate = |text: &str, logprob| Candidate {
            text: text.to_owned(),
            bytes: None,
            logprob: Some(logprob),
        };
        let token = Token {
            chosen: candidate("a", -3.0),
            likeliest: vec![
                candidate("a", -0.5),
                candidate("b", -1.0),
                candidate("b", -2.0),
            ],
            offset: 0,
        };
        assert_eq!(by_text(&token), json!({"a": -3.0, "b": -1.0}));
    }
}
