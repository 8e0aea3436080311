//! Routes for an engine at work, made beside those that it serves: policies, nets, and the models that take them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};
use tokenrouter_plugin_api::net;

use super::keeper::Upkeep;
use super::routes::{Loader, attach, describe, policy_fault};
use super::shared::Shared;
use super::table::{ServedRoute, VariantOf};
use super::{Makers, RouteSetup, StartError};
use crate::request::{ModelId, RouteId};
use crate::runner::net::{NetId, ReadyNet};
use crate::subserver::{Attach, Message};

/// A model comes to its inbox after each step. One that has not for so long hangs, and so does a policy that is not
/// made by then.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// How often a model that is waited for is looked at.
const LOOK: Duration = Duration::from_millis(50);

/// What makes routes.
#[derive(Clone)]
pub(super) struct Workshop {
    pub shared: Arc<Shared>,
    pub makers: Makers,
}

impl Workshop {
    /// A model that stands still takes no route.
    fn refuse_hung(&self, route: &str, model: ModelId) -> Result<(), StartError> {
        let model = self.shared.models.get(model.index()).map_or("", |info| &*info.name);
        let hung = self.makers.monitors.hung().into_iter().filter(|hung| hung.hook.holds_model());
        let Some(hung) = hung.into_iter().find(|hung| hung.names.model == model) else { return Ok(()) };
        let message = format!(
            "{} at route `{}`, and the model takes no route until it does; if it goes on, restart the server",
            hung.not_back(),
            hung.names.route
        );
        Err(StartError::Hung { route: route.to_owned(), model: model.to_owned(), message })
    }
}

/// What a route brings to one of its models.
struct Brought {
    model: ModelId,
    attach: Attach,
    done: Receiver<Result<(), String>>,
}

/// A change that is being made. Dropped before it is whole, it is undone: the next change must not take over nets
/// that a model may never have got.
pub(super) struct Change<'a> {
    workshop: &'a Workshop,
    loader: Loader,
    brought: Vec<Brought>,
    entered: Vec<RouteId>,
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        let Workshop { shared, .. } = self.workshop;
        // A policy may block in its drop, and whoever makes the change must hear how it went.
        let remains = self.brought.drain(..).map(|brought| brought.attach.attachment).collect();
        let _ = shared.upkeep.send(Upkeep::Left(remains));
        self.entered.drain(..).for_each(|route| shared.end_route(route));
    }
}

impl<'a> Change<'a> {
    pub fn new(workshop: &'a Workshop) -> Self {
        Self { workshop, loader: Loader::default(), brought: Vec::new(), entered: Vec::new() }
    }

    /// Make `setup` at all its models. As a variant of a route that is held, it uses the nets of that route: none
    /// is read, and none comes to a model.
    pub fn bring(&mut self, setup: Arc<RouteSetup>, of: Option<RouteId>) -> Result<Arc<ServedRoute>, StartError> {
        let Self { workshop, loader, brought, entered } = self;
        let Workshop { shared, makers } = workshop;
        for &(model, _) in &setup.models {
            workshop.refuse_hung(&setup.name, model)?;
        }
        let mut described = describe(&setup, &shared.models)?;
        described.variant = of.map(|of| VariantOf { of, settings: setup.settings.clone() });
        let route = shared.registry().enter(described, Some(&setup), &shared.upkeep);
        entered.push(route.id);
        for &(model, _) in &setup.models {
            let place = &shared.places[model.index()];
            let mut nets: Vec<(NetId, ReadyNet)> = Vec::new();
            let info = &shared.models[model.index()];
            let mut read = |net: &net::Net| {
                let (digest, loaded) = loader.read(&setup, net, model, info).map_err(policy_fault(&setup, info))?;
                let held = shared.registry().claim(route.id, model, net, &digest);
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
                let id = shared.registry().enter_net(route.id, model, net, digest);
                nets.push((id, ready));
                Ok(id)
            };
            let share = |of, net: &net::Net| {
                let shared = shared.registry().share_net(of, route.id, model, net);
                let (route, model) = (setup.name.clone(), info.name.clone());
                shared.ok_or_else(|| StartError::OtherNets { route, model, net: net.name.clone() })
            };
            let mut load = |net: &net::Net| of.map_or_else(|| read(net), |of| share(of, net));
            if let Some(attachment) = attach(&setup, model, place, &shared.models, &mut load, makers)? {
                let (sender, done) = bounded(1);
                let attach = Attach { route: route.id, attachment, nets, done: sender };
                brought.push(Brought { model, attach, done });
            }
        }
        Ok(route)
    }

    /// Have every model take what is its own. The routes that were brought live on by themselves then.
    pub fn make_whole(&mut self) -> Result<(), StartError> {
        let shared = &self.workshop.shared;
        let mut awaited = Vec::new();
        for Brought { model, attach, done } in self.brought.drain(..) {
            let route = attach.attachment.name.clone();
            shared.post(model, Message::Attach(Box::new(attach)));
            awaited.push((route, model, done));
        }
        for (route, model, done) in awaited {
            let end = Instant::now() + PATIENCE;
            let answer = loop {
                match done.recv_deadline(end.min(Instant::now() + LOOK)) {
                    Err(RecvTimeoutError::Timeout) if Instant::now() < end => {
                        self.workshop.refuse_hung(&route, model)?;
                    }
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
            let model = shared.models[model.index()].name.clone();
            return Err(StartError::NotTaken { route, model, message });
        }
        self.entered.clear();
        Ok(())
    }
}
