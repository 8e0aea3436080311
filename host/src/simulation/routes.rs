//! Routes that come and go in a world, as they do in an engine.

use std::time::Duration;

use super::{Audience, Happening, Letter, World};
use crate::request::{ModelId, RouteId};
use crate::subserver::{Attach, Attachment, Message};

/// A route of a world.
#[derive(Debug)]
pub(super) struct Route {
    pub entry: ModelId,
    pub models: Vec<ModelId>,
    life: Life,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Life {
    Served,
    /// Its requests are the last.
    Draining,
    /// Its models have been told to forget it.
    Over,
}

impl Route {
    pub fn new((entry, models): (ModelId, Vec<ModelId>)) -> Self {
        Self { entry, models, life: Life::Served }
    }
}

impl<A: Audience> World<A> {
    /// A route with this entry and these models begins at `at`; requests may name it from then on.
    pub fn attach(
        &mut self,
        at: Duration,
        shape: (ModelId, Vec<ModelId>),
        attachments: Vec<(ModelId, Attachment)>,
    ) -> RouteId {
        let route = RouteId(self.routes.len() as u32);
        self.routes.push(Route::new(shape));
        self.agenda.enter(at, Happening::Attach(route, attachments));
        route
    }

    /// No request names `route` after `at`. Its models forget it once the last one is over.
    pub fn retire(&mut self, at: Duration, route: RouteId) {
        self.agenda.enter(at, Happening::Retire(route));
    }

    pub(super) fn begin_route(&mut self, route: RouteId, attachments: Vec<(ModelId, Attachment)>) {
        for (model, attachment) in attachments {
            // A world's runners have no nets, so nothing can refuse it.
            let (done, _) = crossbeam_channel::bounded(1);
            let attach = Attach { route, attachment, nets: Vec::new(), done };
            self.deliver(model, Letter { message: Message::Attach(Box::new(attach)), announced: false });
        }
        self.tell_coordinator();
    }

    pub(super) fn end_route(&mut self, route: RouteId) {
        self.routes[route.index()].life = Life::Draining;
        self.let_go(route);
    }

    /// A request of `route` may have been its last.
    pub(super) fn let_go(&mut self, route: RouteId) {
        let over = |world: &Self| !world.live.values().any(|spec| spec.new.route == route);
        if self.routes[route.index()].life == Life::Draining && over(self) {
            self.routes[route.index()].life = Life::Over;
            for model in self.routes[route.index()].models.clone() {
                self.deliver(model, Letter { message: Message::Detach(route, Vec::new()), announced: false });
            }
            self.tell_coordinator();
        }
    }

    fn tell_coordinator(&self) {
        let left = self.routes.iter().filter(|route| route.life != Life::Over);
        self.coordinator.set_routes(left.map(|route| &route.models[..]));
    }
}
