//! POST /abort_request and /abort_requests.

use std::sync::Arc;

use axum::extract::{Extension, Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde_json::{Value, json};

use super::admin::OwnAddress;
use super::admission::fields;
use super::error::ApiError;
use super::http::{json_response, read_body};
use super::reader::Fields;
use super::state::AppState;

pub(super) const MAX_NAMES: usize = 1024;

/// Whoever knows the name of a request may abort it. All of them are the operator's to abort.
pub async fn handle(
    State(state): State<Arc<AppState>>,
    own: Option<Extension<OwnAddress>>,
    headers: HeaderMap,
    request: Request,
) -> Result<Response, ApiError> {
    let body = read_body(request, state.max_body_bytes, state.front.limits.body_timeout).await?;
    let mut fields = fields(&state, body).await?;
    let all = fields.boolean("abort_all")?.unwrap_or(false);
    let names = names(&mut fields)?;
    fields.finish(&state.warned);
    if all {
        state.access.check(own.is_some(), &headers)?;
        return Ok(json_response(StatusCode::OK, &json!({"aborted": state.running.abort_all()})));
    }
    if names.is_empty() {
        let message = "One of `rid`, `request_ids` and `abort_all` is required.";
        return Err(ApiError::missing("rid", message));
    }
    // One that has just ended is no mistake.
    Ok(json_response(StatusCode::OK, &json!({"aborted": state.running.abort(&names)})))
}

/// SGLang's `rid`, one or some, and vLLM's `request_ids`.
fn names(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let mut names = Vec::new();
    for field in ["rid", "request_ids"] {
        let values = match fields.take(field) {
            None => continue,
            Some(Value::Array(values)) => values,
            Some(one) => vec![one],
        };
        if values.len() > MAX_NAMES {
            let message = format!("`{field}` has {} entries; at most {MAX_NAMES} are allowed.", values.len());
            return Err(ApiError::value(field, message));
        }
        for value in values {
            match value {
                Value::String(name) => names.push(name),
                other => return Err(ApiError::wrong_type(field, "a string or a list of strings", &other)),
            }
        }
    }
    Ok(names)
}
