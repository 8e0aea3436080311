//! GET /metrics: what the server does, in the text format of Prometheus. docs/metrics.md says what each name means.
//!
//! Our own writer and no client library: nothing is counted in the types of one. Most values are snapshots of what
//! the engine keeps anyway, and the histograms of the models' threads must not lock.

mod models;
mod policies;
mod routes;
mod server;

use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};

use super::state::AppState;
use crate::metrics::text::{CONTENT_TYPE, Exposition};

pub async fn metrics(State(state): State<Arc<AppState>>) -> Response {
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], scrape(&state)).into_response()
}

fn scrape(state: &AppState) -> String {
    let mut out = Exposition::default();
    server::write(&mut out, state);
    routes::write(&mut out, &state.engine);
    models::write(&mut out, &state.engine);
    policies::write(&mut out, &state.engine);
    out.into_text()
}
