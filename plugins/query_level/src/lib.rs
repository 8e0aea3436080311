//! Routing of whole requests between a small and a large model: by how uncertain the small model is about
//! its first token, or at random by a share.
//!
//! With `entropy` the small model computes the prompt. Where the entropy of its first next-token
//! distribution reaches the threshold, its candidate is dropped and the large model writes the whole
//! answer; otherwise the small one does. With `share` the request's seed decides before any model
//! computes anything.

use serde::Deserialize;
use tokenrouter_plugin_api::{
    Context, Decision, Handoff, ModelIndex, Policy, PolicyError, RequestView, Requirements, RouteBatch, Side,
    SignalSet, export_policy, random,
};

/// Stream of [`random::uniform`] for the draws of `share`.
const STREAM: u64 = 0x716c_7368;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    #[serde(default)]
    mode: Mode,
    threshold: Option<f64>,
    share: Option<f64>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Mode {
    #[default]
    Entropy,
    Share,
}

/// How requests are told apart.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Rule {
    /// The small model's first entropy, in nats, from which on the large model writes.
    Entropy(f64),
    /// Share of the requests that the large model writes.
    Share(f64),
}

impl Settings {
    const DEFAULT_THRESHOLD: f64 = 1.0;

    fn rule(&self) -> Result<Rule, PolicyError> {
        let fail = |message: String| Err(PolicyError::new(message));
        match (&self.mode, self.threshold, self.share) {
            (Mode::Entropy, _, Some(share)) => {
                fail(format!("share is {share}, but mode is \"entropy\"; remove it or set mode = \"share\""))
            }
            (Mode::Share, Some(threshold), _) => {
                fail(format!("threshold is {threshold}, but mode is \"share\"; remove it or set mode = \"entropy\""))
            }
            (Mode::Entropy, threshold, None) => {
                let threshold = threshold.unwrap_or(Self::DEFAULT_THRESHOLD);
                if !(threshold >= 0.0 && threshold.is_finite()) {
                    return fail(format!("threshold is {threshold}; set it to 0 or more"));
                }
                Ok(Rule::Entropy(threshold))
            }
            (Mode::Share, None, Some(share)) => {
                if !(0.0..=1.0).contains(&share) {
                    return fail(format!("share is {share}; set it to 0 or more and 1 or less"));
                }
                Ok(Rule::Share(share))
            }
            (Mode::Share, None, None) => {
                fail("share is missing; with mode = \"share\" set it to 0 or more and 1 or less".into())
            }
        }
    }
}

/// Query-level routing at one of its two models.
#[derive(Debug)]
pub struct QueryLevel {
    model: ModelIndex,
    side: Side,
    rule: Rule,
}

impl Policy for QueryLevel {
    const NAME: &'static str = "query_level";
    const SETTINGS_SCHEMA: &'static str = r#"{
        "type": "object",
        "additionalProperties": false,
        "properties": {
            "mode": {
                "description": "entropy: by the small model's first entropy. share: at random.",
                "enum": ["entropy", "share"], "default": "entropy"
            },
            "threshold": {
                "description": "Entropy in nats of the small model's first next-token distribution from which on the large model writes the answer. With mode entropy alone; 1.0 where it is not given.",
                "type": "number", "minimum": 0
            },
            "share": {
                "description": "Share of the requests that the large model writes. With mode share alone, and required there.",
                "type": "number", "minimum": 0, "maximum": 1
            }
        }
    }"#;

    fn create(ctx: &Context<'_>, settings: &str) -> Result<Self, PolicyError> {
        let settings: Settings = serde_json::from_str(settings).map_err(|e| PolicyError::new(e.to_string()))?;
        Ok(Self { model: ctx.model, side: ctx.side(Self::NAME)?, rule: settings.rule()? })
    }

    fn requirements(&self) -> Requirements {
        match (self.rule, self.side) {
            (Rule::Entropy(_), Side::Small { .. }) => Requirements::signals(SignalSet::ENTROPY),
            _ => Requirements::default(),
        }
    }

    fn entry(&mut self, request: &RequestView<'_>) -> Option<ModelIndex> {
        let (small, large) = match self.side {
            Side::Small { large } => (self.model, large),
            Side::Large { small } => (small, self.model),
        };
        Some(match self.rule {
            Rule::Share(share) if random::uniform(request.seed, 0, STREAM) < share => large,
            _ => small,
        })
    }

    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) {
        let (Rule::Entropy(threshold), Side::Small { large }) = (self.rule, self.side) else { return };
        for (decision, (&position, &entropy)) in out.iter_mut().zip(batch.positions.iter().zip(batch.signals.entropy)) {
            if position == 0 && f64::from(entropy) >= threshold {
                *decision = Decision::to(large);
            }
        }
    }

    fn send(&mut self, _request: &RequestView<'_>, _to: ModelIndex) -> Handoff {
        Handoff::drop_candidate()
    }
}

export_policy!(QueryLevel);

#[cfg(test)]
mod tests;
