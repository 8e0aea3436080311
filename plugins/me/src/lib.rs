//! ME, the mixture-model-like ensemble (arXiv 2605.00419): for each token one model is drawn by fixed
//! weights and writes it alone. When the models sample, that equals sampling from the weighted mean of
//! their distributions.
//!
//! The draw for a token is a function of the request's seed and the token's position, so it does not
//! depend on batches or retries.

mod mersenne;

use std::collections::BTreeMap;

use mersenne::Mersenne;
use serde::Deserialize;
use tokenrouter_plugin_api::{
    Context, Decision, ModelIndex, ModelWeights, PerRequest, Policy, PolicyError, RequestView, RouteBatch, Slot,
    export_policy, random,
};

/// Stream of [`random::uniform`] for the draws.
const STREAM: u64 = 0x006d_6500;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    weights: BTreeMap<String, f64>,
    #[serde(default)]
    generator: Generator,
}

/// Where the draws come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Generator {
    #[default]
    Philox,
    Python,
}

/// The draws of one request from the generator `python`, which gives them in order only.
#[derive(Debug, Default)]
struct Draws {
    source: Option<Box<Mersenne>>,
    drawn: Vec<f64>,
}

impl Draws {
    fn at(&mut self, seed: u64, position: usize) -> f64 {
        let source = self.source.get_or_insert_with(|| Box::new(Mersenne::new(seed)));
        while self.drawn.len() <= position {
            self.drawn.push(source.uniform());
        }
        self.drawn[position]
    }
}

/// ME at one of its models.
#[derive(Debug)]
pub struct Me {
    model: ModelIndex,
    weights: ModelWeights,
    generator: Generator,
    draws: PerRequest<Draws>,
}

impl Me {
    /// The model that writes generated token `position`.
    fn writer(&mut self, slot: Slot, seed: u64, position: u32) -> ModelIndex {
        let draw = match self.generator {
            Generator::Philox => random::uniform(seed, u64::from(position), STREAM),
            Generator::Python => self.draws.get(slot).at(seed, position as usize),
        };
        self.weights.pick(draw)
    }
}

impl Policy for Me {
    const NAME: &'static str = "me";
    const SETTINGS_SCHEMA: &'static str = r#"{
        "type": "object",
        "additionalProperties": false,
        "required": ["weights"],
        "properties": {
            "weights": {
                "description": "Probability of each model of the route, by name. They sum to 1.",
                "type": "object", "minProperties": 1,
                "additionalProperties": { "type": "number", "minimum": 0, "maximum": 1 }
            },
            "generator": {
                "description": "philox: draws keyed by seed and position. python: draw t is number t of Python's random.Random(seed).random(), for reproducing runs of Python scripts.",
                "enum": ["philox", "python"], "default": "philox"
            }
        }
    }"#;

    fn create(ctx: &Context<'_>, settings: &str) -> Result<Self, PolicyError> {
        let Settings { weights, generator } =
            serde_json::from_str(settings).map_err(|e| PolicyError::new(e.to_string()))?;
        let weights = ModelWeights::of_all(ctx, "weights", &weights)?;
        Ok(Self { model: ctx.model, weights, generator, draws: PerRequest::new() })
    }

    fn entry(&mut self, request: &RequestView<'_>) -> Option<ModelIndex> {
        Some(self.writer(request.slot, request.seed, 0))
    }

    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) {
        for (row, decision) in out.iter_mut().enumerate() {
            let next = self.writer(batch.slots[row], batch.seeds[row], batch.positions[row].saturating_add(1));
            *decision = if next == self.model { Decision::STAY } else { Decision::to(next) };
        }
    }

    fn finished(&mut self, slot: Slot) {
        self.draws.forget(slot);
    }
}

export_policy!(Me);

#[cfg(test)]
mod tests;
