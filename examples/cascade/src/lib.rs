//! A cascade of three models: a small model (role `slm`) writes; a medium one (`mlm`) writes the tokens
//! that the small one doubts; a large one (`llm`) writes those that the small one despairs of, and those
//! that the medium one doubts as well.
//!
//! A model doubts where the probability of its best token is below `doubt`. The small model despairs where
//! it is below `despair`. The large model writes at most the share `budget` of an answer, counted after
//! every token; where that is used up, the medium model stands in.
//!
//! How many tokens the large model has written is all that is known of a request. The number travels with
//! it, as the payload of every hand-off, so that each instance has it when it is asked.

use serde::Deserialize;
use tokenrouter_plugin_api::{
    Acceptance, Context, Decision, Handoff, ModelIndex, PeerView, PerRequest, Policy, PolicyError, RequestView,
    Requirements, RouteBatch, SignalSet, Slot, export_policy,
};

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Settings {
    doubt: f64,
    despair: f64,
    budget: f64,
}

impl Default for Settings {
    fn default() -> Self {
        Self { doubt: 0.8, despair: 0.5, budget: 0.2 }
    }
}

impl Settings {
    /// The settings in `json`, checked.
    fn parse(json: &str) -> Result<Self, PolicyError> {
        let settings: Self = serde_json::from_str(json).map_err(|e| PolicyError::new(e.to_string()))?;
        let Self { doubt, despair, budget } = settings;
        for (name, value) in [("doubt", doubt), ("despair", despair), ("budget", budget)] {
            if !(0.0..=1.0).contains(&value) {
                return Err(PolicyError::new(format!("{name} is {value}; set it to 0 or more and 1 or less")));
            }
        }
        if despair > doubt {
            return Err(PolicyError::new(format!(
                "despair is {despair}, above doubt, which is {doubt}; set despair to {doubt} or less"
            )));
        }
        Ok(settings)
    }

    /// Whether the large model may write the token at `position` of an answer in which it has written
    /// `large` tokens: its share, with this token, must not be above the budget.
    fn affords(&self, large: u32, position: u32) -> bool {
        f64::from(large) + 1.0 <= self.budget * (f64::from(position) + 1.0)
    }
}

/// The models of the route by their role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Models {
    small: ModelIndex,
    medium: ModelIndex,
    large: ModelIndex,
}

impl Models {
    /// The models of a route that has each of the three roles once and begins at the small model.
    fn of(ctx: &Context<'_>) -> Result<Self, PolicyError> {
        let [small, medium, large] = ctx.roles("cascade", ["slm", "mlm", "llm"])?;
        // Another entry model would write its first token unasked, and against the budget.
        ctx.begins_at("cascade", small)?;
        Ok(Self { small, medium, large })
    }
}

/// The cascade at one of its three models.
#[derive(Debug)]
pub struct Cascade {
    /// The model that this instance is at.
    here: ModelIndex,
    models: Models,
    settings: Settings,
    /// How many tokens of each answer the large model has written.
    large_tokens: PerRequest<u32>,
}

impl Cascade {
    /// Who goes on after a token at `position` whose best alternative had the probability `p`. NaN is "no
    /// signal" and below no threshold: the token stays.
    fn decide(&self, p: f32, position: u32, large_tokens: u32) -> Decision {
        let Models { small, medium, large } = self.models;
        let below = |threshold| f64::from(p) < threshold;
        let affordable = self.settings.affords(large_tokens, position);
        if self.here == small {
            match (below(self.settings.despair) && affordable, below(self.settings.doubt)) {
                (true, _) => Decision::to(large),
                (false, true) => Decision::to(medium),
                (false, false) => Decision::STAY,
            }
        } else if self.here == medium && below(self.settings.doubt) && affordable {
            Decision::to(large)
        } else {
            Decision::to(small)
        }
    }
}

impl Policy for Cascade {
    const NAME: &'static str = "cascade";
    const SETTINGS_SCHEMA: &'static str = r#"{
        "type": "object",
        "additionalProperties": false,
        "properties": {
            "doubt": {
                "description": "Probability of the best token below which a model does not write it itself.",
                "type": "number", "minimum": 0, "maximum": 1, "default": 0.8
            },
            "despair": {
                "description": "Probability of the small model's best token below which the large one is asked.",
                "type": "number", "minimum": 0, "maximum": 1, "default": 0.5
            },
            "budget": {
                "description": "Largest share of an answer's tokens that the large model may write.",
                "type": "number", "minimum": 0, "maximum": 1, "default": 0.2
            }
        }
    }"#;

    fn create(ctx: &Context<'_>, settings: &str) -> Result<Self, PolicyError> {
        Ok(Self {
            here: ctx.model,
            models: Models::of(ctx)?,
            settings: Settings::parse(settings)?,
            large_tokens: PerRequest::new(),
        })
    }

    fn requirements(&self) -> Requirements {
        // The large model's tokens are kept whatever it thinks of them.
        if self.here == self.models.large {
            Requirements::default()
        } else {
            Requirements::signals(SignalSet::TOP1_PROB)
        }
    }

    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) {
        for (row, decision) in out.iter_mut().enumerate() {
            // At the large model the column is empty.
            let p = batch.signals.top1_prob.get(row).copied().unwrap_or(f32::NAN);
            let large_tokens = *self.large_tokens.get(batch.slots[row]);
            *decision = self.decide(p, batch.positions[row], large_tokens);
        }
    }

    fn send(&mut self, request: &RequestView<'_>, to: ModelIndex) -> Handoff {
        let large_tokens = self.large_tokens.get(request.slot);
        // The small model is handed finished tokens; the others are asked for a better one. They have no visit
        // budget, though they write one token each: about the last token of a visit no policy is asked, and the
        // medium model must be able to pass it on.
        let handoff = if to == self.models.small { Handoff::default() } else { Handoff::drop_candidate() };
        if self.here == self.models.large {
            *large_tokens += 1;
        }
        handoff.payload(large_tokens.to_le_bytes())
    }

    fn receive(&mut self, request: &RequestView<'_>, message: &PeerView<'_>) -> Acceptance {
        if let Ok(bytes) = message.payload.try_into() {
            *self.large_tokens.get(request.slot) = u32::from_le_bytes(bytes);
        }
        Acceptance::Verify
    }

    fn finished(&mut self, slot: Slot) {
        self.large_tokens.forget(slot);
    }
}

export_policy!(Cascade);

#[cfg(test)]
mod tests;
