//! Policies as the sub-servers see them, wherever they come from.

pub mod check;
mod file;
pub mod monitor;
pub mod native;
pub mod nets;
pub mod overrides;
pub mod plugin;
mod settings;
pub mod store;
pub mod wasm;

pub use file::sha256;
pub use settings::validate_settings;

use std::sync::Arc;

use nets::HostNet;
use tokenrouter_plugin_api::{
    Acceptance, Context, Decision, Handoff, ModelIndex, PeerView, Policy, RequestView, Requirements, RouteBatch, Slot,
};

/// Characters of a plugin's message that are kept.
const MAX_SAID: usize = 1000;

/// A hook that failed. The instance must not be called again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("policy `{plugin}` failed in {hook}: {message}")]
pub struct PolicyFailure {
    pub plugin: String,
    pub hook: &'static str,
    pub message: String,
}

/// One policy instance: attached to one model of one route, called from that model's thread.
pub trait PolicyInstance: Send {
    fn requirements(&self) -> &Requirements;
    fn entry(&mut self, request: &RequestView<'_>) -> Result<Option<ModelIndex>, PolicyFailure>;
    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) -> Result<(), PolicyFailure>;
    fn send(&mut self, request: &RequestView<'_>, to: ModelIndex) -> Result<Handoff, PolicyFailure>;
    fn receive(&mut self, request: &RequestView<'_>, message: &PeerView<'_>) -> Result<Acceptance, PolicyFailure>;
    fn finished(&mut self, slot: Slot) -> Result<(), PolicyFailure>;
    /// What the instance got over by itself since this was last asked: for counters and the log.
    fn survived(&mut self) -> Vec<Survived> {
        Vec::new()
    }
}

/// A fault after which a fresh instance took the place of the one that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survived {
    /// It named no model of the route.
    pub unknown_destination: bool,
    /// It gave another answer without meaning.
    pub wrong_answer: bool,
    /// What happened, for the log.
    pub message: String,
}

/// What is known of the file that a policy came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PluginFile<'a> {
    pub version: &'a str,
    /// In hexadecimal.
    pub sha256: &'a str,
}

/// Makes policy instances: a loaded plugin, or a policy linked into the program.
pub trait PolicyFactory: Send + Sync {
    /// Name of the method.
    fn name(&self) -> &str;
    /// JSON Schema of the settings.
    fn settings_schema(&self) -> &str;
    /// Where it came from; `None` for a policy linked into the program.
    fn file(&self) -> Option<PluginFile<'_>> {
        None
    }
    /// Names of the nets that the route's configuration describes, for a policy that cannot.
    fn host_nets(&self) -> &[String] {
        &[]
    }
    /// The same policy with its nets: one for each of [`Self::host_nets`].
    fn with_nets(&self, nets: Vec<HostNet>) -> Result<Arc<dyn PolicyFactory>, String> {
        let names: Vec<_> = nets.iter().map(|net| net.net.name.as_str()).collect();
        Err(format!("policy `{}` takes no nets from a configuration; leave out {}", self.name(), names.join(", ")))
    }
    /// Make an instance. `settings` has passed the schema.
    fn create(&self, context: &Context<'_>, settings: &str) -> Result<Box<dyn PolicyInstance>, PolicyFailure>;
}

/// A factory for a [`Policy`] linked into this program (tests, examples, benches).
pub struct Linked<P>(std::marker::PhantomData<fn() -> P>);

impl<P> Default for Linked<P> {
    fn default() -> Self {
        Self(std::marker::PhantomData)
    }
}

struct LinkedInstance<P> {
    policy: P,
    requirements: Requirements,
}

/// What a plugin says, for logs and terminals: of bounded length, without control characters but ends of lines.
pub(crate) fn said(text: &str) -> String {
    let shown = |c: char| if c.is_control() && c != '\n' { c.escape_default().collect() } else { c.to_string() };
    let mut line: String = text.chars().take(MAX_SAID).map(shown).collect();
    if text.chars().nth(MAX_SAID).is_some() {
        line.push('…');
    }
    line
}

/// Run `body`; a panic becomes a [`PolicyFailure`] that names `hook`.
fn guarded<T>(plugin: &str, hook: &'static str, body: impl FnOnce() -> T) -> Result<T, PolicyFailure> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).map_err(|panic| {
        let message = panic
            .downcast_ref::<&str>()
            .map(|s| s.to_string())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "a panic without a message".into());
        PolicyFailure { plugin: plugin.into(), hook, message: format!("panicked: {message}") }
    })
}

impl<P: Policy> PolicyFactory for Linked<P> {
    fn name(&self) -> &str {
        P::NAME
    }
    fn settings_schema(&self) -> &str {
        P::SETTINGS_SCHEMA
    }
    fn create(&self, context: &Context<'_>, settings: &str) -> Result<Box<dyn PolicyInstance>, PolicyFailure> {
        let policy = guarded(P::NAME, "create", || P::create(context, settings))?.map_err(|e| PolicyFailure {
            plugin: P::NAME.into(),
            hook: "create",
            message: e.message,
        })?;
        let requirements = guarded(P::NAME, "requirements", || policy.requirements())?;
        Ok(Box::new(LinkedInstance { policy, requirements }))
    }
}

impl<P: Policy> PolicyInstance for LinkedInstance<P> {
    fn requirements(&self) -> &Requirements {
        &self.requirements
    }
    fn entry(&mut self, request: &RequestView<'_>) -> Result<Option<ModelIndex>, PolicyFailure> {
        guarded(P::NAME, "entry", || self.policy.entry(request))
    }
    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) -> Result<(), PolicyFailure> {
        guarded(P::NAME, "route", || self.policy.route(batch, out))
    }
    fn send(&mut self, request: &RequestView<'_>, to: ModelIndex) -> Result<Handoff, PolicyFailure> {
        guarded(P::NAME, "send", || self.policy.send(request, to))
    }
    fn receive(&mut self, request: &RequestView<'_>, message: &PeerView<'_>) -> Result<Acceptance, PolicyFailure> {
        guarded(P::NAME, "receive", || self.policy.receive(request, message))
    }
    fn finished(&mut self, slot: Slot) -> Result<(), PolicyFailure> {
        guarded(P::NAME, "finished", || self.policy.finished(slot))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_plugin_says_is_bounded() {
        assert_eq!(said("left: 1\n\x1b[31m"), "left: 1\n\\u{1b}[31m");
        assert_eq!((said(&"x".repeat(1000)).len(), said(&"x".repeat(1001)).chars().count()), (1000, 1001));
    }
}
