//! Routes on their way out: who still has to forget them, and threads that see to it and drop what they leave behind.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, unbounded};
use tokenrouter_plugin_api::net::Net;

use super::counts::{Counted, RouteCounts};
use super::nets::NetTable;
use super::shared::Shared;
use super::table::ServedRoute;
use super::variants::Variants;
use super::{RouteInfo, RouteSetup, StartError};
use crate::request::{ModelId, RouteId};
use crate::runner::net::{NetDigest, NetId};
use crate::subserver::{Attachment, Detached, Message};

/// What the keeper is told.
pub(super) enum Upkeep {
    /// Nobody holds the route any more.
    Ended(RouteId),
    /// A model has forgotten a route.
    Detached(ModelId, Box<Detached>),
    /// The thread of a model has ended: it forgets nothing any more.
    ModelGone(ModelId),
    /// What a model had as its thread ended, or would have had by a change that failed.
    Left(Vec<Attachment>),
    Stop,
}

/// What becomes of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteState {
    /// It is being made; nobody can ask for it yet.
    Preparing,
    /// It takes requests.
    Serving,
    /// Its last requests are under way, or its models are about to forget it.
    Draining,
}

/// A net that a route names.
struct Named {
    model: ModelId,
    id: NetId,
    net: Net,
}

struct Entry {
    id: RouteId,
    info: Arc<RouteInfo>,
    route: Weak<ServedRoute>,
    state: RouteState,
    /// One for each time that it names one.
    nets: Vec<Named>,
    /// Its models have been told to forget it; these have not done so yet.
    ended: bool,
    forgetting: Vec<ModelId>,
}

/// All routes that some model knows.
#[derive(Default)]
pub(super) struct Registry {
    next: u32,
    /// Ascending by id.
    entries: Vec<Entry>,
    nets: NetTable,
    /// By name of the route. What has been counted stays when a route goes: operators choose the names.
    counts: BTreeMap<String, Arc<RouteCounts>>,
}

impl Registry {
    /// A new route, which ends when the last one who holds it lets go.
    /// `setup`: what it is made by; a bare model has none.
    pub fn enter(
        &mut self,
        info: RouteInfo,
        setup: Option<&Arc<RouteSetup>>,
        upkeep: &Sender<Upkeep>,
    ) -> Arc<ServedRoute> {
        let (id, info) = (RouteId(self.next), Arc::new(info));
        self.next += 1;
        let counts = self.counts.entry(info.name.clone()).or_default().clone();
        let counted = Counted::new(counts, &info);
        let variants = setup.map(Variants::new).unwrap_or_default();
        let route = Arc::new(ServedRoute::new(id, info.clone(), counted, variants, upkeep.clone()));
        self.entries.push(Entry {
            id,
            info,
            route: Arc::downgrade(&route),
            state: RouteState::Preparing,
            nets: Vec::new(),
            ended: false,
            forgetting: Vec::new(),
        });
        route
    }

    fn entry(&mut self, id: RouteId) -> Option<&mut Entry> {
        let place = self.entries.binary_search_by_key(&id, |entry| entry.id).ok()?;
        self.entries.get_mut(place)
    }

    /// `route` names a net that the runner of `model` holds.
    pub fn claim(&mut self, route: RouteId, model: ModelId, net: &Net, digest: &NetDigest) -> Option<NetId> {
        let id = self.nets.claim(model, digest)?;
        self.uses(route, model, net, id);
        Some(id)
    }

    /// `route` names a net that `of`, which is held, names as well.
    pub fn share_net(&mut self, of: RouteId, route: RouteId, model: ModelId, net: &Net) -> Option<NetId> {
        let same = |named: &&Named| named.model == model && named.net == *net;
        let id = self.entry(of)?.nets.iter().find(same)?.id;
        self.nets.use_again(model, id)?;
        self.uses(route, model, net, id);
        Some(id)
    }

    /// `route` names a net that the runner of `model` is to take between two forwards.
    pub fn enter_net(&mut self, route: RouteId, model: ModelId, net: &Net, digest: NetDigest) -> NetId {
        let id = self.nets.free_id(model);
        self.enter_loaded(route, model, net, (digest, id), false);
        id
    }

    /// `route` names a net that the runner of `model` has taken as `id`.
    pub fn enter_loaded(
        &mut self,
        route: RouteId,
        model: ModelId,
        net: &Net,
        (digest, id): (NetDigest, NetId),
        stays: bool,
    ) {
        self.nets.enter(model, digest, id, stays);
        self.uses(route, model, net, id);
    }

    fn uses(&mut self, route: RouteId, model: ModelId, net: &Net, id: NetId) {
        if let Some(entry) = self.entry(route) {
            entry.nets.push(Named { model, id, net: net.clone() });
        }
    }

    /// These routes take requests from now on, with their variants, and no others.
    pub fn serve(&mut self, routes: &[Arc<ServedRoute>]) {
        for entry in &mut self.entries {
            let id = entry.info.variant.as_ref().map_or(entry.id, |variant| variant.of);
            match (routes.iter().any(|route| route.id == id), entry.state) {
                (true, RouteState::Preparing) if id != entry.id => {}
                // It makes place for another.
                (true, RouteState::Draining) if entry.ended => {}
                (true, _) => entry.state = RouteState::Serving,
                (false, RouteState::Serving) => entry.state = RouteState::Draining,
                (false, _) => {}
            }
        }
    }

