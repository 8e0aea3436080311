//! The engine: loaded models, each with its sub-server and thread, and the routes over them.

mod at_model;
mod checked;
mod counts;
mod deliver;
mod errors;
mod faults;
mod keeper;
mod nets;
mod patience;
mod reload;
mod routes;
mod shared;
mod stream;
mod table;
mod tuning;
mod variants;
mod watch;
mod workshop;

use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use at_model::AtModel;
pub use checked::CheckedNets;
use counts::Progress;
pub use counts::{Ended, RouteCounts, Share};
pub use errors::{StartError, SubmitError};
pub use keeper::RouteState;
use keeper::{Keeper, Registry, Upkeep};
pub use patience::Makers;
pub use reload::{KnownRoute, RouteChanges, Wanted};
pub use routes::check_route;
use routes::{Loader, ModelPlace, attach, describe, policy_fault};
use shared::{Live, Shared};
use stream::Behind;
pub use stream::RequestStream;
pub use table::{Routes, ServedRoute, VariantOf};
use tokenrouter_plugin_api::net;
use tokio::sync::mpsc::unbounded_channel;
pub use variants::{OverrideError, OwnSettings, VariantError};
use workshop::{PATIENCE, Workshop};

use crate::online::{self, Pace};
use crate::plain::short;
use crate::policy::PolicyFactory;
use crate::policy::monitor::{ByHook, Hook, Hung, Monitors, Names};
use crate::policy::overrides::Overrides;
use crate::request::{
    ModelDown, ModelId, NewRequest, RequestError, RequestId, RequestSpec, RouteDisabled, RouteId, TokenId,
};
use crate::runner::{ModelInfo, Runner};
use crate::subserver::coordinator::{Coordinator, Waiting};
use crate::subserver::counts::StepCounts;
use crate::subserver::gate::Schedule;
use crate::subserver::observe::Observer;
use crate::subserver::pacer::Pacer;
use crate::subserver::worker::{self, Board, Snapshot};
use crate::subserver::{Attachment, Limits, Message, PagePool, SubServer, pages_for};

/// What a policy may ask about text, per model.
pub trait TokenText: Send + Sync {
    /// The bytes that a token stands for; `None` for an id outside the vocabulary.
    fn token_bytes(&self, id: TokenId) -> Option<Vec<u8>>;
    /// The id of the token whose text is exactly `text`.
    fn token_id(&self, text: &str) -> Option<TokenId>;
}

/// A model to serve.
pub struct ModelSetup {
    pub runner: Box<dyn Runner>,
    pub text: Arc<dyn TokenText>,
    /// Requests needed before a forward starts, indexed by active requests less one; the last entry
    /// serves all beyond. Never empty.
    pub min_batch: Vec<u32>,
    /// Longest wait under any schedule; the gate then opens anyway.
    pub max_wait: Duration,
    /// Wait for other models of its routes that end within this time; zero for not at all.
    pub hold: Duration,
    /// Most rows of one forward.
    pub max_rows: usize,
    /// Most prompt rows of one request in one forward.
    pub prefill_chunk: usize,
    /// Whether it keeps K/V for later requests that begin with the same tokens.
    pub prefix_cache: bool,
    /// Tokens that it never samples.
    pub masked: Vec<TokenId>,
}

/// What follows when a policy instance fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// Its requests go on at the model they are at.
    #[default]
    StayLocal,
    /// Its requests fail.
    FailRequest,
    /// Its requests go on at the model they are at, and the route takes no new ones.
    DisableRoute,
}

/// A route to serve.
#[derive(Clone)]
pub struct RouteSetup {
    pub name: String,
    /// Models of the route with their roles, in the policy's order.
    pub models: Vec<(ModelId, String)>,
    /// Where new requests start: an index into `models`.
    pub entry: usize,
    pub policy: Arc<dyn PolicyFactory>,
    /// Settings as JSON, already checked against the policy's schema.
    pub settings: String,
    /// What requests may set of them.
    pub overrides: Overrides,
    pub on_error: OnError,
    /// Wall time that a call of the policy may take; more is counted, and told if it goes on.
    pub budget: Duration,
    /// Tokens that not every model of the route knows by the same text; ascending.
    pub excluded: Vec<TokenId>,
    /// Where relative paths of router weights start.
    pub directory: PathBuf,
}

