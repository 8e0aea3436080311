//! The HTTP interface: OpenAI's endpoints, a native one in SGLang's shape, health and metrics.

mod abort;
mod admin;
mod admission;
mod answer;
mod chat;
mod choice;
mod completions;
mod counts;
mod error;
mod front;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzed;
mod generate;
mod health;
mod http;
mod info;
mod metrics;
mod models;
mod native;
mod params;
mod prometheus;
mod prompt;
mod prompts;
mod reader;
mod record;
mod run;
mod running;
mod seen;
mod serve;
mod shown;
mod sse;
mod state;
mod structured;
#[cfg(test)]
mod tests;
mod tokenise;
mod tokens;
mod unbuilt;

use std::sync::Arc;

use axum::Router;
use axum::routing::{get, post};

pub use admin::{Access, Refused, Reload, Reloaded};
pub use answer::{finish_reason, logprob};
pub use choice::{Choice, ChoiceError, End, Ending, Entry, Piece, Reason};
pub use front::{
    Certificates, Cors, Front, KeyRing, Keys, Limits, Listener, MetricsAccess, SocketError, Tls, TlsError, TlsFiles,
    UnixSocket,
};
pub use params::SamplingDefaults;
pub use serve::{serve, serve_admin};
pub use state::AppState;

fn admin_endpoints() -> Router<Arc<AppState>> {
    Router::new()
        .route("/admin/reload", post(admin::reload))
        .route("/admin/routes", get(admin::routes))
        .route("/flush_cache", post(info::flush))
        .route("/abort_request", post(abort::handle))
        .route("/abort_requests", post(abort::handle))
}

/// The endpoints at the address of `server.admin`.
pub fn admin_router(state: Arc<AppState>) -> Router {
    admin_endpoints()
        .layer(axum::Extension(admin::OwnAddress))
        .fallback(http::no_such_path)
        .method_not_allowed_fallback(http::method_not_allowed)
        .layer(axum::middleware::from_fn_with_state(state.clone(), record::every_request))
        .with_state(state)
}

/// All endpoints.
pub fn router(state: Arc<AppState>) -> Router {
    let endpoints = Router::new()
        .route("/v1/chat/completions", post(chat::handle))
        .route("/v1/completions", post(completions::handle))
        .route("/generate", post(generate::handle))
        .route(models::PATH, get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/tokenize", post(tokens::tokenize))
        .route("/v1/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/v1/detokenize", post(tokens::detokenize))
        .route("/version", get(info::version))
        .route("/server_info", get(info::server))
        .route("/get_server_info", get(info::server))
        .route("/model_info", get(info::model))
        .route("/get_model_info", get(info::model))
        .route("/load", get(info::load))
        .route("/ping", get(health::health).post(health::health))
        .route("/health", get(health::health))
        .route("/health_generate", get(health::generate))
        .route("/ready", get(health::ready))
        .route("/metrics", get(prometheus::metrics))
        .route("/metrics/steps", get(metrics::steps))
        .merge(admin_endpoints())
        .fallback(http::no_such_path)
        .method_not_allowed_fallback(http::method_not_allowed)
        .layer(axum::middleware::from_fn_with_state(state.clone(), front::guard));
    // Pages may read refusals, too.
    let endpoints = match &state.front.cors {
        Some(cors) => endpoints.layer(cors.layer()),
        None => endpoints,
    };
    endpoints.layer(axum::middleware::from_fn_with_state(state.clone(), record::every_request)).with_state(state)
}
