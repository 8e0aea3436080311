//! GET /v1/models and /v1/models/{id}

use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::response::Response;
use serde_json::{Value, json};

use super::error::ApiError;
use super::http::{json_response, percent_decoded};
use super::state::{AppState, unknown_model};
use crate::engine::RouteInfo;

pub async fn list(State(state): State<Arc<AppState>>) -> Response {
    let routes = state.engine.routes();
    let serving = routes.iter().filter(|route| route.disabled().is_none());
    let data: Vec<Value> = serving.map(|route| describe(&state, route)).collect();
    json_response(StatusCode::OK, &json!({"object": "list", "data": data}))
}

/// Path of the list; a name follows it after a slash.
pub const PATH: &str = "/v1/models";

/// The name is taken from the address itself: the router's own extractor answers in plain text where
/// the name is not UTF-8.
pub async fn one(State(state): State<Arc<AppState>>, uri: Uri) -> Result<Response, ApiError> {
    let id = uri.path().strip_prefix(PATH).and_then(|rest| rest.strip_prefix('/')).unwrap_or_default();
    let id = percent_decoded(id);
    let route = state.engine.route(&id).ok_or_else(|| unknown_model(&id))?;
    if let Some(disabled) = route.disabled() {
        return Err(ApiError::route_disabled(disabled));
    }
    Ok(json_response(StatusCode::OK, &describe(&state, &route)))
}

fn describe(state: &AppState, route: &RouteInfo) -> Value {
    let models = route.models.iter().enumerate().filter_map(|(index, (id, role))| {
        let model = state.engine.models().get(id.index())?;
        Some(json!({
            "name": model.name,
            "role": role,
            "entry": index == route.entry,
            "description": model.description,
            "max_model_len": model.context,
        }))
    });
    let models: Vec<Value> = models.collect();
    let longest = models.iter().filter_map(|model| model["max_model_len"].as_u64()).min();
    json!({
        "id": route.name,
        "object": "model",
        "created": state.started,
        "owned_by": "tokenrouter",
        "root": route.name,
        "max_model_len": longest,
        "policy": route.policy,
        "overrides": route.overrides.names(),
        "models": models,
    })
}
