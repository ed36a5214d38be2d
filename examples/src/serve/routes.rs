//! Paths: who serves which, who may ask, and what is counted.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Path, Request, State};
use axum::http::{Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};
use subtle::ConstantTimeEq;

use super::app::App;
use super::error::{ApiError, Result, json_response};
use super::linger::lingering;
use super::{chat, completions, metrics};
use crate::values::quoted;

/// Of a body that is not read, this many times what is allowed is forgotten.
const FORGOTTEN: usize = 16;

/// Paths that are counted by their names.
const PATHS: [&str; 5] = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/health",
    "/metrics",
];

/// Of the connections that there may be.
pub(super) fn router(app: Arc<App>) -> Router {
    let routes = for_watchers()
        .route("/v1/completions", post(completions::complete))
        .route("/v1/chat/completions", post(chat::complete))
        .route("/v1/models", get(models))
        .route("/v1/models/{name}", get(model))
        .fallback(unknown);
    guarded(routes, app)
}

/// Of connections beyond the `most` that there may be: those who watch the server must see it also when
/// others hold all of these.
pub(super) fn spare_router(app: Arc<App>, most: usize) -> Router {
    let too_many = move || async move { ApiError::too_many_connections(most) };
    guarded(for_watchers().fallback(too_many), app)
}

fn for_watchers() -> Router<Arc<App>> {
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(scrape))
}

fn guarded(routes: Router<Arc<App>>, app: Arc<App>) -> Router {
    routes
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(app.clone(), guard))
        .with_state(app)
}

/// Lets in who has the key, and counts what comes of it. Health and metrics are for those who watch the
/// server, who need none.
async fn guard(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let request = lingering(request, app.limits.body.saturating_mul(FORGOTTEN));
    let path = request.uri().path();
    let counted = PATHS.iter().find(|known| **known == path);
    let counted = counted.copied().unwrap_or("other");
    let admitted = if path.starts_with("/v1/") {
        check_key(&app, &request)
    } else {
        Ok(())
    };
    let mut response = match admitted {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    };
    app.metrics.responded(counted, response.status().as_u16());
    if !app.gate.is_open() {
        let close = header::HeaderValue::from_static("close");
        response.headers_mut().insert(header::CONNECTION, close);
    }
    response
}

fn check_key(app: &App, request: &Request) -> Result<()> {
    let Some(key) = &app.api_key else {
        return Ok(());
    };
    let given = request.headers().get(header::AUTHORIZATION);
    let given = given.and_then(|value| value.as_bytes().split_at_checked("Bearer ".len()));
    let given = given.filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"Bearer "));
    let message = match given {
        // How long it takes must not tell how much of the key was right.
        Some((_, given)) if given.ct_eq(key.as_bytes()).into() => return Ok(()),
        Some(_) => "the key is wrong",
        None => "expected a key, in a header `authorization: Bearer KEY`",
    };
    Err(ApiError::new(
        StatusCode::UNAUTHORIZED,
        "invalid_api_key",
        message,
    ))
}

async fn models(State(app): State<Arc<App>>) -> Response {
    let list = json!({"object": "list", "data": [of_model(&app)]});
    json_response(StatusCode::OK, &list)
}

async fn model(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Response> {
    if name == app.name {
        Ok(json_response(StatusCode::OK, &of_model(&app)))
    } else {
        Err(app.no_model(&name))
    }
}

fn of_model(app: &App) -> Value {
    json!({
        "id": app.name,
        "object": "model",
        "created": app.created,
        "owned_by": "local",
        "max_model_len": app.engine.max_tokens(),
    })
}

async fn health(State(app): State<Arc<App>>) -> Result<Response> {
    if !app.gate.is_open() {
        return Err(ApiError::shutting_down());
    }
    if !app.engine.is_running() {
        return Err(ApiError::stopped());
    }
    Ok(json_response(StatusCode::OK, &json!({"status": "ok"})))
}

async fn scrape(State(app): State<Arc<App>>) -> Result<Response> {
    let text = app.metrics.render(&app.engine.stats());
    let text = text.map_err(|error| ApiError::failed(&error.to_string()))?;
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response())
}

async fn unknown(request: Request) -> ApiError {
    let message = format!("nothing is at {}", quoted(&request.uri().path().into()));
    ApiError::new(StatusCode::NOT_FOUND, "unknown_url", message)
}

async fn wrong_method(method: Method) -> ApiError {
    let message = format!("the path does not take {method}");
    ApiError::new(
        StatusCode::METHOD_NOT_ALLOWED,
        "method_not_allowed",
        message,
    )
}
