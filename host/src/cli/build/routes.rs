//! The routes of a configuration: plugins, settings, nets, all checked without a runner.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::super::device::Device;
use super::super::output::Failure;
use super::super::plan::DoesNotFit;
use super::Prepared;
use crate::config::{self, Config, Pool, RouteConfig};
use crate::engine::{CheckedNets, Makers, RouteChanges, RouteSetup, StartError, TokenText, Wanted, check_route};
use crate::plain::{closest, short};
use crate::policy::nets::{self, HostNet};
use crate::policy::plugin::{self, Plugin};
use crate::policy::store::Store;
use crate::policy::validate_settings;
use crate::request::{ModelId, TokenId};
use crate::runner::net::NetDigest;
use crate::runner::{ModelInfo, cpu};
use crate::subserver::gate::{Schedule, first_lockup, thresholds};
use crate::text::{ModelText, excluded_tokens};

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
        .map_err(|e| Failure::input(config.members_error(route, format!("routes.{}: {e}", route.name))))?;
    let widths = || route.models.iter().map(|(m, _)| infos[*m].vocab_size);
    excluded.extend(widths().min().unwrap_or(0)..widths().max().unwrap_or(0));
    excluded.sort_unstable();
    excluded.dedup();
    Ok(excluded)
}

/// Longest path that the system takes.
const MAX_PATH: usize = libc::PATH_MAX as usize;

/// Load the route's plugin, or take it from `loaded` if another route has it already.
fn plugin(
    config: &Config,
    route: &RouteConfig,
    directories: &[PathBuf],
    loaded: &mut HashMap<PathBuf, Arc<Plugin>>,
    store: &mut Store,
) -> Result<Arc<Plugin>, Failure> {
    let fault = |message: String| {
        let message = format!("routes.{}.plugin = {:?}: {message}", route.name, short(&route.plugin));
        Failure::input(config.route_error(route, "/plugin", message))
    };
    if route.plugin.len() > MAX_PATH {
        return Err(fault(format!(
            "has {} bytes, and a path has at most {MAX_PATH}; give a shorter one",
            route.plugin.len()
        )));
    }
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
    let plugin = store.load(&path, route.sha256.as_deref()).map_err(|e| fault(e.to_string()))?;
    let plugin = Arc::new(plugin);
    loaded.insert(path, plugin.clone());
    Ok(plugin)
}

/// The route's plugin, with the nets that the route describes for it.
fn with_nets(config: &Config, route: &RouteConfig, plugin: Arc<Plugin>) -> Result<Arc<Plugin>, Failure> {
    let nets = match &route.nets {
        Some(table) => nets::written(table).map_err(|e| nets_fault(config, route, &e))?,
        None if plugin.policy.host_nets().is_empty() => return Ok(plugin),
        None => Vec::new(),
    };
    let policy = plugin.policy.with_nets(nets).map_err(|e| nets_fault(config, route, &format!(": {e}")))?;
    let Plugin { version, path, sha256, .. } = &*plugin;
    Ok(Arc::new(Plugin { policy, version: version.clone(), path: path.clone(), sha256: sha256.clone() }))
}

/// `told` begins with the place within `nets`: `.NET.nodes[0]: …`.
fn nets_fault(config: &Config, route: &RouteConfig, told: &str) -> Failure {
    let (place, _) = told.split_once(": ").unwrap_or_default();
    let place = format!("/nets{}", place.replace(['.', '['], "/").replace(']', ""));
    Failure::input(config.route_error(route, &place, format!("routes.{}.nets{told}", route.name)))
}

/// Requests may set settings of the policy alone.
fn check_overrides(config: &Config, route: &RouteConfig, plugin: &Plugin) -> Result<(), Failure> {
    let Some(overrides) = &route.overrides else { return Ok(()) };
    let Some((index, known)) = overrides.unknown_key(plugin.policy.settings_schema()) else { return Ok(()) };
    let key = overrides.keys[index].to_string();
    let near = closest(&key, known.iter().map(String::as_str));
    let near = near.map(|near| format!("did you mean `{near}`? ")).unwrap_or_default();
    let known = if known.is_empty() { "none".into() } else { known.join(", ") };
    let message = format!(
        "routes.{}.overrides[{index}] = {key:?}: is not in the settings schema of plugin `{}`; {near}It names {known}",
        route.name,
        plugin.policy.name()
    );
    Err(Failure::input(config.route_error(route, &format!("/overrides/{index}"), message)))
}

