//! From a configuration to an engine: find everything, check what is cheap to check, then load.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::device::{self, Device, Devices};
use super::load::{Placed, device_plans};
use super::output::Failure;
use super::plan::{self, MemoryPlan, ModelPlan};
use super::progress::Progress;
use super::select::Selection;
use crate::api::SamplingDefaults;
use crate::config::{self, Config, HubCache, RouteConfig};
use crate::engine::{CheckedNets, Engine, ModelSetup, RouteSetup, StartError, TokenText, check_route};
use crate::policy::plugin::{self, Plugin};
use crate::policy::validate_settings;
use crate::request::{ModelId, TokenId};
use crate::runner::{ModelInfo, Runner, cpu};
use crate::subserver::gate::{Schedule, first_lockup, thresholds};
use crate::subserver::observe::Observer;
use crate::text::{ModelText, excluded_tokens, readable};

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
    /// Of all routes that were checked.
    nets: Mutex<CheckedNets>,
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
        nets: Mutex::default(),
        noise_keys,
        config,
    };
    let config = &prepared.config;
    let mut devices = Devices::new(&device::cuda_memory);
    // Models whose K/V pools get what their devices have left.
    let mut open_pools = Vec::new();
    for model in &config.models {
        let fault = |message: String| Failure::input(config.error(&model.origin, message));
        let named = |error: &dyn std::fmt::Display| fault(format!("models.{}: {error}", model.name));
        let directory = config::model_directory(config, model, &cache).map_err(Failure::input)?;
        let placed = Placed::new(model, &directory, &mut devices).map_err(fault)?;
        let (architecture, context) = (&placed.architecture, placed.architecture.context as u32);
        let page_bytes = placed.page_bytes();
        let pool = model.pool.or((placed.device == Device::Cpu).then_some(plan::CPU_POOL));
        let pages = pool.map(|pool| plan::pages(pool, page_bytes, context)).transpose().map_err(|e| named(&e))?;
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
        let masked = model.masked_tokens.iter().map(|token| {
            text.tokenizer.id_of(token).filter(|&id| (id as usize) < architecture.vocab_size).ok_or_else(|| {
                fault(format!(
                    "models.{}.masked_tokens: the model has no token {token:?}; give its whole text",
                    model.name
                ))
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
    let mut loaded = HashMap::new();
    let executable = std::env::current_exe().ok();
    let directories = config::plugin_directories(config, executable.as_deref());
    for route in &config.routes {
        prepared.excluded.push(shared_vocabulary(config, route, &prepared.texts, &prepared.infos)?);
        let plugin = plugin(config, route, &directories, &mut loaded)?;
        validate_settings(plugin.policy.settings_schema(), &route.settings).map_err(|e| {
            Failure::input(config.error(&route.settings_origin, format!("routes.{}.settings: {e}", route.name)))
        })?;
        prepared.plugins.push(plugin);
    }
    for model in config.models.iter().filter(|model| model.hold > model.max_wait) {
        let [hold, most] = [model.hold, model.max_wait].map(|time| time.as_secs_f64() * 1e3);
        tracing::warn!(
            "{}: models.{}.hold_ms = {hold}: counts up to max_wait_ms ({most}) only; lower it, or raise max_wait_ms",
            config.file.display(),
            model.name
        );
    }
    let ladders: Vec<Vec<u32>> = config.models.iter().map(|m| m.min_batch.clone()).collect();
    if config.batching.schedule == Schedule::Delayed
        && let Some(requests) = first_lockup(&ladders)
    {
        let thresholds = thresholds(&ladders, requests);
        let lowered: Vec<String> =
            config.models.iter().zip(thresholds).map(|(m, b)| format!("{} {b}", m.name)).collect();
        tracing::warn!(
            "{}: with {requests} requests under way the models' min_batch could wait for each other for ever; \
             the server lowers them then to: {}",
            config.file.display(),
            lowered.join(", ")
        );
    }
    for index in 0..prepared.config.routes.len() {
        prepared.check(&prepared.route(index))?;
    }
    prepared.plan.devices = device_plans(&prepared.placed, &mut devices, prepared.config.gpu);
    for (index, (model, placed)) in prepared.config.models.iter().zip(&prepared.placed).enumerate() {
        if let Device::Cuda(_) = placed.device {
            let checked = prepared.nets().check_cuda(ModelId(index as u32));
            checked.map_err(|e| {
                Failure::input(prepared.config.error(&model.origin, format!("models.{}: {e}", model.name)))
            })?;
        }
    }
    prepared.plan_routers();
    prepared.plan.share_out(&open_pools);
    for (info, plan) in prepared.infos.iter_mut().zip(&prepared.plan.models) {
        info.pages = plan.pages;
    }
    let (config, plan) = (&prepared.config, &prepared.plan);
    plan.check().map_err(|e| Failure::input(format!("{}: {e}", config.file.display())).with_details(plan))?;
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

/// Tokens that not all models of `route` know, if those they share mean the same. A model with wider logits
/// than another may write ids that the other has no embedding for, although no tokenizer knows them.
fn shared_vocabulary(
    config: &Config,
    route: &RouteConfig,
    texts: &[Arc<ModelText>],
    infos: &[ModelInfo],
) -> Result<Vec<TokenId>, Failure> {
    let tokenizers: Vec<_> =
        route.models.iter().map(|(m, _)| (config.models[*m].name.as_str(), &texts[*m].tokenizer)).collect();
    let mut excluded = excluded_tokens(&tokenizers)
        .map_err(|e| Failure::input(config.error(&route.origin, format!("routes.{}: {e}", route.name))))?;
    let widths = || route.models.iter().map(|(m, _)| infos[*m].vocab_size);
    excluded.extend(widths().min().unwrap_or(0)..widths().max().unwrap_or(0));
    excluded.sort_unstable();
    excluded.dedup();
    Ok(excluded)
}

/// Load the route's plugin, or take it from `loaded` if another route has it already.
fn plugin(
    config: &Config,
    route: &RouteConfig,
    directories: &[PathBuf],
    loaded: &mut HashMap<PathBuf, Arc<Plugin>>,
) -> Result<Arc<Plugin>, Failure> {
    let fault = |message: String| {
        let message = format!("routes.{}.plugin = {:?}: {message}", route.name, route.plugin);
        Failure::input(config.error(&route.plugin_origin, message))
    };
    let path = if route.plugin.contains('/') || route.plugin.ends_with(".so") {
        config.directory().join(&route.plugin)
    } else {
        plugin::find(&route.plugin, directories).map_err(|e| fault(e.to_string()))?
    };
    if let Some(plugin) = loaded.get(&path)
        && route.sha256.as_ref().is_none_or(|pin| *pin == plugin.sha256)
    {
        return Ok(plugin.clone());
    }
    let plugin = Plugin::load(&path, route.sha256.as_deref()).map_err(|e| fault(e.to_string()))?;
    let plugin = Arc::new(plugin);
    loaded.insert(path, plugin.clone());
    Ok(plugin)
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
            on_error: route.on_error,
            excluded: self.excluded[index].clone(),
            directory: self.config.directory().to_owned(),
        }
    }

    /// Refuse what the engine would refuse in `route`, before any weights are loaded.
    pub fn check(&self, route: &RouteSetup) -> Result<(), Failure> {
        let texts: Vec<Arc<dyn TokenText>> = self.texts.iter().map(|text| text.clone() as Arc<dyn TokenText>).collect();
        check_route(route, &texts, &self.infos, &mut self.nets()).map_err(|error| self.start_failure(&error))
    }

    /// Add the routers of all routes that were checked to the memory plan.
    fn plan_routers(&mut self) {
        let nets = self.nets.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (index, (plan, info)) in self.plan.models.iter_mut().zip(&self.infos).enumerate() {
            let model = ModelId(index as u32);
            plan.weight_bytes = info.weight_bytes.saturating_add(nets.weight_bytes(model));
            if nets.looks_back(model) {
                plan.page_bytes = info.page_bytes + cpu::hidden_page_bytes(info);
            }
        }
    }

    /// Files with the weights of the routers of all routes that were checked, each once.
    pub fn router_weights(&self) -> Vec<PathBuf> {
        self.nets().weights()
    }

    /// Nets join the list only when they are found good, so a panic elsewhere cannot spoil it.
    fn nets(&self) -> MutexGuard<'_, CheckedNets> {
        self.nets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start_failure(&self, error: &StartError) -> Failure {
        match error {
            StartError::Policy { route, .. } | StartError::Route { route, .. } | StartError::Taken { route } => {
                match self.config.routes.iter().find(|r| r.name == *route) {
                    Some(known) => Failure::input(self.config.error(&known.settings_origin, error.to_string())),
                    None => Failure::input(error),
                }
            }
            StartError::Thread { .. } | StartError::Delivery { .. } | StartError::Tuner { .. } => Failure::work(error),
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
