//! Settings, and the threshold that they give each position of an answer.

use serde::Deserialize;
use tokenrouter_plugin_api::PolicyError;

use crate::compose::MAX_TOKENS;

/// Most tokens of a block of the small model.
const MAX_TOKENS_PER_CALL: u32 = 64;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Schedule {
    #[default]
    Constant,
    Linear,
    Cosine,
    Exponential,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Strategy {
    #[default]
    Defer,
    Compose,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Table {
    threshold: f64,
    schedule: Schedule,
    start: Option<f64>,
    warmup_tokens: Option<u32>,
    strategy: Strategy,
    tokens_per_call: u32,
    defer_token: String,
    compose_top: Option<u32>,
}

impl Default for Table {
    fn default() -> Self {
        Self {
            threshold: 0.15,
            schedule: Schedule::Constant,
            start: None,
            warmup_tokens: None,
            strategy: Strategy::Defer,
            tokens_per_call: 1,
            defer_token: "<|defer|>".into(),
            compose_top: None,
        }
    }
}

/// Of the settings table.
pub const SCHEMA: &str = r#"{
    "type": "object",
    "additionalProperties": false,
    "properties": {
        "threshold": {
            "description": "Probability to defer above which the large model writes the token.",
            "type": "number", "minimum": 0, "maximum": 1, "default": 0.15
        },
        "schedule": {
            "description": "How the threshold goes from `start` to `threshold` over the first `warmup_tokens` tokens of an answer; `constant` has no such warm-up.",
            "enum": ["constant", "linear", "cosine", "exponential"], "default": "constant"
        },
        "start": {
            "description": "Threshold at an answer's first token. Only with a schedule other than `constant`; 1 if not given.",
            "type": "number", "minimum": 0, "maximum": 1
        },
        "warmup_tokens": {
            "description": "Position in the answer from which `threshold` holds. Only with a schedule other than `constant`; 15 if not given.",
            "type": "integer", "minimum": 1, "maximum": 4294967295
        },
        "strategy": {
            "description": "`defer`: the large model's token is taken. `compose`: the best token of both distributions, weighted by the probability to defer.",
            "enum": ["defer", "compose"], "default": "defer"
        },
        "tokens_per_call": {
            "description": "Tokens that the small model writes before it looks for the first that was to be deferred.",
            "type": "integer", "minimum": 1, "maximum": 64, "default": 1
        },
        "defer_token": {
            "description": "Text of the small model's token whose logit tells whether to defer.",
            "type": "string", "minLength": 1, "default": "<|defer|>"
        },
        "compose_top": {
            "description": "How many of the best tokens of each distribution are composed. Only with the strategy `compose`; 1024 if not given.",
            "type": "integer", "minimum": 1, "maximum": 8190
        }
    }
}"#;

/// Checked settings.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    pub thresholds: Thresholds,
    pub tokens_per_call: u32,
    pub defer_token: String,
    /// Tokens of each distribution to compose; `None` for the strategy `defer`.
    pub compose_top: Option<u32>,
}

impl Settings {
    /// Read the settings table. The error names the setting, its value and what to do.
    pub fn parse(json: &str) -> Result<Self, PolicyError> {
        let table: Table = serde_json::from_str(json).map_err(|e| PolicyError::new(e.to_string()))?;
        let error = |message: String| Err(PolicyError::new(message));
        let thresholds = match Thresholds::new(&table) {
            Ok(thresholds) => thresholds,
            Err(message) => return error(message),
        };
        let tokens_per_call = table.tokens_per_call;
        if !(1..=MAX_TOKENS_PER_CALL).contains(&tokens_per_call) {
            return error(format!("tokens_per_call is {tokens_per_call}; set it from 1 to {MAX_TOKENS_PER_CALL}"));
        }
        let compose_top = match (table.strategy, table.compose_top) {
            (Strategy::Defer, None) => None,
            (Strategy::Defer, Some(top)) => {
                return error(format!(
                    "compose_top is {top}, but strategy \"defer\" does not compose; set strategy to \"compose\" or \
                     remove compose_top"
                ));
            }
            (Strategy::Compose, top) => Some(top.unwrap_or(1024)),
        };
        if let Some(top) = compose_top.filter(|&top| !(1..=MAX_TOKENS).contains(&top)) {
            return error(format!(
                "compose_top is {top}; set it from 1 to {MAX_TOKENS}, the most that fit into a hand-off's payload"
            ));
        }
        Ok(Self { thresholds, tokens_per_call, defer_token: table.defer_token, compose_top })
    }
}

/// The threshold at each position of an answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Thresholds {
    schedule: Schedule,
    start: f64,
    end: f64,
    /// Positions before this one are warm-up; 0 for a constant threshold.
    warmup: u32,
}

impl Thresholds {
    fn new(table: &Table) -> Result<Self, String> {
        let (schedule, end) = (table.schedule, table.threshold);
        let probability = |name: &str, value: f64| match value {
            0.0..=1.0 => Ok(value),
            _ => Err(format!("{name} is {value}; set it to 0 or more and 1 or less")),
        };
        probability("threshold", end)?;
        if schedule == Schedule::Constant {
            let given = [("start", table.start), ("warmup_tokens", table.warmup_tokens.map(f64::from))];
            if let Some((name, value)) = given.into_iter().find_map(|(name, value)| Some((name, value?))) {
                return Err(format!(
                    "{name} is {value}, but schedule \"constant\" has no warm-up; set schedule to \"linear\", \
                     \"cosine\" or \"exponential\", or remove {name}"
                ));
            }
            return Ok(Self { schedule, start: end, end, warmup: 0 });
        }
        let start = probability("start", table.start.unwrap_or(1.0))?;
        let warmup = table.warmup_tokens.unwrap_or(15);
        if warmup == 0 {
            return Err("warmup_tokens is 0; set it to 1 or more, or set schedule to \"constant\"".into());
        }
        if schedule == Schedule::Exponential
            && let Some((name, _)) = [("start", start), ("threshold", end)].into_iter().find(|&(_, value)| value == 0.0)
        {
            return Err(format!(
                "{name} is 0, which schedule \"exponential\" cannot reach by factors; set {name} above 0 or schedule \
                 to \"linear\" or \"cosine\""
            ));
        }
        Ok(Self { schedule, start, end, warmup })
    }

    /// The threshold at `position`; 0 is an answer's first token.
    pub fn at(&self, position: u32) -> f64 {
        let Self { schedule, start, end, warmup } = *self;
        if position >= warmup {
            return end;
        }
        let (t, w) = (f64::from(position), f64::from(warmup));
        match schedule {
            Schedule::Constant => end,
            Schedule::Linear => start + (end - start) * t / w,
            Schedule::Cosine => end + (start - end) / 2.0 * ((std::f64::consts::PI * t / w).cos() + 1.0),
            Schedule::Exponential => start * (end / start).powf(t / w),
        }
    }
}
