//! The settings: what each strategy takes, and its defaults.

use serde::Deserialize;
use tokenrouter_plugin_api::PolicyError;

use crate::rules::{NeuralRule, Rule};

/// JSON Schema of the settings. Which of them a strategy takes is checked in [`method`].
pub const SCHEMA: &str = r#"{
    "type": "object",
    "additionalProperties": false,
    "properties": {
        "strategy": {
            "description": "How the small model's candidate is judged.",
            "enum": [
                "neural", "immediate", "entropy", "momentum", "rolling", "duo_rolling", "neural_rolling",
                "neural_multi_input", "random"
            ],
            "default": "neural"
        },
        "router": {
            "description": "Weights of the router: .pt, or .safetensors with a .json of the same name beside it.",
            "type": "string", "minLength": 1
        },
        "threshold": {
            "description": "Router score from which the large model writes. Default: the one stored with the router.",
            "type": "number", "minimum": 0, "maximum": 1
        },
        "aleatoric_threshold": {
            "description": "Aleatoric uncertainty from which a token is not simple. In `immediate`, default if alone.",
            "type": "number", "minimum": 0, "default": 2.275
        },
        "epistemic_threshold": {
            "description": "Epistemic uncertainty of the ten largest logits from which the large model writes.",
            "type": "number", "minimum": 0, "maximum": 1
        },
        "entropy_threshold": {
            "description": "Entropy in nats. Default 0.45 in `entropy`, 0.02 in `rolling`, not tested in `immediate`.",
            "type": "number", "minimum": 0
        },
        "momentum_factor": {
            "description": "Share of the old momentum in the new one.",
            "type": "number", "minimum": 0, "exclusiveMaximum": 1, "default": 0.7
        },
        "quick_to_ref": {
            "description": "Momentum up to which the large model takes over from the small one.",
            "type": "number", "minimum": 0, "maximum": 1, "default": 0.3
        },
        "ref_to_quick": {
            "description": "Momentum up to which the large model goes on.",
            "type": "number", "minimum": 0, "maximum": 1, "default": 0.7
        },
        "window_size": {
            "description": "How many of the last values are averaged while the large model writes.",
            "type": "integer", "minimum": 1, "maximum": 1024, "default": 3
        },
        "reference_prob": {
            "description": "Probability that the large model writes a token.",
            "type": "number", "minimum": 0, "maximum": 1, "default": 0.5
        }
    }
}"#;

/// Aleatoric uncertainty from which a token is not simple.
const ALEATORIC: f64 = 2.275;
/// Values in a rolling window.
const WINDOW: u32 = 3;

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Strategy {
    #[default]
    Neural,
    Immediate,
    Entropy,
    Momentum,
    Rolling,
    DuoRolling,
    NeuralRolling,
    NeuralMultiInput,
    Random,
}

impl Strategy {
    /// Its name, and the settings that it takes.
    fn describe(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Self::Neural => ("neural", &["router", "threshold"]),
            Self::Immediate => ("immediate", &["aleatoric_threshold", "epistemic_threshold", "entropy_threshold"]),
            Self::Entropy => ("entropy", &["entropy_threshold"]),
            Self::Momentum => ("momentum", &["aleatoric_threshold", "momentum_factor", "quick_to_ref", "ref_to_quick"]),
            Self::Rolling => ("rolling", &["aleatoric_threshold", "entropy_threshold", "window_size"]),
            Self::DuoRolling => ("duo_rolling", &["aleatoric_threshold", "window_size"]),
            Self::NeuralRolling => ("neural_rolling", &["router", "threshold", "window_size"]),
            Self::NeuralMultiInput => ("neural_multi_input", &["router", "threshold"]),
            Self::Random => ("random", &["reference_prob"]),
        }
    }
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Settings {
    strategy: Strategy,
    router: Option<String>,
    threshold: Option<f64>,
    aleatoric_threshold: Option<f64>,
    epistemic_threshold: Option<f64>,
    entropy_threshold: Option<f64>,
    momentum_factor: Option<f64>,
    quick_to_ref: Option<f64>,
    ref_to_quick: Option<f64>,
    window_size: Option<u32>,
    reference_prob: Option<f64>,
}

/// What the settings ask for.
#[derive(Clone, Debug, PartialEq)]
pub enum Method {
    /// A rule that needs no router.
    Plain(Rule),
    /// A rule on the score of a router.
    Neural {
        /// Which rule.
        rule: NeuralRule,
        /// The router's weights file.
        router: String,
        /// The setting `threshold`.
        threshold: Option<f64>,
    },
}