/// A route being served.
#[derive(Clone, Debug)]
pub struct RouteInfo {
    pub name: String,
    /// Models with their roles, in the policy's order.
    pub models: Vec<(ModelId, String)>,
    /// Where new requests start: an index into `models`.
    pub entry: usize,
    /// Name of the policy; `None` for a bare model.
    pub policy: Option<String>,
    /// Of the policy's file: its version, and its SHA-256 in hexadecimal. `None` for one without a file.
    pub version: Option<String>,
    pub sha256: Option<String>,
    /// Most tokens of a request, prompt and answer together: the smallest context of the models.
    pub context: u32,
    /// Token ids that every model of the route has lie below this.
    pub vocab_size: u32,
    /// What requests may set of its policy's settings.
    pub overrides: Overrides,
    /// It is another route with these settings, and counts under its name.
    pub variant: Option<VariantOf>,
    disabled: Arc<OnceLock<RouteDisabled>>,
    /// An instance of its policy has failed and is not called again.
    failed: Arc<AtomicBool>,
}

impl RouteInfo {
    /// Why it takes no new requests, if so.
    pub fn disabled(&self) -> Option<&RouteDisabled> {
        self.disabled.get()
    }

    /// Whether its policy has failed at some model, where it is not called again.
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Its name, with its settings where others have the name as well: for the log alone.
    fn title(&self) -> String {
        match &self.variant {
            None => self.name.clone(),
            Some(VariantOf { settings, .. }) => format!("{} with settings {}", self.name, short(settings)),
        }
    }
}

/// Loaded models at work. Dropping it ends their threads; requests that still run fail.
pub struct Engine {
    shared: Arc<Shared>,
    boards: Vec<Arc<Board>>,
    /// They end with the model's runner, or with `None` if the model went down.
    threads: Vec<JoinHandle<Option<Box<dyn Runner>>>>,
    /// Ends with the last model's thread.
    delivery: Option<JoinHandle<()>>,
    keeper: Option<Keeper>,
    /// Of changes of routes, and of variants.
    workshop: Workshop,
    /// Held while routes change.
    changing: Mutex<()>,
    tuner: Option<online::Thread>,
    /// By model.
    pools: Vec<PagePool>,
    monitors: Arc<Monitors>,
    /// Looks after all hooks until the last model's thread has ended.
    watchdog: Option<watch::Thread>,
    next_id: AtomicU64,
}

impl Engine {
    /// Start a thread for each model. `routes` come first in the list of routes, then one for each
    /// model alone, under the model's name.
    pub fn start(models: Vec<ModelSetup>, routes: Vec<RouteSetup>) -> Result<Self, StartError> {
        Self::start_observed(models, routes, Schedule::default(), None)
    }

