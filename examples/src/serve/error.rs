//! What a client is told that does not get what it asked for: a status, and an object of OpenAI's form.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use deepseek_model::engine::EngineError;
use deepseek_model::{Error, tokenizer::TokenizerError};
use serde_json::{Value, json};

use crate::{backtraces, io};

/// Seconds after which a client that was turned away may ask again.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");

/// The status of requests whose client went away, as nginx has it.
const CLIENT_GONE: u16 = 499;

/// A refusal or a failure.
#[derive(Debug, Clone)]
pub(super) struct ApiError {
    pub(super) status: StatusCode,
    /// What was expected, what came and where.
    pub(super) message: String,
    /// The field of the request that is to blame.
    pub(super) param: Option<String>,
    /// A name for programs.
    pub(super) code: Option<&'static str>,
}

pub(super) type Result<T> = std::result::Result<T, ApiError>;

impl ApiError {
    pub(super) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            param: None,
            code: Some(code),
        }
    }

    /// A request that cannot be understood or followed, because of a field.
    pub(super) fn field(param: impl Into<String>, message: impl AsRef<str>) -> Self {
        let param = param.into();
        Self {
            status: StatusCode::BAD_REQUEST,
            message: format!("{param}: {}", message.as_ref()),
            param: Some(param),
            code: None,
        }
    }

    /// A text that is longer than there is room for.
    pub(super) fn too_long(param: &str, message: impl std::fmt::Display) -> Self {
        Self {
            code: Some("context_length_exceeded"),
            ..Self::field(param, message.to_string())
        }
    }

    pub(super) fn too_many_connections(most: usize) -> Self {
        let (status, code) = (StatusCode::SERVICE_UNAVAILABLE, "too_many_connections");
        let message = format!(
            "expected at most {most} connections at a time: close some, or come again later"
        );
        Self::new(status, code, message)
    }

    /// Nobody reads the answer, and nobody this: it is for what is counted.
    pub(super) fn client_gone() -> Self {
        let status = StatusCode::from_u16(CLIENT_GONE).expect("it is in the range of statuses");
        Self::new(status, "client_gone", "the client is gone")
    }

    pub(super) fn shutting_down() -> Self {
        let (status, code) = (StatusCode::SERVICE_UNAVAILABLE, "shutting_down");
        Self::new(status, code, "the server is shutting down")
    }

    /// The engine runs no step any more.
    pub(super) fn stopped() -> Self {
        let (status, code) = (StatusCode::SERVICE_UNAVAILABLE, "engine_stopped");
        Self::new(status, code, Error::EngineStopped.to_string())
    }

    /// A failure of the server's own, of which `text` tells.
    pub(super) fn failed(text: &str) -> Self {
        let text = io::escaped(&backtraces::cut(text), |_| false);
        let (status, code) = (StatusCode::INTERNAL_SERVER_ERROR, "step_failed");
        Self::new(status, code, text)
    }

    /// A failure in the middle of a request.
    pub(super) fn of_step(error: &Error) -> Self {
        match error {
            Error::EngineStopped => Self::stopped(),
            other => Self::failed(&other.to_string()),
        }
    }

    /// A prompt in `param` that is no token sequence of the model's.
    pub(super) fn of_prompt(param: &str, error: &TokenizerError) -> Self {
        let text = error.to_string();
        match error {
            TokenizerError::TooLong { .. } => Self::too_long(param, text),
            _ => Self::field(param, io::escaped(&text, |_| false)),
        }
    }

    /// What the engine says to a request whose prompt came in `param`.
    pub(super) fn of_engine(param: &str, error: EngineError) -> Self {
        match error {
            EngineError::Full {
                held,
                asked,
                running,
                waiting,
            } => Self::new(
                StatusCode::TOO_MANY_REQUESTS,
                "queue_full",
                format!(
                    "expected at most {} texts that run or wait, got {asked} more than the {held} that do: \
                     ask again later",
                    running.saturating_add(waiting)
                ),
            ),
            EngineError::TooLong { tokens, fits } => {
                let message = format!("the text may have {tokens} tokens: expected at most {fits}");
                Self::too_long(param, message)
            }
            EngineError::Refused(Error::EngineStopped) => Self::stopped(),
            EngineError::Refused(Error::Tokenizer(error)) => Self::of_prompt(param, &error),
            other => Self::field(param, io::escaped(&other.to_string(), |_| false)),
        }
    }

    /// Of which kind it is, in OpenAI's words.
    fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// The object that a client gets.
    pub(super) fn body(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind(),
            "param": self.param,
            "code": self.code,
        }})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = json_response(self.status, &self.body());
        let busy = [
            StatusCode::TOO_MANY_REQUESTS,
            StatusCode::SERVICE_UNAVAILABLE,
        ];
        let headers = response.headers_mut();
        if busy.contains(&self.status) {
            headers.insert(header::RETRY_AFTER, RETRY_AFTER);
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer");
            headers.insert(header::WWW_AUTHENTICATE, scheme);
        }
        response
    }
}

/// A response that is one JSON value.
pub(super) fn json_response(status: StatusCode, body: &Value) -> Response {
    let kind = [(header::CONTENT_TYPE, "application/json")];
    (status, kind, body.to_string()).into_response()
}
