//! What a request must be before an endpoint sees it.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use tokio::time::Instant;

use super::counters::Refusal;
use super::{CALLER, Caller, Client, Front, MetricsAccess, Peer, framing, keys};
use crate::api::error::ApiError;
use crate::api::http::refuse_unread;
use crate::api::state::AppState;

/// Extension of a request over a connection whose head gives the length of its body in two ways.
#[derive(Clone, Copy)]
pub struct Ambiguous;

pub async fn guard(State(state): State<Arc<AppState>>, request: Request, next: Next) -> Response {
    match admit(&state, &request) {
        Ok(client) => {
            let caller = Caller { client: client.clone(), arrived: Instant::now() };
            let mut response = CALLER.scope(caller, next.run(request)).await;
            response.extensions_mut().insert(client);
            response
        }
        Err((refusal, error)) => {
            state.front.counters.add(refusal);
            let mut response = refuse_unread(request, error);
            if refusal == Refusal::Malformed {
                response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            response
        }
    }
}

fn admit(state: &AppState, request: &Request) -> Result<Client, (Refusal, ApiError)> {
    let front = &state.front;
    let (uri, headers) = (request.uri(), request.headers());
    framing::sizes(uri, headers, front.limits.head()).map_err(|error| (Refusal::Malformed, error))?;
    let peer = request.extensions().get::<Peer>().copied();
    // A request without a connection has no framing.
    if peer.is_some() {
        let ambiguous = request.extensions().get::<Ambiguous>().is_some();
        framing::unambiguous(request.version(), uri, headers, ambiguous)
            .and_then(|()| framing::transfer(headers))
            .map_err(|error| (Refusal::Malformed, error))?;
    }
    let peer = Client::Peer(peer.unwrap_or(Peer::Local));
    let name = key_holder(front, state, request.method(), uri.path(), headers);
    Ok(name.map_err(|error| (Refusal::Unauthorized, error))?.map_or(peer, Client::Key))
}

/// The name that goes with the request's key, where one is asked for.
fn key_holder(
    front: &Front,
    state: &AppState,
    method: &Method,
    path: &str,
    headers: &HeaderMap,
) -> Result<Option<Arc<str>>, ApiError> {
    match path {
        // Probes have no keys, nor have browsers that ask first; the admin endpoints have their own.
        "/health" | "/ready" | "/ping" | "/admin/reload" | "/admin/routes" | "/flush_cache" => return Ok(None),
        _ if method == Method::OPTIONS => return Ok(None),
        "/metrics" | "/metrics/steps" => match front.metrics {
            MetricsAccess::Open => return Ok(None),
            MetricsAccess::AdminKey => return state.access.check_key(headers).map(|()| None),
            MetricsAccess::ApiKey => {}
        },
        _ => {}
    }
    let ring = front.keys.current();
    if ring.is_empty() {
        return Ok(None);
    }
    let wrong = |message| ApiError::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message);
    let key = keys::shown(headers)
        .ok_or_else(|| wrong("An API key is needed: `Authorization: Bearer KEY`, or `x-api-key: KEY`."))?;
    ring.owner(key).cloned().map(Some).ok_or_else(|| wrong("The API key is not one of this server's."))
}
