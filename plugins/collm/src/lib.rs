//! Co-LLM (arXiv 2403.03870): a small model is tuned to tell, by the logit of one token that it never
//! writes, where a large model should write instead.
//!
//! At each position the logit's sigmoid is the probability to defer. Above the threshold of that
//! position the small model's candidate is dropped and the position is written with the large model's
//! help: its own token (`defer`), or the best token of both distributions (`compose`). Then the small
//! model goes on.
//!
//! With `tokens_per_call` above 1 the small model writes a block of provisional tokens first; the first
//! position of it that was to be deferred and all behind it are dropped. The answer is the same: what
//! is kept was written after exactly the tokens that it would have followed one at a time, and no
//! position behind the first deferred one is looked at.

mod compose;
mod large;
mod settings;
mod small;

use tokenrouter_plugin_api::{
    Acceptance, Context, Decision, Handoff, ModelIndex, PeerView, Policy, PolicyError, RequestView, Requirements,
    RouteBatch, Side, Slot, export_policy,
};

use large::Large;
use settings::Settings;
use small::Small;

/// Co-LLM at one of its two models.
#[derive(Debug)]
pub struct CoLlm(At);

#[derive(Debug)]
enum At {
    Small(Small),
    Large(Large),
}

impl Policy for CoLlm {
    const NAME: &'static str = "collm";
    const SETTINGS_SCHEMA: &'static str = settings::SCHEMA;

    fn create(ctx: &Context<'_>, settings: &str) -> Result<Self, PolicyError> {
        let mut settings = Settings::parse(settings)?;
        settings.compose_top = settings.compose_top.map(|top| top.min(ctx.vocab_size));
        Ok(Self(match ctx.side_from_small(Self::NAME)? {
            Side::Small { large } => At::Small(Small::new(ctx, large, settings)?),
            Side::Large { small } => At::Large(Large::new(ctx, small, &settings)),
        }))
    }

    fn requirements(&self) -> Requirements {
        match &self.0 {
            At::Small(small) => small.requirements(),
            At::Large(large) => large.requirements(),
        }
    }

    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) {
        match &mut self.0 {
            At::Small(small) => small.route(batch, out),
            At::Large(large) => large.route(batch, out),
        }
    }

    fn send(&mut self, request: &RequestView<'_>, _to: ModelIndex) -> Handoff {
        match &mut self.0 {
            At::Small(small) => small.send(request),
            At::Large(_) => Handoff::default(),
        }
    }

    fn receive(&mut self, request: &RequestView<'_>, message: &PeerView<'_>) -> Acceptance {
        if let At::Large(large) = &mut self.0 {
            large.receive(request, message);
        }
        Acceptance::Verify
    }

    fn finished(&mut self, slot: Slot) {
        match &mut self.0 {
            At::Small(small) => small.finished(slot),
            At::Large(large) => large.finished(slot),
        }
    }
}

export_policy!(CoLlm);

#[cfg(test)]
mod tests;
