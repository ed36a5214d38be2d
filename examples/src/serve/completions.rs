//! `/v1/completions`: texts that go on from prompts.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Value, json};

use super::app::{App, Order};
use super::error::{ApiError, Result};
use super::fields::{Fields, expected, text};
use super::form::{Form, Kind};
use super::params::{Params, check_choices};
use super::peer::Peer;
use super::reply::{Echo, Reply};
use super::{body, respond, work};
use crate::values;

/// The likeliest tokens that are told beside each, at most, as in OpenAI's interface.
pub(super) const MAX_LIKELIEST: usize = 5;

/// What a client asks for.
struct Completion {
    prompts: Vec<Prompt>,
    params: Params,
    /// Whether the answer begins with the prompt.
    echo: bool,
    /// Whether tokens are told with their log-probabilities, and with how many of the likeliest.
    logprobs: Option<usize>,
}

/// A prompt as it came.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

pub(super) async fn complete(
    State(app): State<Arc<App>>,
    Extension(peer): Extension<Peer>,
    request: Request,
) -> Result<Response> {
    let body = body::read(request, app.limits.body).await?;
    let pass = app.pass()?;
    let prepare = work(move || {
        let completion = Completion::parse(&body, &app)?;
        let encoded = completion.encode(&app)?;
        Ok((app, completion, encoded))
    });
    let (app, completion, encoded) = peer.waits_for(prepare).await?;
    let (prompts, echoes): (Vec<_>, Vec<_>) = encoded.into_iter().unzip();
    let tokens = prompts.iter().map(Vec::len).sum();
    let params = &completion.params;
    let answers = app.order(Order {
        prompts,
        param: "prompt",
        params,
        logprobs: completion.logprobs,
        prompt_logprobs: completion.logprobs.filter(|_| completion.echo),
        pass,
    })?;
    let (tokenizer, logprobs) = (app.tokenizer.clone(), completion.logprobs);
    let told = logprobs.is_some();
    let reply = Reply::new(answers, tokenizer, echoes, told, params.n, tokens);
    let form = Form::new(Kind::Completion, &app.name, logprobs, params.include_usage);
    respond::answer(reply, form, params.stream, peer).await
}

impl Completion {
    fn parse(body: &[u8], app: &App) -> Result<Self> {
        let mut fields = Fields::parse(body)?;
        app.check_model(&mut fields)?;
        let params = Params::take(&mut fields, &["max_tokens"], app.limits.texts)?;
        let Some(prompt) = fields.value("prompt") else {
            return Err(ApiError::field("prompt", "expected a text, got none"));
        };
        let prompts = prompts(&prompt)?;
        check_choices(prompts.len(), params.n, app.limits.texts)?;
        let echo = fields.take("echo", "true or false", Value::as_bool)?;
        let logprobs = fields.count("logprobs", 0, MAX_LIKELIEST)?;
        fields.neutral("best_of", &[json!(1)])?;
        fields.neutral("suffix", &[json!("")])?;
        fields.finish()?;
        Ok(Self {
            prompts,
            params,
            echo: echo.unwrap_or(false),
            logprobs,
        })
    }

    /// The ids of each prompt, and what the answer begins with.
    fn encode(&self, app: &App) -> Result<Vec<(Vec<u32>, Option<Echo>)>> {
        let encode = |(number, prompt): (usize, &Prompt)| {
            let param = match self.prompts.len() {
                1 => "prompt".to_owned(),
                _ => format!("prompt[{number}]"),
            };
            let (ids, own) = match prompt {
                Prompt::Ids(ids) => (ids.clone(), 0),
                Prompt::Text(text) => {
                    let ids = app.encode(&param, text)?;
                    (ids, usize::from(app.config.bos_token_id.is_some()))
                }
            };
            app.check_prompt(&param, &ids)?;
            let echo = self.echo.then(|| {
                let text = match prompt {
                    Prompt::Text(text) => Ok(text.clone()),
                    Prompt::Ids(ids) => app.tokenizer.decode(ids),
                };
                let text = text.map_err(|error| ApiError::of_prompt(&param, &error))?;
                let ids = ids[own..].to_vec();
                Ok(Echo { text, ids })
            });
            Ok((ids, echo.transpose()?))
        };
        self.prompts.iter().enumerate().map(encode).collect()
    }
}

/// The prompts of a request: a text, a list of texts, a list of ids, or a list of such lists.
fn prompts(value: &Value) -> Result<Vec<Prompt>> {
    let refuse = |value: &Value| {
        let what = "a text, a list of texts, a list of token ids, or a list of lists of token ids";
        ApiError::field("prompt", expected(what, value))
    };
    match value {
        Value::String(one) => Ok(vec![Prompt::Text(one.clone())]),
        Value::Array(list) => match list.first() {
            None => Err(ApiError::field(
                "prompt",
                "expected 1 prompt or more, got an empty list",
            )),
            Some(Value::Number(_)) => Ok(vec![ids("prompt", list)?]),
            Some(Value::String(_)) => {
                let texts = list.iter().map(|one| text(one).map(Prompt::Text));
                texts.collect::<Option<_>>().ok_or_else(|| refuse(value))
            }
            Some(_) => {
                let ids = |(number, one): (usize, &Value)| {
                    let list = one.as_array().ok_or_else(|| refuse(value))?;
                    ids(&format!("prompt[{number}]"), list)
                };
                list.iter().enumerate().map(ids).collect()
            }
        },
        other => Err(refuse(other)),
    }
}

/// A prompt of token ids, whose list is at `path`.
fn ids(path: &str, list: &[Value]) -> Result<Prompt> {
    let ids = values::ids(list).map_err(|(index, fault)| {
        let path = format!("{path}[{index}]");
        ApiError::field(path, fault)
    })?;
    Ok(Prompt::Ids(ids))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_texts_or_ids_or_lists_of_these() {
        let text = |text: &str| Prompt::Text(text.to_owned());
        let of = |value| prompts(&value).unwrap_or_else(|error| panic!("{}", error.message));
        assert_eq!(of(json!("a")), [text("a")]);
        assert_eq!(of(json!(["a", ""])), [text("a"), text("")]);
        assert_eq!(of(json!([5, 6])), [Prompt::Ids(vec![5, 6])]);
        assert_eq!(
            of(json!([[5], [6, 7]])),
            [Prompt::Ids(vec![5]), Prompt::Ids(vec![6, 7])]
        );
        let refusals = [
            json!(5),
            json!([]),
            json!(["a", 5]),
            json!([5, -1]),
            json!([5, 4_294_967_296u64]),
            json!([[5], "a"]),
            json!([[5], [6, -1]]),
            json!([null]),
        ]
        .map(|value| prompts(&value).unwrap_err().message);
        insta::assert_snapshot!(refusals.join("\n"), @r#"
        prompt: expected a text, a list of texts, a list of token ids, or a list of lists of token ids, got 5
        prompt: expected 1 prompt or more, got an empty list
        prompt: expected a text, a list of texts, a list of token ids, or a list of lists of token ids, got ["a",5]
        prompt[1]: expected a whole number, 0 or above, got -1
        prompt[1]: expected at most 4294967295, got 4294967296
        prompt: expected a text, a list of texts, a list of token ids, or a list of lists of token ids, got [[5],"a"]
        prompt[1][1]: expected a whole number, 0 or above, got -1
        prompt: expected a text, a list of texts, a list of token ids, or a list of lists of token ids, got [null]
        "#);
    }
}
