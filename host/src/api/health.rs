//! GET /health and /ready

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::json;

use super::error::ApiError;
use super::http::json_response;
use super::state::AppState;

/// The process lives.
pub async fn health() -> Response {
    json_response(StatusCode::OK, &json!({"status": "ok"}))
}

/// Requests will be served.
pub async fn ready(State(state): State<Arc<AppState>>) -> Result<Response, ApiError> {
    if state.is_ready() {
        let live = state.engine.live_requests();
        return Ok(json_response(StatusCode::OK, &json!({"status": "ready", "live_requests": live})));
    }
    Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "not_ready", "The server does not take requests now."))
}
