//! Co-LLM at the large model: one token, then back.

use tokenrouter_plugin_api::{
    Context, Decision, ModelIndex, PeerView, PerRequest, RequestView, Requirements, RouteBatch, SignalSet, Slot,
};

use crate::compose::{Deferral, TopTokens};
use crate::settings::Settings;

/// The large model's side. With the strategy `defer` the host ends each visit and asks nothing here.
#[derive(Debug)]
pub struct Large {
    pub small: ModelIndex,
    compose_top: Option<u32>,
    vocab_size: u32,
    /// The position that each request came for; none once it is written.
    deferrals: PerRequest<Option<Deferral>>,
}

impl Large {
    pub fn new(ctx: &Context<'_>, small: ModelIndex, settings: &Settings) -> Self {
        let (compose_top, vocab_size) = (settings.compose_top, ctx.vocab_size);
        Self { small, compose_top, vocab_size, deferrals: PerRequest::new() }
    }

    pub fn requirements(&self) -> Requirements {
        let Some(top) = self.compose_top else { return Requirements::default() };
        let mut requirements = Requirements::signals(SignalSet::LOGSUMEXP);
        requirements.top_k = top;
        requirements
    }

    pub fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) {
        for (row, decision) in out.iter_mut().enumerate() {
            *decision = Decision::to(self.small);
            // Without a deferral there is nothing to compose: the model's own token is kept.
            let deferral = self.deferrals.get(batch.slots[row]).take();
            if let Some(token) = deferral.and_then(|d| d.compose(&TopTokens::of_row(&batch.signals, row))) {
                *decision = decision.replacing(token);
            }
        }
    }

    pub fn receive(&mut self, request: &RequestView<'_>, message: &PeerView<'_>) {
        *self.deferrals.get(request.slot) = Deferral::from_bytes(message.payload, self.vocab_size);
    }

    pub fn finished(&mut self, slot: Slot) {
        self.deferrals.forget(slot);
    }
}