/// `a`, but for where its plugin was found.
fn same_table(a: &RouteConfig, b: &RouteConfig) -> bool {
    let a = RouteConfig { plugin: b.plugin.clone(), sha256: b.sha256.clone(), ..a.clone() };
    a == *b
}

impl Prepared {
    /// The same models, with the routes and the waits of `config`, whose models are these. All is checked that a
    /// start would check, but for the models. `makers`: of the engine that is to serve it.
    pub fn with_config(&self, config: Config, makers: Makers) -> Result<Self, Failure> {
        let mut next = Self {
            noise_keys: self.noise_keys.clone(),
            placed: self.placed.clone(),
            directories: self.directories.clone(),
            texts: self.texts.clone(),
            defaults: self.defaults.clone(),
            plugins: Vec::new(),
            plan: self.plan.clone(),
            excluded: Vec::new(),
            infos: self.infos.clone(),
            masked: self.masked.clone(),
            route_nets: Vec::new(),
            nets: Mutex::default(),
            store: self.store.clone(),
            makers,
            config,
        };
        next.find_routes()?;
        next.warn_of_waits();
        next.check_cuda_nets()?;
        next.plan_routers();
        next.check_memory()?;
        Ok(next)
    }

    /// What an engine that serves the routes of `before` is to serve. `renew`: the route of this name is made anew,
    /// changed or not.
    pub fn wanted(&self, before: &Self, renew: impl Fn(&str) -> bool) -> Vec<Wanted> {
        let wanted = |index: usize| {
            let name = &self.config.routes[index].name;
            let known = before.config.routes.iter().position(|route| route.name == *name);
            match known.filter(|&known| self.same_route(index, before, known) && !renew(name)) {
                Some(_) => Wanted::AsServed(name.clone()),
                None => Wanted::New(Box::new(self.route(index))),
            }
        };
        (0..self.config.routes.len()).map(wanted).collect()
    }

    /// What [`Self::wanted`] will come to.
    pub fn changes(&self, before: &Self, renew: impl Fn(&str) -> bool) -> RouteChanges {
        let mut changes = RouteChanges::default();
        let names = |of: &Self| of.config.routes.iter().map(|route| route.name.clone()).collect::<Vec<_>>();
        let (known, left) = (names(before), names(self));
        for wanted in self.wanted(before, renew) {
            match wanted {
                Wanted::AsServed(name) => changes.unchanged.push(name),
                Wanted::New(route) if known.contains(&route.name) => changes.changed.push(route.name),
                Wanted::New(route) => changes.added.push(route.name),
            }
        }
        changes.removed = known.into_iter().filter(|name| !left.contains(name)).collect();
        changes
    }

    /// Whether a route would do the same as one of `other`: by what its files hold, not by their names.
    fn same_route(&self, index: usize, other: &Self, theirs: usize) -> bool {
        same_table(&self.config.routes[index], &other.config.routes[theirs])
            && self.plugins[index].sha256 == other.plugins[theirs].sha256
            && self.excluded[index] == other.excluded[theirs]
            && self.route_nets[index] == other.route_nets[theirs]
    }

    /// Plugins, settings and nets of all routes of the configuration.
    pub(super) fn find_routes(&mut self) -> Result<(), Failure> {
        let config = &self.config;
        let mut loaded = HashMap::new();
        // A plugin joins it when it is loaded, so a panic elsewhere cannot spoil it.
        let mut store = self.store.lock().unwrap_or_else(PoisonError::into_inner);
        let executable = std::env::current_exe().ok();
        let directories = config::plugin_directories(config, executable.as_deref());
        for route in &config.routes {
            self.excluded.push(shared_vocabulary(config, route, &self.texts, &self.infos)?);
            let plugin = with_nets(config, route, plugin(config, route, &directories, &mut loaded, &mut store)?)?;
            validate_settings(plugin.policy.settings_schema(), &route.settings)
                .map_err(|e| Failure::input(config.settings_error(route, &e)))?;
            check_overrides(config, route, &plugin)?;
            self.plugins.push(plugin);
        }
        drop(store);
        for index in 0..self.config.routes.len() {
            let nets = self.check_nets(&self.route(index))?;
            self.route_nets.push(nets);
            self.check_host_nets(index)?;
        }
        Ok(())
    }

