//! The routes that an engine serves, and how long each of them lives.

use std::ops::Deref;
use std::sync::Arc;

use crossbeam_channel::Sender;

use super::RouteInfo;
use super::counts::Counted;
use super::keeper::Upkeep;
use super::variants::Variants;
use crate::policy::overrides::Overrides;
use crate::request::RouteId;

/// A route of an engine. It works as long as somebody holds it: every request under way does, and so should
/// who is about to submit one.
pub struct ServedRoute {
    /// Never given to another route.
    pub id: RouteId,
    pub(super) info: Arc<RouteInfo>,
    pub(super) counted: Counted,
    /// The same with other settings, for requests that ask for them.
    pub(super) variants: Variants,
    upkeep: Option<Sender<Upkeep>>,
}

/// What a route has in place of another's settings.
#[derive(Clone, Debug)]
pub struct VariantOf {
    pub of: RouteId,
    /// As JSON.
    pub settings: String,
}

impl VariantOf {
    /// The settings as a value.
    pub fn values(&self) -> serde_json::Value {
        // What was given came from values.
        serde_json::from_str(&self.settings).unwrap_or_default()
    }
}

impl ServedRoute {
    pub(super) fn new(
        id: RouteId,
        info: Arc<RouteInfo>,
        counted: Counted,
        variants: Variants,
        upkeep: Sender<Upkeep>,
    ) -> Self {
        Self { id, info, counted, variants, upkeep: Some(upkeep) }
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
            overrides: Overrides::default(),
            variant: None,
            disabled: Arc::default(),
            failed: Arc::default(),
        };
        let counted = Counted::new(Arc::default(), &info);
        Self { id, counted, info: Arc::new(info), variants: Variants::default(), upkeep: None }
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
