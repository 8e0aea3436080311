//! HTTP apart from the endpoints: bodies in and out, unknown paths.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt;
use serde_json::Value;

use super::error::ApiError;

/// Longest wait for the next part of a body.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// Longest time that a refused body is still taken.
const DISCARD_TIME: Duration = Duration::from_secs(5);

pub fn json_response(status: StatusCode, body: &Value) -> Response {
    let mut response = Response::new(Body::from(body.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// The body of a request whose content type is JSON or not given, if it comes within this time.
pub async fn read_body(request: Request, max_bytes: usize, within: Duration) -> Result<Bytes, ApiError> {
    let (parts, mut body) = request.into_parts();
    let read = tokio::time::timeout(within, read_accepted(&parts.headers, &mut body, max_bytes)).await;
    // Who is late is not listened to any longer.
    let read = read.map_err(|_| late_body())?;
    // A client that waits for `100 Continue` sends nothing once it has the answer.
    if read.is_err() && !parts.headers.contains_key(header::EXPECT) {
        tokio::spawn(discard(body));
    }
    read
}

/// Whether `request` has a body. It is taken, as long as that is bearable, and not looked at.
fn discard_unread(request: Request) -> bool {
    let (parts, body) = request.into_parts();
    let has_body = !body.is_end_stream();
    if has_body && !parts.headers.contains_key(header::EXPECT) {
        tokio::spawn(discard(body));
    }
    has_body
}

fn late_body() -> ApiError {
    ApiError::new(StatusCode::REQUEST_TIMEOUT, "timeout", "The request's body did not arrive in time.")
}

/// Take what a client still sends of a body that was refused. Closing a connection with bytes unread
/// resets it, and a client that writes its whole request first would never see why.
async fn discard(mut body: Body) {
    let all = async { while let Some(Ok(_)) = body.frame().await {} };
    // One that sends for longer is cut off.
    let _ = tokio::time::timeout(DISCARD_TIME, all).await;
}

async fn read_accepted(headers: &HeaderMap, body: &mut Body, max_bytes: usize) -> Result<Bytes, ApiError> {
    check_content_type(headers)?;
    check_content_encoding(headers)?;
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    if announced.is_some_and(|bytes: u64| bytes > max_bytes as u64) {
        return Err(too_large(max_bytes));
    }
    let mut bytes = Vec::new();
    loop {
        let frame = tokio::time::timeout(BODY_TIMEOUT, body.frame()).await.map_err(|_| late_body())?;
        let Some(frame) = frame else { return Ok(bytes.into()) };
        let frame = frame.map_err(|e| {
            ApiError::new(StatusCode::BAD_REQUEST, "invalid_body", format!("The body could not be read: {e}."))
        })?;
        let Ok(data) = frame.into_data() else { continue };
        if bytes.len() + data.len() > max_bytes {
            return Err(too_large(max_bytes));
        }
        bytes.extend_from_slice(&data);
    }
}

fn too_large(max_bytes: usize) -> ApiError {
    let message = format!("The body is larger than {max_bytes} bytes (server.max_body_bytes). Send a shorter request.");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "payload_too_large", message)
}

fn check_content_encoding(headers: &HeaderMap) -> Result<(), ApiError> {
    for value in headers.get_all(header::CONTENT_ENCODING) {
        let encoding = String::from_utf8_lossy(value.as_bytes());
        if !encoding.trim().eq_ignore_ascii_case("identity") {
            let message = format!("The content encoding `{encoding}` is not supported; send the body as it is.");
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message));
        }
    }
    Ok(())
}

fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    let essence = value.to_str().unwrap_or_default().split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json")) {
        return Ok(());
    }
    let message = format!("The content type `{essence}` is not supported; send application/json.");
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message))
}

pub async fn no_such_path(request: Request) -> Response {
    let (method, path) = (request.method(), request.uri().path());
    let message = format!("Unknown URL: {method} {path}. The endpoints are listed in docs/http-api.md.");
    refuse_unread(request, ApiError::new(StatusCode::NOT_FOUND, "not_found", message))
}

pub async fn method_not_allowed(request: Request) -> Response {
    let (method, path) = (request.method(), request.uri().path());
    let message = format!("{method} is not allowed for {path}; see the Allow header.");
    refuse_unread(request, ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message))
}

/// Refuse `request` for its head alone. What is left of it is not read as another request.
pub fn refuse_unread(request: Request, error: ApiError) -> Response {
    let mut response = error.into_response();
    if discard_unread(request) {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// Text with `%20` and the like decoded. What is not UTF-8 after that has U+FFFD in its place.
pub fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let escape = after.get(..2).filter(|_| first == b'%').and_then(|hex| std::str::from_utf8(hex).ok());
        let decoded = escape.filter(|hex| !hex.starts_with('+')).and_then(|hex| u8::from_str_radix(hex, 16).ok());
        bytes.push(decoded.unwrap_or(first));
        rest = if decoded.is_some() { &after[2..] } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// 64 bits that differ between calls and processes: the standard library's hasher keys are random.
pub fn random_u64() -> u64 {
    RandomState::new().hash_one(std::time::Instant::now())
}

/// A new id of 128 random bits.
pub fn random_id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:016x}", random_u64(), random_u64())
}