    /// [`Engine::start`] with a schedule, and with somebody who is told of every request.
    pub fn start_observed(
        mut models: Vec<ModelSetup>,
        routes: Vec<RouteSetup>,
        schedule: Schedule,
        observer: Option<Arc<dyn Observer>>,
    ) -> Result<Self, StartError> {
        let infos: Vec<ModelInfo> = models.iter().map(|m| m.runner.info().clone()).collect();
        models.iter_mut().for_each(|model| model.runner.forget_nets());
        let place = |model: &ModelSetup| ModelPlace {
            text: model.text.clone(),
            masked: model.masked.clone(),
            net_maker: model.runner.net_maker(),
        };
        let places: Vec<ModelPlace> = models.iter().map(place).collect();
        let (upkeep, work) = crossbeam_channel::unbounded();
        let mut registry = Registry::default();
        let mut attachments: Vec<Vec<Option<Attachment>>> = infos.iter().map(|_| Vec::new()).collect();
        let mut served = Vec::new();
        let routes: Vec<Arc<RouteSetup>> = routes.into_iter().map(Arc::new).collect();
        let mut loader = Loader::default();
        let starting = Makers::default();
        let monitors = starting.monitors.clone();
        for route in &routes {
            let entered = registry.enter(describe(route, &infos)?, Some(route), &upkeep);
            for (index, of_model) in attachments.iter_mut().enumerate() {
                let (model, info, runner) = (ModelId(index as u32), &infos[index], &mut models[index].runner);
                let stays = places[index].net_maker.is_none();
                let fault = policy_fault(route, info);
                let mut load = |net: &net::Net| {
                    let (digest, loaded) = loader.read(route, net, model, info).map_err(&fault)?;
                    if let Some(id) = registry.claim(entered.id, model, net, &digest) {
                        return Ok(id);
                    }
                    let loaded = loaded.ok_or_else(|| fault("its runner lost it".into()))?;
                    let id = runner.load_net(loaded).map_err(|e| fault(e.to_string()))?;
                    registry.enter_loaded(entered.id, model, net, (digest, id), stays);
                    Ok(id)
                };
                of_model.push(attach(route, model, &places[index], &infos, &mut load, &starting)?);
            }
            served.push(entered);
        }
        for (index, info) in infos.iter().enumerate() {
            let id = ModelId(index as u32);
            let alone = RouteInfo {
                name: info.name.clone(),
                models: vec![(id, info.name.clone())],
                entry: 0,
                policy: None,
                version: None,
                sha256: None,
                context: info.context,
                vocab_size: info.vocab_size,
                overrides: Overrides::default(),
                variant: None,
                disabled: Arc::default(),
                failed: Arc::default(),
            };
            served.push(registry.enter(alone, None, &upkeep));
            for (other, of_model) in attachments.iter_mut().enumerate() {
                let alone =
                    || Attachment::new(&info.name, None, vec![id], 0, OnError::default(), &models[other].masked);
                of_model.push((other == index).then(alone));
            }
        }
        if let Some(twice) = served.iter().enumerate().find(|(i, r)| served[..*i].iter().any(|o| o.name == r.name)) {
            return Err(StartError::Taken { route: twice.1.name.clone() });
        }
        registry.serve(&served);
        let (inboxes, receivers): (Vec<_>, Vec<_>) = infos.iter().map(|_| crossbeam_channel::unbounded()).unzip();
        let waiting = |m: &ModelSetup| Waiting { min_batch: m.min_batch.clone(), max_wait: m.max_wait, hold: m.hold };
        let members: Vec<Vec<ModelId>> = served.iter().map(|r| r.models.iter().map(|&(m, _)| m).collect()).collect();
        let waiting = models.iter().map(waiting).collect();
        let coordinator = Coordinator::new(schedule, waiting, members.iter().map(|members| &members[..]));
        let shared = Arc::new(Shared {
            down: infos.iter().map(|_| OnceLock::new()).collect(),
            models: infos,
            places,
            table: ArcSwap::from_pointee(Routes(served)),
            registry: Mutex::new(registry),
            upkeep,
            inboxes,
            coordinator: Arc::new(coordinator),
            live: Mutex::default(),
            stopping: AtomicBool::new(false),
            observer,
            paces: OnceLock::new(),
            faults: Default::default(),
        });
        let zero = Instant::now();
        let boards: Vec<Arc<Board>> = models.iter().map(|_| Arc::default()).collect();
        let (events, delivery) = deliver::start(shared.clone())?;
        // Ends the threads already running when a later one cannot be started.
        let mut engine = Self {
            shared: shared.clone(),
            boards,
            threads: Vec::new(),
            delivery: Some(delivery),
            keeper: None,
            pools: Vec::new(),
            changing: Mutex::default(),
            tuner: None,
            watchdog: Some(watch::start(monitors.clone())?),
            workshop: Workshop { shared: shared.clone(), makers: Makers::watched(monitors.clone(), PATIENCE) },
            monitors,
            next_id: AtomicU64::new(1),
        };
        // Dropped before the engine, which waits for the end of the delivery.
        let events = events;
        engine.keeper = Some(keeper::start(shared.clone(), work)?);
        for (index, ((setup, inbox), routes)) in models.into_iter().zip(receivers).zip(attachments).enumerate() {
            let model = ModelId(index as u32);
            let limits = Limits { max_rows: setup.max_rows, prefill_chunk: setup.prefill_chunk };
            let mut server = SubServer::new(model, setup.runner, routes, limits)
                .with_prefix_cache(setup.prefix_cache)
                .observed(shared.observer.clone());
            engine.pools.push(server.pool().clone());
            let at = AtModel { shared: shared.clone(), model, events: events.clone() };
            let board = engine.boards[index].clone();
            let name = shared.models[index].name.clone();
            let pacer = Pacer::new(shared.coordinator.clone(), model);
            let body = move || {
                let run = AssertUnwindSafe(|| worker::run(&mut server, &inbox, &at, &board, pacer, zero));
                let panicked = catch_unwind(run).is_err();
                if panicked {
                    // From here on nothing can be sent to it.
                    drop(inbox);
                    board.clear();
                    at.model_panicked();
                }
                let (runner, routes) = server.into_parts();
                // A policy may block in its drop.
                let _ = at.shared.upkeep.send(Upkeep::Left(routes));
                runner.filter(|_| !panicked)
            };
            let thread = std::thread::Builder::new().name(format!("model-{name}")).spawn(body);
            engine.threads.push(thread.map_err(|e| StartError::Thread { model: name, message: e.to_string() })?);
        }
        Ok(engine)
    }

