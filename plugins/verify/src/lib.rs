//! Speculative decoding: a small model drafts, a large one verifies the drafts in one forward. With
//! greedy decoding the answer is the large model's own, token for token.
//!
//! A draft stands where the large model writes the same token after the same tokens. Where it does not,
//! or behind the last draft, the large model's own token follows, and the small model drafts again.
//!
//! End tokens are left to the large model: which tokens end an answer may differ between the models,
//! and a draft ends it by the rules of the model that drafted it.

use serde::Deserialize;
use tokenrouter_plugin_api::{
    Context, Decision, Handoff, ModelIndex, PerRequest, Policy, PolicyError, RequestView, RouteBatch, Side, Slot,
    TokenId, export_policy,
};

const MAX_DRAFT_TOKENS: u32 = 64;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Settings {
    draft_tokens: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self { draft_tokens: 4 }
    }
}

/// Speculative decoding at one of its two models.
#[derive(Debug)]
pub struct Verify {
    side: Side,
    draft_tokens: u32,
    /// This model's end tokens.
    eos: Vec<TokenId>,
    /// Drafts of each request's round so far, at the small model.
    drafted: PerRequest<u32>,
}

impl Verify {
    /// Draft, or hand the drafts over; the candidate is the last of them, unless it is an end token.
    fn draft(&mut self, batch: &RouteBatch<'_>, row: usize, large: ModelIndex) -> Decision {
        let drafted = self.drafted.get(batch.slots[row]);
        *drafted += 1;
        // The large model writes one token behind the drafts: the answer's last needs none.
        let full = *drafted == self.draft_tokens || batch.remaining[row] <= 2;
        if !full && !self.eos.contains(&batch.candidates[row]) {
            return Decision::DRAFT;
        }
        *drafted = 0;
        Decision::to(large)
    }

    /// Whether the draft at this row stands, or else this model's own token.
    fn check(&self, batch: &RouteBatch<'_>, row: usize, small: ModelIndex) -> Decision {
        let own = batch.candidates[row];
        if own == batch.drafts[row] && !self.eos.contains(&own) { Decision::ACCEPT } else { Decision::to(small) }
    }
}

impl Policy for Verify {
    const NAME: &'static str = "verify";
    const SETTINGS_SCHEMA: &'static str = r#"{
        "type": "object",
        "additionalProperties": false,
        "properties": {
            "draft_tokens": {
                "description": "Tokens that the small model drafts before the large one verifies them.",
                "type": "integer", "minimum": 1, "maximum": 64, "default": 4
            }
        }
    }"#;

    fn create(ctx: &Context<'_>, settings: &str) -> Result<Self, PolicyError> {
        let Settings { draft_tokens } = serde_json::from_str(settings).map_err(|e| PolicyError::new(e.to_string()))?;
        if !(1..=MAX_DRAFT_TOKENS).contains(&draft_tokens) {
            return Err(PolicyError::new(format!(
                "draft_tokens is {draft_tokens}; set it from 1 to {MAX_DRAFT_TOKENS}"
            )));
        }
        Ok(Self {
            side: ctx.side_from_small(Self::NAME)?,
            draft_tokens,
            eos: ctx.eos.to_vec(),
            drafted: PerRequest::new(),
        })
    }

    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) {
        for (row, decision) in out.iter_mut().enumerate() {
            *decision = match self.side {
                Side::Small { large } => self.draft(batch, row, large),
                Side::Large { small } => self.check(batch, row, small),
            };
        }
    }

    fn send(&mut self, request: &RequestView<'_>, _to: ModelIndex) -> Handoff {
        match self.side {
            Side::Small { .. } if self.eos.contains(&request.candidate) => Handoff::drop_candidate().verify(),
            Side::Small { .. } => Handoff::default().verify(),
            Side::Large { .. } => Handoff::default(),
        }
    }

    fn finished(&mut self, slot: Slot) {
        self.drafted.forget(slot);
    }
}

export_policy!(Verify);

#[cfg(test)]
mod tests;
