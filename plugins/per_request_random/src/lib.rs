//! Random routing of whole requests, a baseline: one weighted draw for each request picks the model that
//! writes all of its answer.
//!
//! The draw is a function of the request's seed, so a repeated request goes to the same model. The other
//! models never compute anything for it.

use std::collections::BTreeMap;

use serde::Deserialize;
use tokenrouter_plugin_api::{
    Context, Decision, ModelIndex, ModelWeights, Policy, PolicyError, RequestView, RouteBatch, export_policy, random,
};

/// Stream of [`random::uniform`] for the draws.
const STREAM: u64 = 0x7072_7264;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    weights: BTreeMap<String, f64>,
}

/// Random routing of whole requests at one of its models.
#[derive(Debug)]
pub struct PerRequestRandom {
    weights: ModelWeights,
}

impl Policy for PerRequestRandom {
    const NAME: &'static str = "per_request_random";
    const SETTINGS_SCHEMA: &'static str = r#"{
        "type": "object",
        "additionalProperties": false,
        "required": ["weights"],
        "properties": {
            "weights": {
                "description": "Probability of each model of the route, by name, to write a request's whole answer. They sum to 1.",
                "type": "object", "minProperties": 1,
                "additionalProperties": { "type": "number", "minimum": 0, "maximum": 1 }
            }
        }
    }"#;

    fn create(ctx: &Context<'_>, settings: &str) -> Result<Self, PolicyError> {
        let Settings { weights } = serde_json::from_str(settings).map_err(|e| PolicyError::new(e.to_string()))?;
        Ok(Self { weights: ModelWeights::of_all(ctx, "weights", &weights)? })
    }

    fn entry(&mut self, request: &RequestView<'_>) -> Option<ModelIndex> {
        Some(self.weights.pick(random::uniform(request.seed, 0, STREAM)))
    }

    /// Whoever writes goes on.
    fn route(&mut self, _batch: &RouteBatch<'_>, _out: &mut [Decision]) {}
}

export_policy!(PerRequestRandom);

#[cfg(test)]
mod tests;
