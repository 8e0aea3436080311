//! Other routes for an engine at work. New ones are made whole beside the old before anything changes.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use serde::Serialize;

use super::keeper::RouteState;
use super::table::{Routes, ServedRoute};
use super::workshop::Change;
use super::{Engine, Makers, RouteInfo, RouteSetup, StartError};
use crate::request::{ModelId, RouteId};
use crate::subserver::Message;
use crate::subserver::coordinator::Ladders;

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
        let mut change = Change::new(&self.workshop);
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
                    change.bring(setup.into(), None)?
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
        change.make_whole()?;
        for new in &served {
            if let Some(old) = routed.iter().find(|old| old.name == new.name && old.id != new.id) {
                shared.observe(|observer| observer.replaced(old.id, new.id));
            }
        }
        shared.tell_coordinator();
        let mut registry = shared.registry();
        registry.serve(&served);
        let before = shared.table.swap(Arc::new(Routes(served)));
        drop(registry);
        before.iter().for_each(|route| route.retire_variants(self.routes().with_id(route.id).is_none()));
        ladders.map_or(Ok(()), |ladders| self.set_ladders(ladders))?;
        Ok(changes)
    }

    /// Where the policies of the next change are made: for checks of it.
    pub fn makers(&self) -> &Makers {
        &self.workshop.makers
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
