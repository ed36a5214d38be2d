//! The body of a request: of JSON, whole, in time, and not too long.

use std::time::Duration;

use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use deepseek_model::memory::Bytes;
use futures_util::StreamExt;
use hyper::body::Body as _;

use super::error::{ApiError, Result};

/// A client that does not send all of a body within this time is gone.
pub(super) const WHOLE: Duration = Duration::from_secs(60);

/// Reads the body of a request.
///
/// # Errors
/// It is no JSON by its type, coded, longer than `max` bytes, or does not come.
pub(super) async fn read(request: Request, max: usize) -> Result<Vec<u8>> {
    check_type(request.headers())?;
    check_coding(request.headers())?;
    // Where its length is said, before the client is told to send it, or has sent it.
    if request.body().size_hint().lower() > max as u64 {
        return Err(too_large(max));
    }
    let body = tokio::time::timeout(WHOLE, collect(request, max)).await;
    body.map_err(|_| {
        let message = format!("the body did not come within {} seconds", WHOLE.as_secs());
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "body_timeout", message)
    })?
}

/// A page of another site can make a browser send a body of some types without asking; JSON is none of
/// them.
fn check_type(headers: &HeaderMap) -> Result<()> {
    let given = headers.get(header::CONTENT_TYPE);
    let given = given.map(|value| String::from_utf8_lossy(value.as_bytes()));
    let essence = given.as_deref().and_then(|text| text.split(';').next());
    if essence.is_some_and(|text| text.trim().eq_ignore_ascii_case("application/json")) {
        return Ok(());
    }
    let got = given.map_or_else(|| "none".to_owned(), |text| format!("{text:?}"));
    Err(ApiError::new(
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
        "unsupported_media_type",
        format!("content-type: expected application/json, got {got}"),
    ))
}

/// What is compressed would be taken for broken JSON.
fn check_coding(headers: &HeaderMap) -> Result<()> {
    for value in headers.get_all(header::CONTENT_ENCODING) {
        let text = String::from_utf8_lossy(value.as_bytes());
        let mut codings = text.split(',').map(str::trim);
        if !codings.all(|coding| coding.is_empty() || coding.eq_ignore_ascii_case("identity")) {
            return Err(ApiError::new(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "unsupported_media_type",
                format!("content-encoding: expected identity, or no such header, got {text:?}"),
            ));
        }
    }
    Ok(())
}

async fn collect(request: Request, max: usize) -> Result<Vec<u8>> {
    let mut frames = request.into_body().into_data_stream();
    let mut body = Vec::new();
    while let Some(frame) = frames.next().await {
        let frame = frame.map_err(|error| {
            let error = anyhow::Error::from(error);
            let message = format!("the body broke off: {}", error.root_cause());
            ApiError::new(StatusCode::BAD_REQUEST, "incomplete_body", message)
        })?;
        if body.len() + frame.len() > max {
            return Err(too_large(max));
        }
        body.extend_from_slice(&frame);
    }
    Ok(body)
}

fn too_large(max: usize) -> ApiError {
    ApiError::new(
        StatusCode::PAYLOAD_TOO_LARGE,
        "body_too_large",
        format!(
            "the body is too long: expected at most {}",
            Bytes(max as u64)
        ),
    )
}