    /// A variant of `of` has been made. It takes requests as long as that does.
    pub fn serve_variant(&mut self, of: RouteId, id: RouteId) {
        let serving = self.entry(of).is_some_and(|of| of.state == RouteState::Serving);
        if let Some(entry) = self.entry(id) {
            entry.state = if serving { RouteState::Serving } else { RouteState::Draining };
        }
    }

    pub fn held(&mut self, id: RouteId) -> Option<Arc<ServedRoute>> {
        self.entry(id)?.route.upgrade()
    }

    pub fn info(&mut self, id: RouteId) -> Option<Arc<RouteInfo>> {
        Some(self.entry(id)?.info.clone())
    }

    pub fn counts(&self) -> BTreeMap<String, Arc<RouteCounts>> {
        self.counts.clone()
    }

    /// How many nets the runner of `model` holds.
    pub fn nets(&self, model: ModelId) -> usize {
        self.nets.count(model)
    }

    pub fn states(&self) -> impl Iterator<Item = (RouteId, Arc<RouteInfo>, RouteState)> {
        self.entries.iter().map(|entry| (entry.id, entry.info.clone(), entry.state))
    }

    fn forgotten(&mut self, id: RouteId, model: ModelId) {
        if let Some(entry) = self.entry(id) {
            entry.forgetting.retain(|&other| other != model);
        }
        self.clean();
    }

    /// Forget the routes that no model knows any more.
    fn clean(&mut self) {
        self.entries.retain(|entry| !entry.ended || !entry.forgetting.is_empty());
    }
}

impl Shared {
    /// The registry is whole between any two operations, so a panic elsewhere cannot spoil it.
    pub(super) fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tell the models of an ended route to forget it. Nothing if they have been told.
    pub(super) fn end_route(&self, id: RouteId) {
        let mut registry = self.registry();
        let Some(entry) = registry.entry(id).filter(|entry| !entry.ended) else { return };
        entry.state = RouteState::Draining;
        let (nets, models) = (std::mem::take(&mut entry.nets), entry.info.models.clone());
        let mut forgetting = Vec::new();
        for (model, _) in models {
            let named: Vec<NetId> = nets.iter().filter(|named| named.model == model).map(|named| named.id).collect();
            let unused = registry.nets.release(model, &named);
            // A model whose thread has ended knows nothing.
            if self.inboxes[model.index()].send(vec![Message::Detach(id, unused)]).is_ok() {
                forgetting.push(model);
            }
        }
        if let Some(entry) = registry.entry(id) {
            (entry.ended, entry.forgetting) = (true, forgetting);
        }
        registry.clean();
    }

    /// Which models may hand requests to which.
    pub(super) fn tell_coordinator(&self) {
        let registry = self.registry();
        let members = |entry: &Entry| entry.info.models.iter().map(|&(model, _)| model).collect::<Vec<_>>();
        let members: Vec<Vec<ModelId>> = registry.entries.iter().map(members).collect();
        self.coordinator.set_routes(members.iter().map(|members| &members[..]));
    }
}

/// The threads that keep house until told to stop.
pub(super) struct Keeper {
    pub routes: JoinHandle<()>,
    /// Drops policies and nets until `routes` has ended. Apart from it, for a policy may block there.
    pub drops: JoinHandle<()>,
}

pub(super) fn start(shared: Arc<Shared>, work: Receiver<Upkeep>) -> Result<Keeper, StartError> {
    let (left, leavings) = unbounded::<Box<dyn Send>>();
    let drops = spawn("drops", move || {
        for leaving in leavings {
            if catch_unwind(AssertUnwindSafe(|| drop(leaving))).is_err() {
                tracing::error!("a policy panicked as it was dropped");
            }
        }
    })?;
    let body = move || {
        for work in work {
            match work {
                Upkeep::Ended(id) => shared.end_route(id),
                Upkeep::Detached(model, detached) => {
                    let mut registry = shared.registry();
                    registry.nets.gave_up(model, &detached.nets);
                    registry.forgotten(detached.route, model);
                    drop(registry);
                    shared.tell_coordinator();
                    // Its thread ends after this one.
                    let _ = left.send(detached);
                }
                Upkeep::ModelGone(model) => {
                    let mut registry = shared.registry();
                    registry.entries.iter_mut().for_each(|entry| entry.forgetting.retain(|&other| other != model));
                    registry.clean();
                }
                Upkeep::Left(routes) => {
                    routes.into_iter().for_each(|route| drop(left.send(Box::new(route))));
                }
                Upkeep::Stop => return,
            }
        }
    };
    Ok(Keeper { routes: spawn("routes", body)?, drops })
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, StartError> {
    let thread = std::thread::Builder::new().name(name.into()).spawn(body);
    thread.map_err(|e| StartError::Routes { message: e.to_string() })
}
