//! `/v1/chat/completions`: what an assistant says next in a conversation.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Value, json};

use super::app::{App, Order};
use super::error::{ApiError, Result};
use super::fields::{Fields, expected, text};
use super::form::{Form, Kind};
use super::jinja::Message;
use super::params::Params;
use super::peer::Peer;
use super::reply::Reply;
use super::{body, respond, work};

/// The likeliest tokens that are told beside each, at most, as in OpenAI's interface.
pub(super) const MAX_LIKELIEST: usize = 20;

/// What a client asks for.
struct Chat {
    messages: Vec<Message>,
    params: Params,
    /// Whether tokens are told with their log-probabilities, and with how many of the likeliest.
    logprobs: Option<usize>,
}

pub(super) async fn complete(
    State(app): State<Arc<App>>,
    Extension(peer): Extension<Peer>,
    request: Request,
) -> Result<Response> {
    let body = body::read(request, app.limits.body).await?;
    let pass = app.pass()?;
    let (app, chat, prompt) = peer.waits_for(prepare(app, body)).await?;
    let tokens = prompt.len();
    let (params, logprobs) = (&chat.params, chat.logprobs);
    let answers = app.order(Order {
        prompts: vec![prompt],
        param: "messages",
        params,
        logprobs,
        prompt_logprobs: None,
        pass,
    })?;
    let tokenizer = app.tokenizer.clone();
    let told = logprobs.is_some();
    let reply = Reply::new(answers, tokenizer, vec![None], told, params.n, tokens);
    let form = Form::new(Kind::Chat, &app.name, logprobs, params.include_usage);
    respond::answer(reply, form, params.stream, peer).await
}

/// What a request asks for, and the ids of its conversation.
async fn prepare(app: Arc<App>, body: Vec<u8>) -> Result<(Arc<App>, Chat, Vec<u32>)> {
    let (app, chat) = work(move || {
        let chat = Chat::parse(&body, &app)?;
        Ok((app, chat))
    })
    .await?;
    let renders = app.renders.as_ref();
    let renders = renders.map_err(|reason| ApiError::field("messages", reason))?;
    let text = renders.render(app.limits.time, &chat.messages).await?;
    work(move || {
        let prompt = encode(&app, &text)?;
        Ok((app, chat, prompt))
    })
    .await
}

impl Chat {
    fn parse(body: &[u8], app: &App) -> Result<Self> {
        let mut fields = Fields::parse(body)?;
        app.check_model(&mut fields)?;
        let names = ["max_tokens", "max_completion_tokens"];
        let params = Params::take(&mut fields, &names, app.limits.texts)?;
        let logprobs = logprobs(&mut fields)?;
        for (name, neutral) in neutral() {
            fields.neutral(name, &neutral)?;
        }
        let what = "a list of messages";
        let list = fields.take("messages", what, |value| value.as_array().cloned())?;
        let messages = messages(list.unwrap_or_default())?;
        let (count, most) = (messages.len(), app.engine.max_tokens());
        if count > most {
            let message = format!(
                "expected at most {most} messages, as many as the tokens that there is room for, got {count}"
            );
            return Err(ApiError::too_long("messages", message));
        }
        fields.finish()?;
        Ok(Self {
            messages,
            params,
            logprobs,
        })
    }
}

/// The ids of a conversation, as the model's template has written it.
fn encode(app: &App, text: &str) -> Result<Vec<u32>> {
    let mut ids = app.encode("messages", text)?;
    // A template that begins with the token itself does not mean it twice.
    if let Some(bos) = app.config.bos_token_id
        && ids.starts_with(&[bos, bos])
    {
        ids.remove(0);
    }
    app.check_prompt("messages", &ids)?;
    Ok(ids)
}

/// Takes whether tokens are told with their log-probabilities, and with how many of the likeliest.
///
/// # Errors
/// Names the field.
fn logprobs(fields: &mut Fields) -> Result<Option<usize>> {
    let told = fields.take("logprobs", "true or false", Value::as_bool)?;
    let likeliest = fields.count("top_logprobs", 0, MAX_LIKELIEST)?.unwrap_or(0);
    if likeliest > 0 && told != Some(true) {
        let message = format!("expected logprobs to be true beside it, or 0, got {likeliest}");
        return Err(fields.refuse("top_logprobs", &message));
    }
    Ok(told.unwrap_or(false).then_some(likeliest))
}

