//! GET /health, /health_generate and /ready

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::error::{ApiError, PLUGIN_HUNG};
use super::front::{CALLER, Caller, Client};
use super::http::json_response;
use super::params::{Generation, Names};
use super::reader::Fields;
use super::run::{Ask, Options, Run};
use super::state::AppState;
use crate::policy::monitor::Hung;

/// The process lives, and no hook of a plugin keeps a model from working: nothing but a restart ends a loop
/// without end, and whoever restarts servers asks here.
pub async fn health(State(state): State<Arc<AppState>>) -> Response {
    hung(&state.engine.hung_hooks()).unwrap_or_else(|| json_response(StatusCode::OK, &json!({"status": "ok"})))
}

/// Longest wait for all models to write a token.
const PROOF_TIME: Duration = Duration::from_secs(20);

/// Every model writes a token, in its turn among the requests of others. One after another and for one probe at a time,
/// so that `max_requests_per_client` never counts two.
pub async fn generate(State(state): State<Arc<AppState>>) -> Result<Response, ApiError> {
    let all = async {
        let _alone = state.proof.lock().await;
        for model in state.engine.models() {
            prove(&state, &model.name).await?.collect().await?;
        }
        Ok(json_response(StatusCode::OK, &json!({"status": "ok"})))
    };
    let all = CALLER.scope(Caller { client: Client::Server, arrived: Instant::now() }, all);
    tokio::time::timeout(PROOF_TIME, all).await.unwrap_or_else(|_| {
        let message = format!("No model may take longer than {} s for a token, and one does.", PROOF_TIME.as_secs());
        Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "not_ready", message))
    })
}

/// One token of a model alone.
async fn prove(state: &AppState, model: &str) -> Result<Run, ApiError> {
    const NAMES: Names = Names { max_tokens: &["max_tokens"], min_tokens: "min_tokens", least: 1 };
    let route = state.route(&mut Fields::one("model", model.into()))?;
    let generation = Generation::read(&mut Fields::one("max_tokens", 1.into()), NAMES, &route.defaults, route.vocab)?;
    let ask = Ask { prompt: vec![0], generation: Arc::new(generation), names: Vec::new() };
    let options = Options { default_max_tokens: Some(1), return_signals: false, prompt_field: "prompt" };
    Run::start(state, &route, vec![ask], options).await
}

/// Requests will be served, at every route but those that are disabled.
pub async fn ready(State(state): State<Arc<AppState>>) -> Result<Response, ApiError> {
    let down: Vec<_> = state.engine.down_models().collect();
    if let Some(first) = down.first() {
        let mut body = ApiError::model_down(first).body();
        body["models"] = down.iter().map(|down| down.model.as_str()).collect();
        return Ok(json_response(StatusCode::SERVICE_UNAVAILABLE, &body));
    }
    if let Some(response) = hung(&state.engine.hung_hooks()) {
        return Ok(response);
    }
    if !state.is_ready() {
        return Err(ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "not_ready",
            "The server is about to stop. Send requests to another one.",
        ));
    }
    let routes = state.engine.routes();
    let disabled: Vec<_> = routes.iter().filter_map(|route| route.disabled()).collect();
    let mut body = json!({"status": "ready", "live_requests": state.engine.live_requests()});
    if !disabled.is_empty() {
        body["disabled_routes"] = disabled.iter().map(|d| json!({"route": d.route, "reason": d.to_string()})).collect();
    }
    Ok(json_response(StatusCode::OK, &body))
}

/// The answer while hooks hang.
fn hung(hung: &[Hung]) -> Option<Response> {
    let first = hung.first()?;
    let message = format!(
        "{}: model `{}` stands still, route `{}` waits; if it goes on, restart the server",
        first.not_back(),
        first.names.model,
        first.names.route
    );
    let mut body = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, PLUGIN_HUNG, message).body();
    body["hooks"] = hung.iter().map(described).collect();
    let mut response = json_response(StatusCode::SERVICE_UNAVAILABLE, &body);
    // The hook may come back.
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    Some(response)
}

fn described(Hung { names, hook, step, lasted }: &Hung) -> Value {
    json!({
        "plugin": names.plugin,
        "route": names.route,
        "model": names.model,
        "hook": hook.name(),
        "step": step,
        "seconds": lasted.as_secs(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::monitor::{Hook, Names};

    #[test]
    fn a_hook_that_hangs_may_come_back() {
        let names = Names { route: "r".into(), model: "m".into(), plugin: "p".into() };
        let one = Hung { names, hook: Hook::Route, step: 7, lasted: Duration::from_secs(3) };
        let response = hung(&[one]).unwrap();
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(response.headers()[header::RETRY_AFTER], "1");
        assert!(hung(&[]).is_none());
    }
}
