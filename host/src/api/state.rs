//! What the handlers share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use axum::http::StatusCode;

use super::admin::{Access, Reload};
use super::admission::Admissions;
use super::counts::ApiCounts;
use super::error::ApiError;
use super::front::Front;
use super::params::SamplingDefaults;
use super::reader::{Fields, Warned};
use super::record::Record;
use super::running::Running;
use super::traces::Traces;
use crate::constraint::Compiler;
use crate::engine::{Engine, OwnSettings, ServedRoute};
use crate::request::TokenId;
use crate::runner::{ModelInfo, PAGE_TOKENS};
use crate::text::ModelText;

/// State of the HTTP interface.
pub struct AppState {
    pub engine: Arc<Engine>,
    /// By model.
    pub texts: Vec<Arc<ModelText>>,
    /// By model.
    pub defaults: Vec<SamplingDefaults>,
    /// Time between comments that keep a silent stream open.
    pub keep_alive: Duration,
    /// Largest request body.
    pub max_body_bytes: usize,
    /// Most choices under way at once, over all clients.
    pub max_requests: usize,
    /// Who may use the admin endpoints. Nobody if nothing is said.
    pub access: Access,
    /// Who may ask, how much and in which order.
    pub front: Front,
    /// What `POST /admin/reload` does.
    pub reload: Option<Arc<Reload>>,
    /// Of the HTTP interface.
    pub counts: ApiCounts,
    /// If requests are traced.
    pub traces: Option<Traces>,
    /// Of the configuration in force; empty without one.
    pub config_sha256: Arc<ArcSwap<String>>,
    /// Held by the one probe whose tokens are being written.
    pub(super) proof: tokio::sync::Mutex<()>,
    pub(super) started: u64,
    pub(super) warned: Warned,
    pub(super) admissions: Admissions,
    pub(super) compiler: Compiler,
    pub(super) running: Running,
    /// `/ready` says no.
    leaving: AtomicBool,
}

impl AppState {
    /// `texts` and `defaults` have one entry for each of the engine's models.
    pub fn new(engine: Arc<Engine>, texts: Vec<Arc<ModelText>>, defaults: Vec<SamplingDefaults>) -> Self {
        Self {
            engine,
            texts,
            defaults,
            keep_alive: Duration::from_secs(15),
            max_body_bytes: 32 << 20,
            max_requests: 1024,
            access: Access::default(),
            front: Front::default(),
            reload: None,
            counts: ApiCounts::default(),
            traces: None,
            config_sha256: Arc::default(),
            proof: tokio::sync::Mutex::default(),
            started: unix_time(),
            warned: Warned::default(),
            admissions: Admissions::default(),
            compiler: Compiler::default(),
            running: Running::default(),
            leaving: AtomicBool::new(false),
        }
    }

    /// From now on `/ready` says no, so that load balancers send nobody here; who comes is still served.
    pub fn start_leaving(&self) {
        self.leaving.store(true, Ordering::Release);
    }

    /// From now on `/ready` says no, and new requests for answers and reloads are refused. What was admitted goes on.
    pub fn start_draining(&self) {
        self.admissions.close();
        if let Some(reload) = &self.reload {
            reload.stop();
        }
    }

    pub fn is_ready(&self) -> bool {
        let leaving = self.leaving.load(Ordering::Acquire);
        self.engine.is_ready() && !leaving && !self.admissions.is_closed()
    }

    /// The route that the `model` field names.
    pub(super) fn route(&self, fields: &mut Fields) -> Result<Route, ApiError> {
        let routes = self.engine.routes();
        let name = match (fields.string("model")?, &routes[..]) {
            (Some(name), _) => name,
            (None, [only]) => only.name.clone(),
            (None, _) => {
                let names: Vec<&str> = routes.iter().map(|route| route.name.as_str()).collect();
                let message = format!("`model` is required; it is one of: {}.", names.join(", "));
                return Err(ApiError::missing("model", message));
            }
        };
        let route = routes.named(&name).ok_or_else(|| unknown_model(&name))?;
        Record::note(|facts| (facts.model, facts.policy) = (Some(name.clone()), route.policy.clone()));
        if let Some(disabled) = route.disabled() {
            return Err(ApiError::route_disabled(disabled));
        }
        let all = self.engine.models();
        let models: Vec<&ModelInfo> = route.models.iter().filter_map(|(id, _)| all.get(id.0 as usize)).collect();
        let entry = route.models.get(route.entry).map(|(id, _)| id.0 as usize);
        let text = entry.and_then(|entry| self.texts.get(entry)).cloned();
        let mut eos: Vec<TokenId> = models.iter().flat_map(|model| model.eos.iter().copied()).collect();
        eos.sort_unstable();
        eos.dedup();
        Ok(Route {
            served: route.clone(),
            settings: None,
            name,
            text: text.ok_or_else(|| ApiError::internal("the route's entry model has no tokenizer"))?,
            defaults: entry.and_then(|entry| self.defaults.get(entry)).cloned().unwrap_or_default(),
            vocab: route.vocab_size,
            context: route.context,
            room: models.iter().map(|m| m.pages.saturating_mul(PAGE_TOKENS as u32)).fold(route.context, u32::min),
            eos: eos.into(),
            model_names: all.iter().map(|model| model.name.clone()).collect(),
        })
    }
}

/// A route as a request sees it.
#[derive(Clone, Debug)]
pub struct Route {
    /// Held, so that a request that is being prepared still finds it.
    pub served: Arc<ServedRoute>,
    /// Settings of its policy that the request wants in place of the route's own.
    pub settings: Option<OwnSettings>,
    pub name: String,
    /// Tokenizer and chat template of the entry model.
    pub text: Arc<ModelText>,
    pub defaults: SamplingDefaults,
    /// Tokens that all models have logits for.
    pub vocab: u32,
    /// Most tokens of a sequence at the model with the shortest context.
    pub context: u32,
    /// Most tokens of a sequence at the tightest model.
    pub room: u32,
    /// Tokens that end an answer at some model.
    pub eos: Arc<[TokenId]>,
    /// Names of all models, by model.
    pub model_names: Arc<[String]>,
}

pub fn unknown_model(name: &str) -> ApiError {
    let shown: String = name.chars().take(200).collect();
    let message = format!("The model `{shown}` does not exist. GET /v1/models lists the models and routes.");
    ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message).param("model")
}

/// Seconds since 1970.
pub fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
