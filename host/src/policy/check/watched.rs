//! A policy instance whose calls are watched.

use std::collections::BTreeSet;

use tokenrouter_plugin_api::host::float_mode;
use tokenrouter_plugin_api::{
    Acceptance, Context, Decision, Handoff, ModelIndex, PeerView, RequestView, Requirements, RouteBatch, Slot,
};

use crate::policy::{PolicyFactory, PolicyFailure, PolicyInstance};

/// Notes which hooks leave the thread's floating-point state changed, and undoes the change: what the policy
/// answers afterwards is judged on its own.
pub struct Watched {
    instance: Box<dyn PolicyInstance>,
    pub changed_float_mode: BTreeSet<&'static str>,
    pub calls: u64,
}

impl Watched {
    pub fn create(factory: &dyn PolicyFactory, context: &Context<'_>, settings: &str) -> Result<Self, PolicyFailure> {
        let mut changed = BTreeSet::new();
        let instance = watch(&mut changed, "create", || factory.create(context, settings))?;
        Ok(Self { instance, changed_float_mode: changed, calls: 1 })
    }

    pub fn requirements(&self) -> &Requirements {
        self.instance.requirements()
    }

    pub fn entry(&mut self, request: &RequestView<'_>) -> Result<Option<ModelIndex>, PolicyFailure> {
        self.call("entry", |instance| instance.entry(request))
    }

    pub fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) -> Result<(), PolicyFailure> {
        self.call("route", |instance| instance.route(batch, out))
    }

    pub fn send(&mut self, request: &RequestView<'_>, to: ModelIndex) -> Result<Handoff, PolicyFailure> {
        self.call("send", |instance| instance.send(request, to))
    }

    pub fn receive(&mut self, request: &RequestView<'_>, message: &PeerView<'_>) -> Result<Acceptance, PolicyFailure> {
        self.call("receive", |instance| instance.receive(request, message))
    }

    pub fn finished(&mut self, slot: Slot) -> Result<(), PolicyFailure> {
        self.call("finished", |instance| instance.finished(slot))
    }

    fn call<T>(&mut self, hook: &'static str, body: impl FnOnce(&mut dyn PolicyInstance) -> T) -> T {
        self.calls += 1;
        watch(&mut self.changed_float_mode, hook, || body(&mut *self.instance))
    }
}

fn watch<T>(changed: &mut BTreeSet<&'static str>, hook: &'static str, body: impl FnOnce() -> T) -> T {
    let before = float_mode::get();
    let answer = body();
    if float_mode::get() != before {
        float_mode::set(before);
        changed.insert(hook);
    }
    answer
}
