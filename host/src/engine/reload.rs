//! Other routes for an engine at work. New ones are made whole beside the old before anything changes.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};
use serde::Serialize;

use super::keeper::RouteState;
use super::routes::{Loader, attach, describe, policy_fault};
use super::table::{Routes, ServedRoute};
use super::{Engine, Makers, RouteInfo, RouteSetup, Shared, StartError};
use crate::request::{ModelId, RouteId};
use crate::runner::net::{NetId, ReadyNet};
use crate::subserver::coordinator::Ladders;
use crate::subserver::{Attach, Message};

/// A model comes to its inbox after each step. One that has not for so long hangs, and so does a policy that is not
/// made by then.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// How often a model that is waited for is looked at.
const LOOK: Duration = Duration::from_millis(50);

/// A route that is to be served.
pub enum Wanted {
    /// The one that has this name now.
    AsServed(String),
    /// In place of the one that has its name, if there is one.
    New(Box<RouteSetup>),
}

/// What a change of routes came to, by name. Bare models stay and are not listed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RouteChanges {
    pub added: Vec<String>,
    pub changed: Vec<String>,
    pub removed: Vec<String>,
    pub unchanged: Vec<String>,
}

/// A route that some model knows.
#[derive(Clone, Debug)]
pub struct KnownRoute {
    pub id: RouteId,
    pub info: Arc<RouteInfo>,
    pub state: RouteState,
    /// Live ones.
    pub requests: usize,
}

/// What a route brings to one of its models.
struct Brought {
    model: ModelId,
    attach: Attach,
    done: Receiver<Result<(), String>>,
}

/// A change that is being made. Dropped before it is whole, it is undone: the next change must not take over nets
/// that a model may never have got.
struct Change<'a> {
    shared: &'a Shared,
    loader: Loader,
    brought: Vec<Brought>,
    entered: Vec<RouteId>,
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        self.entered.drain(..).for_each(|route| self.shared.end_route(route));
    }
}

impl Engine {
    /// Serve `wanted` and the bare models, in this order, in place of the present routes: all of it or, with
    /// the error, nothing. Requests accepted before finish under the policies that they began with; what
    /// belongs to routes that are no longer served goes with their last request. One change at a time: others
    /// wait. Policies are made and nets loaded on the caller's thread.
    pub fn set_routes(&self, wanted: Vec<Wanted>) -> Result<RouteChanges, StartError> {
        self.set_routes_and_ladders(wanted, None)
    }

    /// [`Self::set_routes`] and, where there are some, other ladders: both or neither.
    pub fn set_routes_and_ladders(
        &self,
        wanted: Vec<Wanted>,
        ladders: Option<Ladders>,
    ) -> Result<RouteChanges, StartError> {
        // Behind the routes nothing may fail.
        ladders.as_ref().map_or(Ok(()), |ladders| self.check_ladders(ladders))?;
        // Nothing is half done where a panic may come from.
        let _turn = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = &self.shared;
        if shared.stopping.load(Ordering::Acquire) {
            return Err(StartError::Stopping);
        }
        let before = shared.table.load_full();
        let (alone, routed): (Vec<_>, Vec<_>) = before.iter().cloned().partition(|route| route.policy.is_none());
        let mut changes = RouteChanges::default();
        let mut served: Vec<Arc<ServedRoute>> = Vec::new();
        let mut change = Change { shared, loader: Loader::default(), brought: Vec::new(), entered: Vec::new() };
        for wanted in wanted {
            let route = match wanted {
                Wanted::AsServed(name) => {
                    let route = routed.iter().find(|route| route.name == name).cloned();
                    let message = || "it is not served, so it cannot be kept".into();
                    let route = route.ok_or_else(|| StartError::Route { route: name.clone(), message: message() })?;
                    changes.unchanged.push(name);
                    route
                }
                Wanted::New(setup) => {
                    let known = routed.iter().any(|route| route.name == setup.name);
                    if known { &mut changes.changed } else { &mut changes.added }.push(setup.name.clone());
                    self.bring(&setup, &mut change)?
                }
            };
            if let Some(twice) = served.iter().chain(&alone).find(|other| other.name == route.name) {
                return Err(StartError::Taken { route: twice.name.clone() });
            }
            served.push(route);
        }
        let kept = |route: &Arc<ServedRoute>| served.iter().any(|other| other.name == route.name);
        changes.removed = routed.iter().filter(|route| !kept(route)).map(|route| route.name.clone()).collect();
        served.extend(alone);
        self.attach_all(std::mem::take(&mut change.brought))?;
        change.entered.clear();
        for new in &served {
            if let Some(old) = routed.iter().find(|old| old.name == new.name && old.id != new.id) {
                shared.observe(|observer| observer.replaced(old.id, new.id));
            }
        }
        shared.tell_coordinator();
        let mut registry = shared.registry();
        registry.serve(&served);
        shared.table.store(Arc::new(Routes(served)));
        drop(registry);
        ladders.map_or(Ok(()), |ladders| self.set_ladders(ladders))?;
        Ok(changes)
    }

