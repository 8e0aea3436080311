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

/// Requests will be served, at every route.
pub async fn ready(State(state): State<Arc<AppState>>) -> Result<Response, ApiError> {
    let down: Vec<_> = state.engine.down_models().collect();
    if let Some(first) = down.first() {
        let mut body = ApiError::model_down(first).body();
        body["models"] = down.iter().map(|down| down.model.as_str()).collect();
        return Ok(json_response(StatusCode::SERVICE_UNAVAILABLE, &body));
    }
    if state.is_ready() {
        let live = state.engine.live_requests();
        return Ok(json_response(StatusCode::OK, &json!({"status": "ready", "live_requests": live})));
    }
    Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "not_ready", "The server does not take requests now."))
}
