//! From a configuration to an engine: find everything, check what is cheap to check, then load.

mod routes;

pub use routes::start_failure;

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use super::device::{self, Device, Devices};
use super::load::{Placed, device_plans};
use super::output::Failure;
use super::plan::{self, MemoryPlan, ModelPlan};
use super::progress::Progress;
use super::select::Selection;
use crate::api::SamplingDefaults;
use crate::config::{self, Config, HubCache, Pool};
use crate::engine::{CheckedNets, Engine, Makers, ModelSetup, RouteSetup};
use crate::policy::plugin::Plugin;
use crate::policy::store::Store;
use crate::request::{ModelId, TokenId};
use crate::runner::net::NetDigest;
use crate::runner::{ModelInfo, Runner};
use crate::subserver::observe::Observer;
use crate::text::{ModelText, readable};

/// Everything but the weights.
pub struct Prepared {
    pub config: Config,
    /// By model: what keys its sampling noise.
    pub(super) noise_keys: Vec<ModelId>,
    /// By model.
    pub(super) placed: Vec<Placed>,
    /// By model.
    pub directories: Vec<PathBuf>,
    /// By model.
    pub texts: Vec<Arc<ModelText>>,
    /// By model.
    pub defaults: Vec<SamplingDefaults>,
    /// By route of the configuration.
    pub plugins: Vec<Arc<Plugin>>,
    pub plan: MemoryPlan,
    /// By route of the configuration.
    excluded: Vec<Vec<TokenId>>,
    /// By model, as known before it is loaded.
    pub(super) infos: Vec<ModelInfo>,
    /// By model: tokens that it never samples.
    masked: Vec<Vec<TokenId>>,
    /// By route of the configuration: the nets of its policies.
    route_nets: Vec<Vec<NetDigest>>,
    /// Of all routes that were checked.
    nets: Mutex<CheckedNets>,
    /// Where plugins come from, now and later.
    store: Arc<Mutex<Store>>,
    /// Where its policies are tried.
    makers: Makers,
}

/// Find and check all that the selection names, except for the weights.
pub fn prepare(selection: impl Into<Selection>) -> Result<Prepared, Failure> {
    let Selection { config, noise_keys } = selection.into();
    let cache = HubCache::from_env(|name| std::env::var_os(name).map(PathBuf::from));
    let mut prepared = Prepared {
        directories: Vec::new(),
        texts: Vec::new(),
        defaults: Vec::new(),
        plugins: Vec::new(),
        plan: MemoryPlan::default(),
        placed: Vec::new(),
        excluded: Vec::new(),
        infos: Vec::new(),
        masked: Vec::new(),
        route_nets: Vec::new(),
        nets: Mutex::default(),
        store: Arc::default(),
        makers: Makers::default(),
        noise_keys,
        config,
    };
    let config = &prepared.config;
    let mut devices = Devices::new(&device::cuda_memory);
    // Models whose K/V pools get what their devices have left.
    let mut open_pools = Vec::new();
    for model in &config.models {
        let fault = |message: String| Failure::input(config.model_error(model, message));
        let named = |error: &dyn std::fmt::Display| fault(format!("models.{}: {error}", model.name));
        let directory = config::model_directory(config, model, &cache).map_err(Failure::input)?;
        let placed = Placed::new(model, &directory, &mut devices).map_err(fault)?;
        let (architecture, context) = (&placed.architecture, placed.architecture.context as u32);
        let page_bytes = placed.page_bytes();
        let pool = model.pool.or((placed.device == Device::Cpu).then_some(plan::CPU_POOL));
        let sized = |pool: Pool| {
            plan::pages(pool, page_bytes, context)
                .map_err(|e| fault(format!("models.{}.{}: {e}", model.name, pool.key())))
        };
        let pages = pool.map(sized).transpose()?;
        if pages.is_none() {
            open_pools.push(prepared.infos.len());
        }
        let info = ModelInfo {
            name: model.name.clone(),
            description: architecture.describe(),
            vocab_size: architecture.vocab_size as u32,
            hidden_size: architecture.hidden as u32,
            context,
            eos: architecture.eos.clone(),
            pages: pages.unwrap_or(0),
            weight_bytes: placed.weight_bytes(),
            page_bytes,
        };
        prepared.plan.models.push(ModelPlan {
            name: info.name.clone(),
            description: info.description.clone(),
            device: placed.device,
            weight_bytes: info.weight_bytes,
            workspace_bytes: placed.workspace_bytes(),
            page_bytes,
            pages: info.pages,
            context,
        });
        prepared.infos.push(info);
        let text = ModelText::load(&directory).map_err(|e| named(&e))?;
        let file = directory.join("tokenizer.json");
        let known = known_tokens(&text, architecture.vocab_size);
        if let Some(leftover) = known.map_err(|e| named(&format!("{}: {e}", file.display())))? {
            tracing::warn!("{}: {leftover}", file.display());
        }
        let masked = model.masked_tokens.iter().enumerate().map(|(at, token)| {
            text.tokenizer.id_of(token).filter(|&id| (id as usize) < architecture.vocab_size).ok_or_else(|| {
                let field = format!("models.{}.masked_tokens[{at}] = {token:?}", model.name);
                let message = format!("{field}: the model has no such token; give the whole text of one");
                Failure::input(config.model_error_at(model, &format!("masked_tokens/{at}"), message))
            })
        });
        let masked: Vec<TokenId> = masked.collect::<Result<_, _>>()?;
        if architecture.eos.iter().all(|id| masked.contains(id)) && !architecture.eos.is_empty() {
            return Err(fault(format!(
                "models.{}.masked_tokens: has all end tokens, so that no answer would end",
                model.name
            )));
        }
        prepared.masked.push(masked);
        prepared.texts.push(Arc::new(text));
        prepared.defaults.push(SamplingDefaults::load(&directory).map_err(|e| named(&e))?);
        prepared.directories.push(directory);
        prepared.placed.push(placed);
    }
    prepared.find_routes()?;
    prepared.warn_of_waits();
    prepared.plan.devices = device_plans(&prepared.placed, &mut devices, prepared.config.gpu);
    prepared.check_cuda_nets()?;
    prepared.plan_routers();
    prepared.plan.share_out(&open_pools);
    for (info, plan) in prepared.infos.iter_mut().zip(&prepared.plan.models) {
        info.pages = plan.pages;
    }
    prepared.check_memory().map_err(|failure| failure.with_details(&prepared.plan))?;
    Ok(prepared)
}

