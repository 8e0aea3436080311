//! The HTTP interface: OpenAI's endpoints, a native one in SGLang's shape, health and metrics.

mod abort;
mod admin;
mod admission;
mod answer;
#[cfg(test)]
mod asked;
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
mod misplaced;
mod models;
mod native;
mod openapi;
mod params;
mod prometheus;
mod prompt;
mod prompts;
mod reader;
mod record;
mod routing;
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
mod traces;
mod unbuilt;
mod visits;

use std::sync::Arc;

use axum::Router;
use axum::routing::{MethodRouter, get, post};

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
pub use traces::{Destination, TraceSettings, Traces};

/// A path with what answers there.
type Endpoint = (&'static str, MethodRouter<Arc<AppState>>);

fn admin_endpoints() -> Vec<Endpoint> {
    vec![
        ("/admin/reload", post(admin::reload)),
        ("/admin/routes", get(admin::routes)),
        ("/flush_cache", post(info::flush)),
        ("/abort_request", post(abort::handle)),
        ("/abort_requests", post(abort::handle)),
    ]
}

fn endpoints() -> Vec<Endpoint> {
    vec![
        ("/v1/chat/completions", post(chat::handle)),
        ("/v1/completions", post(completions::handle)),
        ("/generate", post(generate::handle)),
        (models::PATH, get(models::list)),
        ("/v1/models/{*id}", get(models::one)),
        ("/tokenize", post(tokens::tokenize)),
        ("/v1/tokenize", post(tokens::tokenize)),
        ("/detokenize", post(tokens::detokenize)),
        ("/v1/detokenize", post(tokens::detokenize)),
        ("/version", get(info::version)),
        ("/server_info", get(info::server)),
        ("/get_server_info", get(info::server)),
        ("/model_info", get(info::model)),
        ("/get_model_info", get(info::model)),
        ("/load", get(info::load)),
        ("/ping", get(health::health).post(health::health)),
        ("/health", get(health::health)),
        ("/health_generate", get(health::generate)),
        ("/ready", get(health::ready)),
        ("/metrics", get(prometheus::metrics)),
        ("/metrics/steps", get(metrics::steps)),
        ("/openapi.json", get(openapi::handle)),
    ]
}

fn routes(endpoints: Vec<Endpoint>) -> Router<Arc<AppState>> {
    endpoints.into_iter().fold(Router::new(), |router, (path, handlers)| router.route(path, handlers))
}

/// The endpoints at the address of `server.admin`.
pub fn admin_router(state: Arc<AppState>) -> Router {
    routes(admin_endpoints())
        .layer(axum::Extension(admin::OwnAddress))
        .fallback(http::no_such_path)
        .method_not_allowed_fallback(http::method_not_allowed)
        .layer(axum::middleware::from_fn_with_state(state.clone(), record::every_request))
        .with_state(state)
}

/// All endpoints.
pub fn router(state: Arc<AppState>) -> Router {
    let endpoints = routes(endpoints())
        .merge(routes(admin_endpoints()))
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