    /// Make `setup` at all its models.
    fn bring(&self, setup: &RouteSetup, change: &mut Change<'_>) -> Result<Arc<ServedRoute>, StartError> {
        let Change { shared, loader, brought, entered } = change;
        for &(model, _) in &setup.models {
            self.refuse_hung(&setup.name, model)?;
        }
        let route = shared.registry().enter(describe(setup, &shared.models)?, &shared.upkeep);
        entered.push(route.id);
        for &(model, _) in &setup.models {
            let place = &shared.places[model.index()];
            let mut nets: Vec<(NetId, ReadyNet)> = Vec::new();
            let info = &shared.models[model.index()];
            let attachment = attach(
                setup,
                model,
                place,
                &shared.models,
                &mut |net| {
                    let (digest, loaded) = loader.read(setup, net, model, info).map_err(policy_fault(setup, info))?;
                    let held = shared.registry().claim(route.id, model, &digest);
                    if let Some(id) = held {
                        return Ok(id);
                    }
                    let refused = |why| StartError::AtStartOnly {
                        route: setup.name.clone(),
                        model: info.name.clone(),
                        message: format!("net `{}`: {why}", net.name),
                    };
                    let make = place.net_maker;
                    let make =
                        make.ok_or_else(|| refused("the model's runner takes router networks at its start alone"))?;
                    // Whoever read it for this change holds it until the change is over.
                    let ready = make(loaded.ok_or_else(|| refused("it was given up while it was needed"))?);
                    let id = shared.registry().enter_net(route.id, model, digest);
                    nets.push((id, ready));
                    Ok(id)
                },
                &self.makers,
            )?;
            if let Some(attachment) = attachment {
                let (sender, done) = bounded(1);
                let attach = Attach { route: route.id, attachment, nets, done: sender };
                brought.push(Brought { model, attach, done });
            }
        }
        Ok(route)
    }

    /// Have every model take what is its own.
    fn attach_all(&self, brought: Vec<Brought>) -> Result<(), StartError> {
        let mut awaited = Vec::new();
        for Brought { model, attach, done } in brought {
            let route = attach.attachment.name.clone();
            self.shared.post(model, Message::Attach(Box::new(attach)));
            awaited.push((route, model, done));
        }
        for (route, model, done) in awaited {
            let end = Instant::now() + PATIENCE;
            let answer = loop {
                match done.recv_deadline(end.min(Instant::now() + LOOK)) {
                    Err(RecvTimeoutError::Timeout) if Instant::now() < end => self.refuse_hung(&route, model)?,
                    answer => break answer,
                }
            };
            let message = match answer {
                // A model whose thread has ended fails what needs it, whatever its routes.
                Ok(Ok(())) | Err(RecvTimeoutError::Disconnected) => continue,
                Ok(Err(message)) => message,
                Err(RecvTimeoutError::Timeout) => {
                    format!("the model did not take it within {} s; see whether it hangs", PATIENCE.as_secs())
                }
            };
            let model = self.shared.models[model.index()].name.clone();
            return Err(StartError::NotTaken { route, model, message });
        }
        Ok(())
    }

    /// A model that stands still takes no route.
    fn refuse_hung(&self, route: &str, model: ModelId) -> Result<(), StartError> {
        let model = self.shared.models.get(model.index()).map_or("", |info| &*info.name);
        let Some(hung) = self.hung_hooks().into_iter().find(|hung| hung.names.model == model) else { return Ok(()) };
        let message = format!(
            "{} at route `{}`, and the model takes no route until it does; if it goes on, restart the server",
            hung.not_back(),
            hung.names.route
        );
        Err(StartError::Hung { route: route.to_owned(), model: model.to_owned(), message })
    }

    /// Where the policies of the next change are made: for checks of it.
    pub fn makers(&self) -> &Makers {
        &self.makers
    }

    /// How long `model` waits from now on: at all, and for other models.
    pub fn set_waits(&self, model: ModelId, max_wait: Duration, hold: Duration) {
        self.shared.coordinator.set_waits(model, max_wait, hold);
        self.shared.post(model, Message::Wake);
    }

    /// All routes that some model knows, the oldest first.
    pub fn known_routes(&self) -> Vec<KnownRoute> {
        let known: Vec<_> = self.shared.registry().states().collect();
        let live = self.shared.live();
        let requests = |id| live.values().filter(|live| live.route.id == id).count();
        known.into_iter().map(|(id, info, state)| KnownRoute { id, info, state, requests: requests(id) }).collect()
    }

    /// How many router networks `model` holds.
    pub fn nets(&self, model: ModelId) -> usize {
        self.shared.registry().nets(model)
    }
}