/// Fields that ask for what is not there, with the values that ask for nothing.
fn neutral() -> [(&'static str, Vec<Value>); 11] {
    [
        ("tools", vec![json!([])]),
        ("tool_choice", vec![json!("none"), json!("auto")]),
        ("functions", vec![json!([])]),
        ("function_call", vec![json!("none"), json!("auto")]),
        ("response_format", vec![json!({"type": "text"})]),
        ("modalities", vec![json!(["text"])]),
        ("audio", vec![]),
        ("prediction", vec![]),
        ("reasoning_effort", vec![json!("none")]),
        ("verbosity", vec![json!("medium")]),
        ("web_search_options", vec![]),
    ]
}

fn messages(list: Vec<Value>) -> Result<Vec<Message>> {
    if list.is_empty() {
        let message = "expected 1 message or more, got none";
        return Err(ApiError::field("messages", message));
    }
    let of = |(number, value)| message(format!("messages[{number}]"), value);
    list.into_iter().enumerate().map(of).collect()
}

fn message(path: String, value: Value) -> Result<Message> {
    let mut fields = Fields::of(path, value)?;
    let roles = "system, developer, user or assistant";
    let role = fields.take("role", roles, |value| {
        Some(
            match value.as_str()? {
                // The name that newer models have for the same.
                "developer" => "system",
                role @ ("system" | "user" | "assistant") => role,
                _ => return None,
            }
            .to_owned(),
        )
    })?;
    let Some(role) = role else {
        return Err(fields.refuse("role", &format!("expected {roles}, got none")));
    };
    let content = match fields.value("content") {
        Some(content) => self::content(&fields.path("content"), content)?,
        None => return Err(fields.refuse("content", "expected a text, got none")),
    };
    let name = fields.take("name", "a text", text)?;
    fields.neutral("tool_calls", &[json!([])])?;
    fields.neutral("function_call", &[])?;
    fields.neutral("audio", &[])?;
    fields.neutral("refusal", &[])?;
    // Of answers that a client sends back.
    fields.ignore(&["annotations"]);
    fields.finish()?;
    Ok(Message {
        role,
        content,
        name,
    })
}

/// A text, or a list of parts that are texts, which stand in lines of their own.
fn content(path: &str, value: Value) -> Result<String> {
    let parts = match value {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        other => {
            let what = "a text, or a list of parts";
            return Err(ApiError::field(path, expected(what, &other)));
        }
    };
    let mut texts = Vec::with_capacity(parts.len());
    for (number, part) in parts.into_iter().enumerate() {
        let mut fields = Fields::of(format!("{path}[{number}]"), part)?;
        let what = "text, the one kind of parts that is supported";
        let kind = fields.take("type", what, |kind| (kind == "text").then_some(()))?;
        if kind.is_none() {
            return Err(fields.refuse("type", &format!("expected {what}, got none")));
        }
        let Some(part) = fields.take("text", "a text", text)? else {
            return Err(fields.refuse("text", "expected a text, got none"));
        };
        fields.finish()?;
        texts.push(part);
    }
    Ok(texts.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(list: &Value) -> Result<Vec<Message>> {
        messages(list.as_array().unwrap().clone())
    }

    #[test]
    fn messages_are_texts_of_known_roles() {
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        let list = json!([
            {"role": "developer", "content": "x"},
            {"role": "user", "content": parts, "name": "ann"},
            {"role": "assistant", "content": "y", "refusal": null, "tool_calls": null, "annotations": []},
        ]);
        let read = read(&list).unwrap_or_else(|error| panic!("{}", error.message));
        let roles: Vec<_> = read.iter().map(|message| message.role.as_str()).collect();
        assert_eq!(roles, ["system", "user", "assistant"]);
        assert_eq!(
            (read[1].content.as_str(), read[1].name.as_deref()),
            ("a\nb", Some("ann"))
        );
    }

    #[test]
    fn messages_that_are_none_are_refused_by_their_place() {
        let image = json!({"type": "image_url", "image_url": {"url": "x"}});
        let user = json!({"role": "user", "content": "a"});
        let refusals = [
            json!([]),
            json!(["a"]),
            json!([user, {"content": "a"}]),
            json!([{"role": "tool", "content": "a"}]),
            json!([{"role": 1, "content": "a"}]),
            json!([{"role": "user"}]),
            json!([{"role": "user", "content": 1}]),
            json!([{"role": "user", "content": [image]}]),
            json!([{"role": "user", "content": [{"type": "text"}]}]),
            json!([{"role": "assistant", "content": "a", "tool_calls": [1]}]),
            json!([{"role": "user", "content": "a", "contents": "b"}]),
        ]
        .map(|list| read(&list).unwrap_err().message);
        insta::assert_snapshot!(refusals.join("\n"), @r#"
        messages: expected 1 message or more, got none
        messages[0]: expected an object, got "a"
        messages[1].role: expected system, developer, user or assistant, got none
        messages[0].role: expected system, developer, user or assistant, got "tool"
        messages[0].role: expected system, developer, user or assistant, got 1
        messages[0].content: expected a text, got none
        messages[0].content: expected a text, or a list of parts, got 1
        messages[0].content[0].type: expected text, the one kind of parts that is supported, got "image_url"
        messages[0].content[0].text: expected a text, got none
        messages[0].tool_calls: not supported: expected [], or no such field, got [1]
        messages[0].contents: no field of this name is known
        "#);
    }
}
