//! What the server is: GET /version, /server_info, /model_info, /load, and POST /flush_cache.

use std::sync::Arc;

use axum::extract::{Extension, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde_json::{Value, json};

use super::admin::OwnAddress;
use super::error::ApiError;
use super::http::json_response;
use super::state::{AppState, unix_time};
use crate::engine::ServedRoute;
use crate::request::ModelId;

pub async fn version() -> Response {
    json_response(StatusCode::OK, &json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// Requests under way, as vLLM tells it.
pub async fn load(State(state): State<Arc<AppState>>) -> Response {
    json_response(StatusCode::OK, &json!({"server_load": state.engine.live_requests()}))
}

/// The first route, as SGLang tells of its one model.
pub async fn model(State(state): State<Arc<AppState>>) -> Result<Response, ApiError> {
    let routes = state.engine.routes();
    let first = routes.iter().next().ok_or_else(|| ApiError::internal("the server has no routes"))?;
    let entry = first.models.get(first.entry).and_then(|(id, _)| state.engine.models().get(id.index()));
    let name = entry.map(|model| model.name.as_str());
    let body = json!({
        "model_path": first.name,
        "served_model_name": first.name,
        "tokenizer_path": name,
        "is_generation": true,
        "max_model_len": first.context,
        "vocab_size": first.vocab_size,
    });
    Ok(json_response(StatusCode::OK, &body))
}

pub async fn server(State(state): State<Arc<AppState>>) -> Response {
    let thresholds = state.engine.thresholds();
    let models = state.engine.models().iter().enumerate().map(|(index, model)| {
        let now = state.engine.snapshot(ModelId(index as u32));
        json!({
            "name": model.name,
            "description": model.description,
            "max_model_len": model.context,
            "vocab_size": model.vocab_size,
            "eos": model.eos,
            "weight_bytes": model.weight_bytes,
            "kv_pages": model.pages,
            "kv_page_bytes": model.page_bytes,
            "kv_pages_in_use": now.pages_in_use,
            "kv_pages_cached": now.pages_cached,
            "min_batch": thresholds.get(index),
        })
    });
    let models: Vec<Value> = models.collect();
    let routes = state.engine.routes();
    let routes: Vec<Value> = routes.iter().map(|route| describe(&state, route)).collect();
    let body = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "uptime_seconds": unix_time().saturating_sub(state.started),
        "config_sha256": state.config_sha256.load().as_str(),
        "batching": if state.engine.tuning().is_some() { "online" } else { "fixed" },
        "max_requests": state.max_requests,
        "max_body_bytes": state.max_body_bytes,
        "live_requests": state.engine.live_requests(),
        "models": models,
        "routes": routes,
    });
    json_response(StatusCode::OK, &body)
}

fn describe(state: &AppState, route: &ServedRoute) -> Value {
    let models = route.models.iter().enumerate().filter_map(|(index, (model, role))| {
        let name = &state.engine.models().get(model.index())?.name;
        Some(json!({"name": name, "role": role, "entry": index == route.entry}))
    });
    json!({
        "name": route.name,
        "max_model_len": route.context,
        "vocab_size": route.vocab_size,
        "plugin": route.policy,
        "version": route.version,
        "sha256": route.sha256,
        "disabled": route.disabled().is_some(),
        "overrides": route.overrides.names(),
        "variants": route.variants(),
        "max_variants": route.overrides.max_variants,
        "models": models.collect::<Vec<_>>(),
    })
}

/// Find no page of the prefix caches any more. Requests that use some keep them.
pub async fn flush(
    State(state): State<Arc<AppState>>,
    own: Option<Extension<OwnAddress>>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    state.access.check(own.is_some(), &headers)?;
    state.engine.flush_prefix_caches();
    Ok(json_response(StatusCode::OK, &json!({"flushed": true})))
}
