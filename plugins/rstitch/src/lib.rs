//! R-Stitch (arXiv 2507.17307): a small model writes; where its next-token distribution is uncertain, a
//! large model takes over until it is certain again.
//!
//! Uncertain means that the entropy, divided by ln of the number of tokens, is above a threshold. Both
//! models are tested, each on its own distribution. The small model's uncertain candidate is dropped
//! and the large model writes that position; every token of the large model is kept, also the certain
//! one with which it hands back.

use serde::Deserialize;
use tokenrouter_plugin_api::{
    Context, Decision, Handoff, ModelIndex, Policy, PolicyError, RequestView, Requirements, RouteBatch, Side,
    SignalSet, export_policy,
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Settings {
    threshold: f64,
}

impl Default for Settings {
    fn default() -> Self {
        Self { threshold: 0.03 }
    }
}

/// R-Stitch at one of its two models.
#[derive(Debug)]
pub struct RStitch {
    side: Side,
    threshold: f64,
}

/// What becomes of a row with this normalised entropy. NaN is "no signal" and not above any threshold.
fn decide(side: &Side, entropy: f32, threshold: f64) -> Decision {
    match (side, f64::from(entropy) > threshold) {
        (Side::Small { large }, true) => Decision::to(*large),
        (Side::Large { small }, false) => Decision::to(*small),
        _ => Decision::STAY,
    }
}

impl Policy for RStitch {
    const NAME: &'static str = "rstitch";
    const SETTINGS_SCHEMA: &'static str = r#"{
        "type": "object",
        "additionalProperties": false,
        "properties": {
            "threshold": {
                "description": "Entropy, divided by ln of the vocabulary size, above which the large model writes.",
                "type": "number", "minimum": 0, "maximum": 1, "default": 0.03
            }
        }
    }"#;

    fn create(ctx: &Context<'_>, settings: &str) -> Result<Self, PolicyError> {
        let Settings { threshold } = serde_json::from_str(settings).map_err(|e| PolicyError::new(e.to_string()))?;
        if !(0.0..=1.0).contains(&threshold) {
            return Err(PolicyError::new(format!("threshold is {threshold}; set it to 0 or more and 1 or less")));
        }
        Ok(Self { side: ctx.side_from_small(Self::NAME)?, threshold })
    }

    fn requirements(&self) -> Requirements {
        Requirements::signals(SignalSet::ENTROPY_NORM)
    }

    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) {
        for (decision, &entropy) in out.iter_mut().zip(batch.signals.entropy_norm) {
            *decision = decide(&self.side, entropy, self.threshold);
        }
    }

    fn send(&mut self, _request: &RequestView<'_>, _to: ModelIndex) -> Handoff {
        match self.side {
            Side::Small { .. } => Handoff::drop_candidate(),
            Side::Large { .. } => Handoff::default(),
        }
    }
}

export_policy!(RStitch);

#[cfg(test)]
mod tests;