/// The tokenizer belongs to a model with `width` logits. Tokens beyond them are fatal where texts would
/// come to hold them: parts of the vocabulary, or what is put before each prompt. Other added tokens are
/// common leftovers, and announced.
fn known_tokens(text: &ModelText, width: usize) -> Result<Option<String>, String> {
    let Some((id, added)) = text.tokenizer.first_beyond(width) else { return Ok(None) };
    let prefix = text.encode_prompt("").map_err(|e| e.to_string())?;
    let always = prefix.into_iter().find(|id| *id as usize >= width);
    if let Some(id) = always.or((!added).then_some(id)) {
        return Err(format!(
            "has a token with id {id}, but vocab_size of config.json is {width}; download the tokenizer and the model of one directory"
        ));
    }
    let token = readable(text.tokenizer.bytes(id).unwrap_or_default());
    Ok(Some(format!(
        "the added token {token:?} has id {id}, but vocab_size of config.json is {width}; prompts with it are refused"
    )))
}

impl Prepared {
    /// Load the weights and start the engine with the routes of the configuration.
    pub fn start(&self, progress: &Progress) -> Result<Engine, Failure> {
        self.start_observed(progress, |_| Ok(None))
    }

    /// [`Self::start`], with the observer that `observer` makes once the models are loaded.
    pub fn start_observed(
        &self,
        progress: &Progress,
        observer: impl FnOnce(Vec<ModelInfo>) -> Result<Option<Arc<dyn Observer>>, Failure>,
    ) -> Result<Engine, Failure> {
        let runners = self.load(progress)?;
        let observer = observer(runners.iter().map(|runner| runner.info().clone()).collect())?;
        let routes = (0..self.config.routes.len()).map(|index| self.route(index)).collect();
        self.engine(runners, routes, observer)
    }

    /// The route with this index in the configuration.
    pub fn route(&self, index: usize) -> RouteSetup {
        let route = &self.config.routes[index];
        RouteSetup {
            name: route.name.clone(),
            models: route.models.iter().map(|(m, role)| (ModelId(*m as u32), role.clone())).collect(),
            entry: route.entry,
            policy: self.plugins[index].policy.clone(),
            settings: route.settings.to_string(),
            overrides: route.overrides.clone().unwrap_or_default(),
            on_error: route.on_error,
            budget: route.budget,
            excluded: self.excluded[index].clone(),
            directory: self.config.directory().to_owned(),
        }
    }

    /// The models as an engine takes them. `runners`: one for each model of the configuration.
    pub fn setups(&self, runners: Vec<Box<dyn Runner>>) -> Vec<ModelSetup> {
        let config = &self.config;
        let models = config.models.iter().zip(&self.placed).zip(&self.texts).zip(&self.masked).zip(runners).map(
            |((((model, placed), text), masked), runner)| ModelSetup {
                runner,
                masked: masked.clone(),
                text: text.clone(),
                min_batch: model.min_batch.clone(),
                max_wait: model.max_wait,
                hold: model.hold,
                max_rows: placed.max_rows as usize,
                prefill_chunk: placed.prefill_chunk as usize,
                prefix_cache: model.prefix_cache,
            },
        );
        models.collect()
    }

    /// Start an engine with these routes. `runners`: one for each model of the configuration.
    pub fn engine(
        &self,
        runners: Vec<Box<dyn Runner>>,
        routes: Vec<RouteSetup>,
        observer: Option<Arc<dyn Observer>>,
    ) -> Result<Engine, Failure> {
        let models = self.setups(runners);
        let batching = self.config.batching;
        let mut engine = Engine::start_observed(models, routes, batching.schedule, observer)
            .map_err(|error| self.start_failure(&error))?;
        if let Some(settings) = batching.online {
            engine.follow(settings).map_err(|error| self.start_failure(&error))?;
        }
        Ok(engine)
    }
}
