//! The trait that an author implements.

use crate::{
    Acceptance, Context, Decision, Handoff, ModelIndex, PeerView, RequestView, Requirements, RouteBatch, Slot,
};

/// Why a policy could not be created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyError {
    /// One line for the operator: which setting, which value, what to do.
    pub message: String,
}

impl PolicyError {
    /// An error with this message.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into() }
    }
}

impl std::fmt::Display for PolicyError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for PolicyError {}

/// A routing method at one model of one route.
///
/// Hooks are never called concurrently on one instance, but may come from different threads. They
/// must not block. A panic in a hook is caught: the instance is not called again, and its requests
/// follow the route's `on_error`.
pub trait Policy: Send + Sized + 'static {
    /// Name of the method, for example `rstitch`.
    const NAME: &'static str;
    /// JSON Schema of the settings table. The host validates against it before [`Policy::create`].
    const SETTINGS_SCHEMA: &'static str = r#"{"type":"object","additionalProperties":false}"#;

    /// Make the instance for `ctx.model`. `settings` is the route's settings table as JSON.
    fn create(ctx: &Context<'_>, settings: &str) -> Result<Self, PolicyError>;

    /// What [`Policy::route`] reads. Asked once, after `create`.
    fn requirements(&self) -> Requirements {
        Requirements::default()
    }

    /// Asked at the entry model before a new request's prompt is computed: the model that shall write
    /// the first token, or `None` for the configured entry.
    fn entry(&mut self, request: &RequestView<'_>) -> Option<ModelIndex> {
        let _ = request;
        None
    }

    /// Decide about each row. `out` has one entry a row, each prefilled with [`Decision::STAY`].
    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]);

    /// Asked after [`Decision::to`]: how the request leaves.
    fn send(&mut self, request: &RequestView<'_>, to: ModelIndex) -> Handoff {
        let _ = (request, to);
        Handoff::default()
    }

    /// Asked when a peer hands a request over, before this model computes anything for it. `request`
    /// shows the tokens that this model held so far.
    fn receive(&mut self, request: &RequestView<'_>, message: &PeerView<'_>) -> Acceptance {
        let _ = (request, message);
        Acceptance::Verify
    }

    /// The request is over: forget the state at `slot`.
    fn finished(&mut self, slot: Slot) {
        let _ = slot;
    }
}
