//! CITER (arXiv 2502.01976): a small model writes; where a small network, the *router*, has too little
//! confidence in its hidden state, the large model writes that one token.
//!
//! The small model's candidate is dropped at a hand-off, and after one token the small model goes on.
#![deny(missing_docs)]

use serde::Deserialize;
use tokenrouter_plugin_api::net::{Net, WeightsInfo};
use tokenrouter_plugin_api::{
    Context, Decision, Handoff, ModelIndex, Policy, PolicyError, RequestView, Requirements, RouteBatch, Side,
    export_policy,
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    router: String,
    #[serde(default = "default_threshold")]
    threshold: f64,
}

fn default_threshold() -> f64 {
    0.98
}

/// CITER at one of its two models.
#[derive(Debug)]
pub struct Citer {
    side: At,
}

#[derive(Debug)]
enum At {
    Small {
        large: ModelIndex,
        threshold: f64,
        net: Net,
    },
    /// Its visits end by their budget.
    Large,
}

/// The confidence that the small model may write its candidate, from its last hidden state. There is no
/// activation between the last two layers.
fn confidence(path: &str) -> Net {
    let mut net = Net::new("citer", path);
    let x = net.hidden();
    let x = net.linear(x, "mlp.0");
    let x = net.batch_norm(x, "mlp.1");
    let x = net.relu(x);
    let x = net.linear(x, "mlp.4");
    let x = net.linear(x, "linear");
    net.sigmoid(x);
    net
}

/// The weights are those of `net`. The host checks their shapes against each other and the model.
fn check(path: &str, net: &Net, info: &WeightsInfo) -> Result<(), PolicyError> {
    net.check_tensors(info).map_err(|e| {
        PolicyError::new(format!("router `{path}`: {e}; a CITER router is the state dict of its confidence network"))
    })?;
    match info.shape("linear.weight")? {
        [1, _] => Ok(()),
        shape => {
            Err(PolicyError::new(format!("router `{path}`: linear.weight has shape {shape:?}; it must have one row")))
        }
    }
}

impl Policy for Citer {
    const NAME: &'static str = "citer";
    const SETTINGS_SCHEMA: &'static str = r#"{
        "type": "object",
        "additionalProperties": false,
        "required": ["router"],
        "properties": {
            "router": {
                "description": "Weights of the router: its state dict as .pth, .pt or .safetensors.",
                "type": "string", "minLength": 1
            },
            "threshold": {
                "description": "Confidence below which the large model writes.",
                "type": "number", "minimum": 0, "maximum": 1, "default": 0.98
            }
        }
    }"#;

    fn create(ctx: &Context<'_>, settings: &str) -> Result<Self, PolicyError> {
        let Settings { router, threshold } =
            serde_json::from_str(settings).map_err(|e| PolicyError::new(e.to_string()))?;
        if !(0.0..=1.0).contains(&threshold) {
            return Err(PolicyError::new(format!("threshold is {threshold}; set it to 0 to 1")));
        }
        // The large model never hands over by itself: it would write every answer alone.
        let side = match ctx.side_from_small(Self::NAME)? {
            Side::Large { .. } => At::Large,
            Side::Small { large } => {
                let net = confidence(&router);
                check(&router, &net, &ctx.weights(&router)?)?;
                At::Small { large, threshold, net }
            }
        };
        Ok(Self { side })
    }

    fn requirements(&self) -> Requirements {
        let mut needs = Requirements::default();
        if let At::Small { net, .. } = &self.side {
            needs.nets.push(net.clone());
        }
        needs
    }

    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) {
        let At::Small { large, threshold, .. } = &self.side else { return };
        for (decision, &score) in out.iter_mut().zip(batch.signals.net_scores) {
            // NaN, "no signal", is below no threshold: the small model goes on.
            if f64::from(score) < *threshold {
                *decision = Decision::to(*large);
            }
        }
    }

    fn send(&mut self, _request: &RequestView<'_>, _to: ModelIndex) -> Handoff {
        Handoff::drop_candidate().budget(1)
    }
}

export_policy!(Citer);

#[cfg(test)]
mod tests;
