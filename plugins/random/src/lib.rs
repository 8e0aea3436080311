//! Random routing, the baseline of R2R (arXiv 2505.21600): at each token a coin decides whether another
//! model writes it in place of the entry model.
//!
//! The entry model computes every position; where another model is drawn, its candidate is dropped and the
//! drawn model writes that one token. The draw for a token is a function of the request's seed and the
//! token's position, so it does not depend on batches or retries.

use std::collections::BTreeMap;

use serde::Deserialize;
use tokenrouter_plugin_api::{
    Context, Decision, Handoff, ModelIndex, ModelWeights, Policy, PolicyError, RequestView, RouteBatch, export_policy,
    random,
};

/// Stream of [`random::uniform`] for the draws.
const STREAM: u64 = 0x7261_6e64_6f6d;

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Settings {
    probabilities: BTreeMap<String, f64>,
}

/// Random routing at one of its models.
#[derive(Debug)]
pub struct Random {
    model: ModelIndex,
    entry: ModelIndex,
    /// Who writes a token; the entry model has what the settings leave.
    writers: ModelWeights,
}

impl Policy for Random {
    const NAME: &'static str = "random";
    const SETTINGS_SCHEMA: &'static str = r#"{
        "type": "object",
        "additionalProperties": false,
        "required": ["probabilities"],
        "properties": {
            "probabilities": {
                "description": "Probability, for models other than the entry, to write a token in its place. They sum to at most 1.",
                "type": "object", "minProperties": 1,
                "additionalProperties": { "type": "number", "minimum": 0, "maximum": 1 }
            }
        }
    }"#;

    fn create(ctx: &Context<'_>, settings: &str) -> Result<Self, PolicyError> {
        let Settings { probabilities } = serde_json::from_str(settings).map_err(|e| PolicyError::new(e.to_string()))?;
        let writers = ModelWeights::with_rest(ctx, "probabilities", &probabilities, ctx.entry)?;
        Ok(Self { model: ctx.model, entry: ctx.entry, writers })
    }

    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) {
        for (decision, (&seed, &position)) in out.iter_mut().zip(batch.seeds.iter().zip(batch.positions)) {
            let writer = match self.model == self.entry {
                true => self.writers.pick(random::uniform(seed, u64::from(position), STREAM)),
                // A visit has one token, about which nobody is asked. Should anybody be, it ends here.
                false => self.entry,
            };
            if writer != self.model {
                *decision = Decision::to(writer);
            }
        }
    }

    fn send(&mut self, _request: &RequestView<'_>, _to: ModelIndex) -> Handoff {
        if self.model == self.entry { Handoff::drop_candidate().budget(1) } else { Handoff::default() }
    }
}

export_policy!(Random);

#[cfg(test)]
mod tests;
