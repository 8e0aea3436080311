//! ME, the mixture-model-like ensemble (arXiv 2605.00419): for each token one model is drawn by fixed
//! weights and writes it alone. When the models sample, that equals sampling from the weighted mean of
//! their distributions.
//!
//! The draw for a token is a function of the request's seed and the token's position, so it does not
//! depend on batches or retries.

use std::collections::BTreeMap;

use serde::Deserialize;
use tokenrouter_plugin_api::{
    Context, Decision, ModelIndex, Policy, PolicyError, RequestView, RouteBatch, export_policy, random,
};

/// Stream of [`random::uniform`] for the draws.
const STREAM: u64 = 0x006d_6500;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    weights: BTreeMap<String, f64>,
    draws: Option<Vec<f64>>,
}

/// ME at one of its models.
#[derive(Debug)]
pub struct Me {
    model: ModelIndex,
    /// Sums of the weights up to and with each model, in the route's order.
    bounds: Vec<f64>,
    draws: Option<Vec<f64>>,
}

/// The model whose share of [0, 1) holds `draw`.
fn pick(bounds: &[f64], draw: f64) -> ModelIndex {
    // Rounding may leave the last bound a little below 1.
    bounds.iter().position(|&bound| draw < bound).unwrap_or(bounds.len().saturating_sub(1)) as ModelIndex
}

impl Me {
    /// The model that writes generated token `position`, or `None` behind the recorded draws.
    fn writer(&self, seed: u64, position: u64) -> Option<ModelIndex> {
        let draw = match &self.draws {
            Some(draws) => *draws.get(usize::try_from(position).ok()?)?,
            None => random::uniform(seed, position, STREAM),
        };
        Some(pick(&self.bounds, draw))
    }
}

fn bounds(ctx: &Context<'_>, weights: &BTreeMap<String, f64>) -> Result<Vec<f64>, PolicyError> {
    let names: Vec<&str> = ctx.models.iter().map(|m| m.name.as_str()).collect();
    if let Some(unknown) = weights.keys().find(|name| !names.contains(&name.as_str())) {
        let names = names.join(", ");
        return Err(PolicyError::new(format!(
            "weights names `{unknown}`, which route `{}` does not have; its models are {names}",
            ctx.route
        )));
    }
    let mut sum = 0.0;
    let mut bounds = Vec::with_capacity(names.len());
    for name in names {
        let Some(&weight) = weights.get(name) else {
            return Err(PolicyError::new(format!(
                "weights has none for model `{name}`; give each model of the route one"
            )));
        };
        if !(weight > 0.0 && weight.is_finite()) {
            return Err(PolicyError::new(format!("weights.{name} is {weight}; set a number above 0")));
        }
        sum += weight;
        bounds.push(sum);
    }
    if (sum - 1.0).abs() > 1e-6 {
        return Err(PolicyError::new(format!("weights sum to {sum}; they are probabilities and must sum to 1")));
    }
    Ok(bounds)
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
                "additionalProperties": { "type": "number", "exclusiveMinimum": 0, "maximum": 1 }
            },
            "draws": {
                "description": "Recorded draws, for reproducing a run: draw t decides who writes generated token t. Behind the last one the model stays.",
                "type": "array",
                "items": { "type": "number", "minimum": 0, "exclusiveMaximum": 1 }
            }
        }
    }"#;

    fn create(ctx: &Context<'_>, settings: &str) -> Result<Self, PolicyError> {
        let Settings { weights, draws } =
            serde_json::from_str(settings).map_err(|e| PolicyError::new(e.to_string()))?;
        let outside = |draws: &Vec<f64>| draws.iter().position(|draw| !(0.0..1.0).contains(draw));
        if let Some((draws, i)) = draws.as_ref().and_then(|draws| Some((draws, outside(draws)?))) {
            let draw = draws[i];
            return Err(PolicyError::new(format!("draws[{i}] is {draw}; set a number of at least 0 and below 1")));
        }
        Ok(Self { model: ctx.model, bounds: bounds(ctx, &weights)?, draws })
    }

    fn entry(&mut self, request: &RequestView<'_>) -> Option<ModelIndex> {
        self.writer(request.seed, 0)
    }

    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) {
        for (decision, (&seed, &position)) in out.iter_mut().zip(batch.seeds.iter().zip(batch.positions)) {
            *decision = match self.writer(seed, u64::from(position) + 1) {
                Some(next) if next != self.model => Decision::to(next),
                _ => Decision::STAY,
            };
        }
    }
}

export_policy!(Me);

#[cfg(test)]
mod tests;