    /// Models, indexed by [`ModelId`].
    pub fn models(&self) -> &[ModelInfo] {
        &self.shared.models
    }

    /// The routes that take requests now; every bare model is one.
    pub fn routes(&self) -> Arc<Routes> {
        self.shared.table.load_full()
    }

    /// The newest route of this name. Whoever prepares a request should hold it until the request is submitted.
    pub fn route(&self, name: &str) -> Option<Arc<ServedRoute>> {
        self.shared.table.load().named(name).cloned()
    }

    /// The id of the newest route of this name.
    pub fn find_route(&self, name: &str) -> Option<RouteId> {
        self.route(name).map(|route| route.id)
    }

    /// Every model works and the engine takes requests.
    pub fn is_ready(&self) -> bool {
        !self.shared.stopping.load(Ordering::Acquire) && self.down_models().next().is_none()
    }

    /// The models that can compute nothing any more.
    pub fn down_models(&self) -> impl Iterator<Item = &ModelDown> {
        self.shared.down.iter().filter_map(OnceLock::get)
    }

    /// What policies have done since the start.
    pub fn policy_counts(&self) -> BTreeMap<Names, ByHook> {
        self.monitors.counts()
    }

    /// Hooks that have run for a second or more, have not come back, and hold their model up.
    pub fn hung_hooks(&self) -> Vec<Hung> {
        self.monitors.hung().into_iter().filter(|hung| hung.hook.holds_model()).collect()
    }

    /// End the process when a hook has run for longer than `limit`.
    pub fn abort_on_hung_plugin(&self, limit: Duration) {
        self.monitors.abort_after(limit);
    }

    /// Requests that have neither ended nor been cancelled.
    pub fn live_requests(&self) -> usize {
        self.shared.coordinator.live()
    }

    /// What requests came to, by the name of their route.
    pub fn route_counts(&self) -> BTreeMap<String, Arc<RouteCounts>> {
        self.shared.registry().counts()
    }

    /// What a model's thread counts of its steps.
    pub fn step_counts(&self, model: ModelId) -> &StepCounts {
        self.shared.coordinator.counts(model)
    }

    /// By name of the route: live requests that a step has computed something of, and those that wait for that.
    pub fn running_and_waiting(&self) -> HashMap<String, (usize, usize)> {
        let mut all: HashMap<String, (usize, usize)> = HashMap::new();
        let live = self.shared.live();
        for Live { route, progress, .. } in live.values() {
            let place = match all.get_mut(&route.name) {
                Some(place) => place,
                None => all.entry(route.name.clone()).or_default(),
            };
            match progress.has_begun() {
                true => place.0 += 1,
                false => place.1 += 1,
            }
        }
        all
    }

    /// State of a model, as of its last step.
    pub fn snapshot(&self, model: ModelId) -> Snapshot {
        self.boards[model.index()].read()
    }

    /// Find none of the K/V any more that is kept for later requests. Requests that use some of it keep it.
    pub fn flush_prefix_caches(&self) {
        self.pools.iter().for_each(PagePool::forget_cached);
    }

    /// Take no more requests; those that run go on.
    pub fn stop_accepting(&self) {
        self.shared.stopping.store(true, Ordering::Release);
    }

    /// Break off every request: each fails with [`RequestError::ShuttingDown`].
    pub fn fail_all(&self) {
        let ids: Vec<RequestId> = self.shared.live().keys().copied().collect();
        for id in ids {
            self.shared.fail(id, RequestError::ShuttingDown);
        }
    }

    /// Check a request without submitting it.
    pub fn check(&self, new: &NewRequest) -> Result<(), SubmitError> {
        let route = self.shared.route(new.route).ok_or(SubmitError::NoRoute)?;
        self.check_at(new, &route)
    }

