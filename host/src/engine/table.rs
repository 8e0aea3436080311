//! The routes that an engine serves, and how long each of them lives.

use std::ops::Deref;
use std::sync::Arc;

use crossbeam_channel::Sender;

use super::RouteInfo;
use super::counts::Counted;
use super::keeper::Upkeep;
use crate::request::RouteId;

/// A route of an engine. It works as long as somebody holds it: every request under way does, and so should
/// who is about to submit one.
pub struct ServedRoute {
    /// Never given to another route.
    pub id: RouteId,
    pub(super) info: Arc<RouteInfo>,
    pub(super) counted: Counted,
    upkeep: Option<Sender<Upkeep>>,
}

impl ServedRoute {
    pub(super) fn new(id: RouteId, info: Arc<RouteInfo>, counted: Counted, upkeep: Sender<Upkeep>) -> Self {
        Self { id, info, counted, upkeep: Some(upkeep) }
    }

    /// A route without models and with no engine behind it: for tests of those who read routes.
    pub fn unconnected(id: RouteId, name: &str) -> Self {
        let info = RouteInfo {
            name: name.into(),
            models: Vec::new(),
            entry: 0,
            policy: None,
            version: None,
            sha256: None,
            context: 1,
            vocab_size: 1,
            disabled: Arc::default(),
        };
        Self { id, counted: Counted::new(Arc::default(), &info), info: Arc::new(info), upkeep: None }
    }
}

impl Deref for ServedRoute {
    type Target = RouteInfo;

    fn deref(&self) -> &RouteInfo {
        &self.info
    }
}

impl std::fmt::Debug for ServedRoute {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServedRoute").field("id", &self.id).field("info", &self.info).finish_non_exhaustive()
    }
}

impl Drop for ServedRoute {
    fn drop(&mut self) {
        if let Some(upkeep) = &self.upkeep {
            // An engine that has ended keeps nothing.
            let _ = upkeep.send(Upkeep::Ended(self.id));
        }
    }
}

/// The routes that take requests, in the order of the configuration; then every bare model.
#[derive(Clone, Debug, Default)]
pub struct Routes(pub(super) Vec<Arc<ServedRoute>>);

impl Routes {
    pub fn named(&self, name: &str) -> Option<&Arc<ServedRoute>> {
        self.0.iter().find(|route| route.name == name)
    }

    pub fn with_id(&self, id: RouteId) -> Option<&Arc<ServedRoute>> {
        self.0.iter().find(|route| route.id == id)
    }
}

impl Deref for Routes {
    type Target = [Arc<ServedRoute>];

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}
