//! The routes at one model. They come and go while it works.

use super::message::{Attach, Detached, Effect};
use super::{Attachment, SubServer};
use crate::request::RouteId;
use crate::runner::net::NetId;

struct Place {
    route: RouteId,
    attachment: Attachment,
    /// Of requests of this route, wherever they live.
    replicas: usize,
    /// It goes with its last replica, and these nets with it.
    leaving: Option<Vec<NetId>>,
}

/// Ascending by route. Ids are never given twice, so that a late message cannot meet another route.
#[derive(Default)]
pub(super) struct Attachments(Vec<Place>);

impl Attachments {
    /// By route, counted from 0; `None` where the route does not use this model.
    pub fn new(routes: Vec<Option<Attachment>>) -> Self {
        let mut all = Self::default();
        for (route, attachment) in (0..).zip(routes) {
            if let Some(attachment) = attachment {
                all.attach(RouteId(route), attachment);
            }
        }
        all
    }

    fn place(&self, route: RouteId) -> Result<usize, usize> {
        self.0.binary_search_by_key(&route, |place| place.route)
    }

    pub fn get(&self, route: RouteId) -> Option<&Attachment> {
        Some(&self.0[self.place(route).ok()?].attachment)
    }

    pub fn get_mut(&mut self, route: RouteId) -> Option<&mut Attachment> {
        let place = self.place(route).ok()?;
        Some(&mut self.0[place].attachment)
    }

    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Attachment> {
        self.0.iter().map(|place| &place.attachment)
    }

    pub fn into_all(self) -> Vec<Attachment> {
        self.0.into_iter().map(|place| place.attachment).collect()
    }

    pub fn attach(&mut self, route: RouteId, attachment: Attachment) {
        let new = Place { route, attachment, replicas: 0, leaving: None };
        match self.place(route) {
            Ok(at) => self.0[at] = new,
            Err(at) => self.0.insert(at, new),
        }
    }

    /// A replica of the route has come to be.
    pub fn opened(&mut self, route: RouteId) {
        if let Ok(at) = self.place(route) {
            self.0[at].replicas += 1;
        }
    }

    /// A replica of the route is gone. The attachment, if it goes with it.
    pub fn closed(&mut self, route: RouteId) -> Option<Detached> {
        let at = self.place(route).ok()?;
        self.0[at].replicas = self.0[at].replicas.saturating_sub(1);
        self.leave(at)
    }

    /// No request of the route lives or comes any more. The attachment and `nets` go with the last replica; this
    /// has them if there is none.
    pub fn detach(&mut self, route: RouteId, nets: Vec<NetId>) -> Option<Detached> {
        match self.place(route) {
            Ok(at) => {
                self.0[at].leaving = Some(nets);
                self.leave(at)
            }
            Err(_) => Some(Detached { route, attachment: None, nets, given_up: Vec::new() }),
        }
    }

    fn leave(&mut self, at: usize) -> Option<Detached> {
        if self.0[at].replicas > 0 {
            return None;
        }
        let nets = self.0[at].leaving.take()?;
        let Place { route, attachment, .. } = self.0.remove(at);
        Some(Detached { route, attachment: Some(Box::new(attachment)), nets, given_up: Vec::new() })
    }
}

impl SubServer {
    /// All of it or nothing.
    pub(super) fn attach(&mut self, Attach { route, attachment, nets, done }: Attach) {
        let mut placed = Vec::new();
        let all = nets.into_iter().try_for_each(|(id, net)| self.runner.place_net(id, net).map(|()| placed.push(id)));
        match &all {
            Ok(()) => self.routes.attach(route, attachment),
            Err(_) => placed.into_iter().for_each(|id| drop(self.runner.remove_net(id))),
        }
        // Who gave up waiting detaches it again.
        let _ = done.send(all.map_err(|e| e.message));
    }

    pub(super) fn detach(&mut self, route: RouteId, nets: Vec<NetId>) {
        let gone = self.routes.detach(route, nets);
        self.gone(gone);
    }

    /// A route may be gone from here.
    pub(super) fn gone(&mut self, detached: Option<Detached>) {
        if let Some(mut detached) = detached {
            detached.given_up = detached.nets.iter().filter_map(|&id| self.runner.remove_net(id)).collect();
            self.effects.push(Effect::Detached(Box::new(detached)));
        }
    }
}