/// Read the settings `json`. The error names the setting, its value and the remedy.
pub fn method(json: &str) -> Result<Method, PolicyError> {
    let settings: Settings = serde_json::from_str(json).map_err(|e| PolicyError::new(e.to_string()))?;
    let given: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(json).map_err(|e| PolicyError::new(e.to_string()))?;
    let (name, takes) = settings.strategy.describe();
    if let Some(other) = given.keys().find(|key| *key != "strategy" && !takes.contains(&key.as_str())) {
        return Err(PolicyError::new(format!(
            "{other} is given, but the strategy `{name}` does not use it; it takes {}",
            takes.join(", ")
        )));
    }
    settings.check_ranges()?;
    settings.method(name)
}

impl Settings {
    fn check_ranges(&self) -> Result<(), PolicyError> {
        let unit = |x: f64| (0.0..=1.0).contains(&x);
        let unit_open = |x: f64| (0.0..1.0).contains(&x);
        let at_least_0 = |x: f64| x >= 0.0 && x.is_finite();
        type Within = fn(f64) -> bool;
        let numbers: [(&str, Option<f64>, Within, &str); 8] = [
            ("threshold", self.threshold, unit, "0 to 1"),
            ("aleatoric_threshold", self.aleatoric_threshold, at_least_0, "0 or more"),
            ("epistemic_threshold", self.epistemic_threshold, unit, "0 to 1"),
            ("entropy_threshold", self.entropy_threshold, at_least_0, "0 or more"),
            ("momentum_factor", self.momentum_factor, unit_open, "0 or more and below 1"),
            ("quick_to_ref", self.quick_to_ref, unit, "0 to 1"),
            ("ref_to_quick", self.ref_to_quick, unit, "0 to 1"),
            ("reference_prob", self.reference_prob, unit, "0 to 1"),
        ];
        for (name, value, within, range) in numbers {
            if let Some(value) = value.filter(|&value| !within(value)) {
                return Err(PolicyError::new(format!("{name} is {value}; set it to {range}")));
            }
        }
        match self.window_size {
            Some(size) if !(1..=1024).contains(&size) => {
                Err(PolicyError::new(format!("window_size is {size}; set it to 1 to 1024")))
            }
            _ => Ok(()),
        }
    }

    fn method(self, name: &str) -> Result<Method, PolicyError> {
        let aleatoric = self.aleatoric_threshold.unwrap_or(ALEATORIC);
        let window = self.window_size.unwrap_or(WINDOW) as usize;
        let (threshold, router) = (self.threshold, self.router);
        let neural = |rule| {
            let router = router.filter(|path| !path.is_empty()).ok_or_else(|| {
                PolicyError::new(format!(
                    "router is missing; the strategy `{name}` needs the path of a router's weights, \
                     a .pt or .safetensors file"
                ))
            })?;
            Ok(Method::Neural { rule, router, threshold })
        };
        let rule = match self.strategy {
            Strategy::Neural => return neural(NeuralRule::Each),
            Strategy::NeuralRolling => return neural(NeuralRule::Rolling { window }),
            Strategy::NeuralMultiInput => return neural(NeuralRule::Window),
            Strategy::Immediate => {
                let (epistemic, entropy) = (self.epistemic_threshold, self.entropy_threshold);
                let none_given = epistemic.is_none() && entropy.is_none();
                let aleatoric = self.aleatoric_threshold.or(none_given.then_some(ALEATORIC));
                Rule::Measures { aleatoric, epistemic, entropy }
            }
            Strategy::Entropy => {
                let entropy = Some(self.entropy_threshold.unwrap_or(0.45));
                Rule::Measures { aleatoric: None, epistemic: None, entropy }
            }
            Strategy::Momentum => Rule::Momentum {
                aleatoric,
                factor: self.momentum_factor.unwrap_or(0.7),
                quick_to_ref: self.quick_to_ref.unwrap_or(0.3),
                ref_to_quick: self.ref_to_quick.unwrap_or(0.7),
            },
            Strategy::Rolling => Rule::Rolling { aleatoric, entropy: self.entropy_threshold.unwrap_or(0.02), window },
            Strategy::DuoRolling => Rule::DuoRolling { aleatoric, window },
            Strategy::Random => Rule::Random { reference_prob: self.reference_prob.unwrap_or(0.5) },
        };
        Ok(Method::Plain(rule))
    }
}