    fn check_at(&self, new: &NewRequest, route: &RouteInfo) -> Result<(), SubmitError> {
        let (prompt, max_tokens) = (new.prompt.len(), new.max_tokens);
        if prompt == 0 {
            return Err(SubmitError::EmptyPrompt);
        }
        let total = prompt as u64 + u64::from(max_tokens);
        if total > u64::from(route.context) {
            return Err(SubmitError::ContextLength { context: route.context, prompt, max_tokens });
        }
        if let Some(&token) = new.prompt.iter().find(|&&t| t >= route.vocab_size) {
            return Err(SubmitError::TokenOutOfRange { token, vocab: route.vocab_size });
        }
        let needed = pages_for(total as usize);
        for &(model, _) in &route.models {
            let info = &self.models()[model.index()];
            if needed > info.pages as usize {
                let model = info.name.clone();
                return Err(SubmitError::Pool { model, prompt, max_tokens, needed, pages: info.pages });
            }
        }
        Ok(())
    }

    /// A model of the route that is down.
    fn down(&self, route: &RouteInfo) -> Option<ModelDown> {
        let mut models = route.models.iter();
        models.find_map(|(model, _)| self.shared.down[model.index()].get()).cloned()
    }

    /// Submit a request. Its events come in the stream; dropping the stream cancels it everywhere.
    pub fn submit(&self, new: NewRequest) -> Result<RequestStream, SubmitError> {
        let route = self.shared.route(new.route).ok_or(SubmitError::NoRoute)?;
        self.check_at(&new, &route)?;
        if self.shared.stopping.load(Ordering::Acquire) {
            return Err(SubmitError::ShuttingDown);
        }
        if let Some(down) = self.down(&route) {
            return Err(down.into());
        }
        if let Some(disabled) = route.disabled() {
            return Err(disabled.clone().into());
        }
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (entry, _) = route.models[route.entry];
        let (events, receiver) = unbounded_channel();
        // Before anybody can end it.
        if let Some(observer) = &self.shared.observer {
            observer.submitted(id, &new);
        }
        let (spec, now) = (Arc::new(RequestSpec::new(id, new)), Instant::now());
        {
            let mut live = self.shared.live();
            let progress = Progress::new(spec.clone(), now);
            live.insert(id, Live { route: route.clone(), events, pace: Pace::new(now), progress });
            self.shared.coordinator.set_live(live.len());
        }
        self.shared.post(entry, Message::Submit(spec.clone()));
        self.shared.look_again();
        // A model that went down since the check above may have missed this request.
        if let Some(down) = self.down(&route) {
            self.shared.fail(id, down.into());
        }
        let behind = Some(Behind { shared: self.shared.clone(), spec, ended: Ended::Abort });
        Ok(RequestStream { id, events: receiver, behind })
    }

    /// End as dropping does, and give the runners back, by model, for another engine. `None` for a model
    /// that went down.
    pub fn stop(mut self) -> Vec<Option<Box<dyn Runner>>> {
        self.end()
    }

    fn end(&mut self) -> Vec<Option<Box<dyn Runner>>> {
        self.stop_accepting();
        self.tuner = None;
        self.shared.inboxes.iter().for_each(|inbox| drop(inbox.send(vec![Message::Shutdown])));
        let threads = std::mem::take(&mut self.threads);
        // A panic has been reported by the hook and by `model_panicked`.
        let ended = |(model, thread): (usize, JoinHandle<_>)| {
            let name = &self.shared.models[model].name;
            watch::join(thread, || self.hung_hooks().iter().any(|hung| hung.names.model == *name)).flatten()
        };
        let runners: Vec<_> = threads.into_iter().enumerate().map(ended).collect();
        // What they had to tell is told. A thread that hangs may have more, some day.
        if let Some(delivery) = self.delivery.take() {
            let _ = watch::join(delivery, || !self.hung_hooks().is_empty());
        }
        if let Some(keeper) = self.keeper.take() {
            let _ = self.shared.upkeep.send(Upkeep::Stop);
            let _ = keeper.routes.join();
            let dropping = |hung: &Hung| hung.hook == Hook::Drop;
            let _ = watch::join(keeper.drops, || self.monitors.hung().iter().any(dropping));
        }
        self.watchdog = None;
        // A hand-off may have been under way to a model that had already ended.
        self.fail_all();
        runners
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests;
