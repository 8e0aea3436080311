//! Co-LLM at the small model: blocks, and which position of one is deferred.

use tokenrouter_plugin_api::{
    Context, Decision, Handoff, ModelIndex, PerRequest, PolicyError, RequestView, Requirements, RouteBatch, SignalSet,
    Slot, TokenId,
};

use crate::compose::{Deferral, TopTokens};
use crate::settings::{Settings, Thresholds};

/// The small model's side.
#[derive(Debug)]
pub struct Small {
    large: ModelIndex,
    thresholds: Thresholds,
    tokens_per_call: u32,
    compose_top: Option<u32>,
    defer_token: TokenId,
    eos: Vec<TokenId>,
    blocks: PerRequest<Block>,
}

/// The tokens that a request's small model writes before it looks back.
#[derive(Clone, Debug, Default)]
struct Block {
    /// Tokens so far, all of them provisional; 0 behind the block's end.
    len: u32,
    /// The first position that is to be deferred, counted from the block's start.
    deferred: Option<u32>,
    /// For the large model, about that position.
    payload: Vec<u8>,
}

/// The probability of a logit against 0. NaN stays NaN.
fn sigmoid(logit: f32) -> f64 {
    1.0 / (1.0 + (-f64::from(logit)).exp())
}

impl Small {
    /// The error names the model, the token and the setting where the model has no deferral token.
    pub fn new(ctx: &Context<'_>, large: ModelIndex, settings: Settings) -> Result<Self, PolicyError> {
        let text = &settings.defer_token;
        let Some(defer_token) = ctx.services.token_id(text) else {
            let name = ctx.models.get(ctx.model as usize).map_or("", |m| &m.name);
            return Err(PolicyError::new(format!(
                "defer_token is `{text}`, which model `{name}` does not have; give the role \"slm\" to a model tuned \
                 for Co-LLM, or set defer_token to the text of its deferral token"
            )));
        };
        if ctx.eos.contains(&defer_token) {
            return Err(PolicyError::new(format!(
                "defer_token is `{text}`, an end token: it would never be written; set it to the text of the deferral token"
            )));
        }
        Ok(Self {
            large,
            thresholds: settings.thresholds,
            tokens_per_call: settings.tokens_per_call,
            compose_top: settings.compose_top,
            defer_token,
            eos: ctx.eos.to_vec(),
            blocks: PerRequest::new(),
        })
    }

    pub fn requirements(&self) -> Requirements {
        let signals = if self.compose_top.is_some() { SignalSet::LOGSUMEXP } else { SignalSet::NONE };
        let mut requirements = Requirements::signals(signals);
        requirements.top_k = self.compose_top.unwrap_or(0);
        requirements.token_logits = vec![self.defer_token];
        requirements.masked_tokens = vec![self.defer_token];
        requirements
    }

    pub fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) {
        for (row, (decision, &logit)) in out.iter_mut().zip(batch.signals.token_logits).enumerate() {
            let block = self.blocks.get(batch.slots[row]);
            if block.len == 0 {
                *block = Block::default();
            }
            let probability = sigmoid(logit);
            if block.deferred.is_none() && probability > self.thresholds.at(batch.positions[row]) {
                block.deferred = Some(block.len);
                if self.compose_top.is_some() {
                    block.payload = Deferral { probability, base: TopTokens::of_row(&batch.signals, row) }.to_bytes();
                }
            }
            block.len += 1;
            let ends = block.len == self.tokens_per_call
                || batch.remaining[row] <= 1
                || self.eos.contains(&batch.candidates[row]);
            *decision = match block.deferred {
                _ if !ends => Decision::DRAFT,
                None => Decision::STAY,
                Some(_) => Decision::to(self.large),
            };
            if ends {
                block.len = 0;
            }
        }
    }

    /// The first deferred position and all behind it are dropped; those before it are committed.
    pub fn send(&mut self, request: &RequestView<'_>) -> Handoff {
        let block = self.blocks.get(request.slot);
        // The candidate is no provisional token: where it is the deferred position, none is dropped.
        let kept = block.deferred.unwrap_or(request.provisional);
        let handoff = Handoff::drop_candidate().rollback(request.provisional.saturating_sub(kept));
        match self.compose_top {
            // The large model's policy is not asked about the last token of a budget, and must be here.
            Some(_) => handoff.payload(std::mem::take(&mut block.payload)),
            None => handoff.budget(1),
        }
    }

    pub fn finished(&mut self, slot: Slot) {
        self.blocks.forget(slot);
    }
}
