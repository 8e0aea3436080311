//! POST /admin/reload and GET /admin/routes: for the operator.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::extract::{Extension, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::Mutex;

use super::error::{ApiError, PLUGIN_HUNG};
use super::front::{KeyRing, bearer};
use super::http::json_response;
use super::state::AppState;
use crate::engine::{KnownRoute, RouteChanges, RouteState, VariantOf};
use crate::metrics::Counter;

/// Who may use the endpoints, and where.
#[derive(Default)]
pub struct Access {
    /// They have an address of their own.
    pub own_address: bool,
    keys: KeyRing,
}

/// A request has come to the address of the admin endpoints.
#[derive(Clone, Copy)]
pub(super) struct OwnAddress;

impl Access {
    pub fn new<'a>(own_address: bool, keys: impl IntoIterator<Item = &'a str>) -> Self {
        Self { own_address, keys: KeyRing::new(keys.into_iter().map(|key| ("admin", key))) }
    }

    pub(super) fn check(&self, at_own_address: bool, headers: &HeaderMap) -> Result<(), ApiError> {
        if self.keys.is_empty() {
            let absent = |message| Err(ApiError::new(StatusCode::NOT_FOUND, "not_found", message));
            return match (at_own_address, self.own_address) {
                (true, _) => Ok(()),
                (false, true) => absent(
                    "The admin endpoints are served at the address of server.admin alone; set server.admin_key to have them here, too.",
                ),
                (false, false) => {
                    absent("The admin endpoints are off; set server.admin or server.admin_key to have them.")
                }
            };
        }
        self.check_key(headers)
    }

    /// Whether the request shows an admin key.
    pub(super) fn check_key(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        if bearer(headers).is_some_and(|key| self.keys.owner(key).is_some()) {
            return Ok(());
        }
        let message = "This needs a key of server.admin_key: `Authorization: Bearer KEY`.";
        Err(ApiError::new(StatusCode::UNAUTHORIZED, "invalid_admin_key", message))
    }
}

/// What a reload came to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Reloaded {
    #[serde(flatten)]
    pub routes: RouteChanges,
    /// Models that wait for other batches, or for longer or shorter.
    pub models: Vec<String>,
}

/// Why nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// What `check` says of the configuration.
    Config(String),
    /// What only a restart changes.
    Restart(String),
    /// A hook of a plugin does not come back.
    Hung(String),
    /// The server is about to end.
    Stopping,
    /// Something else went wrong.
    Work(String),
}

type Work = dyn Fn() -> Result<Reloaded, Refused> + Send + Sync;

/// Takes over the configuration anew. One at a time; others wait, and then find what is there.
pub struct Reload {
    work: Arc<Work>,
    turn: Mutex<()>,
    stopping: AtomicBool,
    applied: Counter,
    refused: Counter,
}

impl Reload {
    /// `work` does it, on a thread of its own.
    pub fn new(work: impl Fn() -> Result<Reloaded, Refused> + Send + Sync + 'static) -> Self {
        Self {
            work: Arc::new(work),
            turn: Mutex::default(),
            stopping: AtomicBool::new(false),
            applied: Counter::default(),
            refused: Counter::default(),
        }
    }

    /// From now on every reload is refused. One under way goes on as far as the engine lets it.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
    }

    /// How many were applied and refused.
    pub(super) fn outcomes(&self) -> [u64; 2] {
        [self.applied.read(), self.refused.read()]
    }

    /// Do it and log the outcome.
    pub async fn run(&self) -> Result<Reloaded, Refused> {
        let _turn = self.turn.lock().await;
        let outcome = if self.stopping.load(Ordering::Acquire) {
            Err(Refused::Stopping)
        } else {
            let work = self.work.clone();
            let outcome = tokio::task::spawn_blocking(move || work()).await;
            outcome.unwrap_or_else(|_| Err(Refused::Work("the reload panicked; see the log".into())))
        };
        match &outcome {
            Ok(Reloaded { routes, models }) => {
                self.applied.add(1);
                let RouteChanges { added, changed, removed, unchanged } = routes;
                tracing::info!(
                    ?added,
                    ?changed,
                    ?removed,
                    unchanged = unchanged.len(),
                    ?models,
                    "configuration reloaded"
                );
            }
            Err(Refused::Config(why) | Refused::Restart(why) | Refused::Hung(why) | Refused::Work(why)) => {
                self.refused.add(1);
                tracing::error!("configuration not reloaded, the server goes on as before: {why}");
            }
            Err(Refused::Stopping) => {
                self.refused.add(1);
                tracing::warn!("configuration not reloaded: the server is shutting down");
            }
        }
        outcome
    }
}

pub(super) async fn reload(
    State(state): State<Arc<AppState>>,
    own: Option<Extension<OwnAddress>>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    state.access.check(own.is_some(), &headers)?;
    let reload =
        state.reload.clone().ok_or_else(|| ApiError::internal("this server has no configuration to reload"))?;
    // It goes on if its client does not wait for it.
    let outcome = tokio::spawn(async move { reload.run().await }).await;
    match outcome.map_err(|_| ApiError::internal("the reload panicked; see the server's log"))? {
        Ok(reloaded) => {
            let mut body = json!({"reloaded": true});
            if let (Value::Object(body), Ok(Value::Object(more))) = (&mut body, serde_json::to_value(&reloaded)) {
                body.extend(more);
            }
            Ok(json_response(StatusCode::OK, &body))
        }
        Err(Refused::Config(why)) => Err(ApiError::new(StatusCode::BAD_REQUEST, "invalid_config", why)),
        Err(Refused::Restart(why)) => Err(ApiError::new(StatusCode::CONFLICT, "restart_needed", why)),
        Err(Refused::Hung(why)) => Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, PLUGIN_HUNG, why)),
        Err(Refused::Stopping) => Err(ApiError::shutting_down()),
        Err(Refused::Work(why)) => Err(ApiError::internal(why)),
    }
}

pub(super) async fn routes(
    State(state): State<Arc<AppState>>,
    own: Option<Extension<OwnAddress>>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    state.access.check(own.is_some(), &headers)?;
    let known = state.engine.known_routes();
    let routes: Vec<Value> = known.iter().filter_map(|route| describe(&state, route)).collect();
    Ok(json_response(StatusCode::OK, &json!({"routes": routes})))
}

fn describe(state: &AppState, KnownRoute { id, info, state: life, requests }: &KnownRoute) -> Option<Value> {
    let life = match life {
        RouteState::Preparing => return None,
        RouteState::Serving => "serving",
        RouteState::Draining => "draining",
    };
    let models = info.models.iter().filter_map(|(model, role)| {
        Some(json!({"name": state.engine.models().get(model.index())?.name, "role": role}))
    });
    Some(json!({
        "name": info.name,
        "id": id.0,
        "state": life,
        "requests": requests,
        "settings": info.variant.as_ref().map(VariantOf::values),
        "plugin": info.policy,
        "version": info.version,
        "sha256": info.sha256,
        "models": models.collect::<Vec<_>>(),
    }))
}
