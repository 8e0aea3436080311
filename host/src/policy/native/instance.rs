//! A plugin's instance as the sub-servers see it.

use tokenrouter_plugin_api::host::{Instance, Library};
use tokenrouter_plugin_api::{
    Acceptance, Context, Decision, Handoff, ModelIndex, PeerView, RequestView, Requirements, RouteBatch, Slot,
};

use crate::policy::{PolicyFailure, PolicyInstance, said};

pub(super) struct NativeInstance {
    plugin: String,
    instance: Instance,
    requirements: Requirements,
    /// Set by the first failure: whatever state the policy is in, it is not called again.
    failed: bool,
}

impl NativeInstance {
    pub(super) fn create(
        plugin: &str,
        library: &Library,
        context: &Context<'_>,
        settings: &str,
    ) -> Result<Self, PolicyFailure> {
        let failure =
            |hook| move |message: String| PolicyFailure { plugin: plugin.to_owned(), hook, message: said(&message) };
        let mut instance = library.create(context, settings).map_err(failure("create"))?;
        let requirements = instance.requirements().map_err(failure("requirements"))?;
        Ok(Self { plugin: plugin.to_owned(), instance, requirements, failed: false })
    }

    fn call<T>(
        &mut self,
        hook: &'static str,
        body: impl FnOnce(&mut Instance) -> Result<T, String>,
    ) -> Result<T, PolicyFailure> {
        let result = if self.failed {
            Err("not called, because an earlier call of this instance failed".to_owned())
        } else {
            body(&mut self.instance)
        };
        result.map_err(|message| {
            self.failed = true;
            PolicyFailure { plugin: self.plugin.clone(), hook, message: said(&message) }
        })
    }
}

impl PolicyInstance for NativeInstance {
    fn requirements(&self) -> &Requirements {
        &self.requirements
    }
    fn entry(&mut self, request: &RequestView<'_>) -> Result<Option<ModelIndex>, PolicyFailure> {
        self.call("entry", |instance| instance.entry(request))
    }
    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) -> Result<(), PolicyFailure> {
        self.call("route", |instance| instance.route(batch, out))
    }
    fn send(&mut self, request: &RequestView<'_>, to: ModelIndex) -> Result<Handoff, PolicyFailure> {
        self.call("send", |instance| instance.send(request, to))
    }
    fn receive(&mut self, request: &RequestView<'_>, message: &PeerView<'_>) -> Result<Acceptance, PolicyFailure> {
        self.call("receive", |instance| instance.receive(request, message))
    }
    fn finished(&mut self, slot: Slot) -> Result<(), PolicyFailure> {
        self.call("finished", |instance| instance.finished(slot))
    }
}

impl Drop for NativeInstance {
    fn drop(&mut self) {
        if let Err(message) = self.instance.close() {
            let hook = "drop";
            tracing::warn!("{}", PolicyFailure { plugin: self.plugin.clone(), hook, message });
        }
    }
}