    /// Refuse nets that the CUDA devices of their models cannot compute.
    pub(super) fn check_cuda_nets(&self) -> Result<(), Failure> {
        for (index, (model, placed)) in self.config.models.iter().zip(&self.placed).enumerate() {
            if let Device::Cuda(_) = placed.device {
                let checked = self.nets().check_cuda(ModelId(index as u32));
                checked.map_err(|e| {
                    Failure::input(self.config.model_error(model, format!("models.{}: {e}", model.name)))
                })?;
            }
        }
        Ok(())
    }

    /// Waits that do not do what they say.
    pub(super) fn warn_of_waits(&self) {
        let config = &self.config;
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
    }

    /// Refuse what the engine would refuse in `route`, before any weights are loaded.
    pub fn check(&self, route: &RouteSetup) -> Result<(), Failure> {
        self.check_nets(route).map(drop)
    }

    /// [`Self::check`]. Tells what the nets of the route's policies are, model by model.
    fn check_nets(&self, route: &RouteSetup) -> Result<Vec<NetDigest>, Failure> {
        let texts: Vec<Arc<dyn TokenText>> = self.texts.iter().map(|text| text.clone() as Arc<dyn TokenText>).collect();
        let checked = check_route(route, &texts, &self.infos, &mut self.nets(), &self.makers);
        checked.map_err(|error| self.start_failure(&error))
    }

    /// A policy that does not describe its nets itself gets one number of each.
    fn check_host_nets(&self, index: usize) -> Result<(), Failure> {
        let route = &self.config.routes[index];
        let Some(table) = &route.nets else { return Ok(()) };
        let fault = |told: String| nets_fault(&self.config, route, &told);
        for HostNet { net, .. } in nets::written(table).map_err(fault)? {
            if let Some(width) = self.nets().width(&net).filter(|&width| width != 1) {
                return Err(fault(format!(".{}: scores {width} numbers a row; let its last node score 1", net.name)));
            }
        }
        Ok(())
    }

    /// Add the routers of all routes that were checked to the memory plan.
    pub(super) fn plan_routers(&mut self) {
        let nets = self.nets.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (index, (plan, info)) in self.plan.models.iter_mut().zip(&self.infos).enumerate() {
            let model = ModelId(index as u32);
            plan.weight_bytes = info.weight_bytes.saturating_add(nets.weight_bytes(model));
            let hidden = if nets.looks_back(model) { cpu::hidden_page_bytes(info) } else { 0 };
            plan.page_bytes = info.page_bytes + hidden;
        }
    }

    /// All models fit into their devices; else the fault is at the largest pool.
    pub(super) fn check_memory(&self) -> Result<(), Failure> {
        self.plan.check().map_err(|DoesNotFit { message, lower }| {
            Failure::input(match lower.map(|index| &self.config.models[index]) {
                Some(model) => self.config.model_error_at(model, model.pool.map_or("", Pool::key), message),
                None => self.config.error("", message),
            })
        })
    }

    /// Files with the weights of the routers of all routes that were checked, each once.
    pub fn router_weights(&self) -> Vec<PathBuf> {
        self.nets().weights()
    }

    /// Nets join the list only when they are found good, so a panic elsewhere cannot spoil it.
    pub(super) fn nets(&self) -> MutexGuard<'_, CheckedNets> {
        self.nets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn start_failure(&self, error: &StartError) -> Failure {
        start_failure(&self.config, error)
    }
}

/// What is said of an engine that does not start with `config`, or does not take it over.
pub fn start_failure(config: &Config, error: &StartError) -> Failure {
    match error {
        StartError::Policy { route, .. }
        | StartError::Panicked { route, .. }
        | StartError::OtherNets { route, .. }
        | StartError::AtStartOnly { route, .. }
        | StartError::Route { route, .. }
        | StartError::Taken { route } => match config.routes.iter().find(|r| r.name == *route) {
            Some(known) => Failure::input(match error {
                StartError::Policy { message, .. } => config.refused_error(known, message, error.to_string()),
                _ => config.route_error(known, "/settings", error.to_string()),
            }),
            None => Failure::input(error),
        },
        StartError::Hung { .. } => Failure::hung(error),
        StartError::NotTaken { .. }
        | StartError::Stopping
        | StartError::Ladders(_)
        | StartError::Thread { .. }
        | StartError::Delivery { .. }
        | StartError::Watchdog { .. }
        | StartError::Routes { .. }
        | StartError::Tuner { .. } => Failure::work(error),
    }
}
