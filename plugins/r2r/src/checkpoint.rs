//! What a router's weights file says about itself: the entries that R2R's training stores beside the
//! tensors. Their defaults are those of the network classes.

use serde::Deserialize;
use tokenrouter_plugin_api::PolicyError;

/// The entries that matter for inference.
#[derive(Deserialize)]
pub struct Checkpoint {
    /// The network's class.
    pub model_type: String,
    /// What the class was made with.
    #[serde(default)]
    pub init_args: InitArgs,
    #[serde(default)]
    common_args: CommonArgs,
}

/// Arguments of a network class.
#[derive(Deserialize)]
#[serde(default)]
pub struct InitArgs {
    /// Width of the backbone before each block.
    pub hidden_dims: Vec<u64>,
    /// Whether a position embedding is added after the backbone's input projection.
    pub use_position_embedding: bool,
    /// Whether hidden states and embeddings are layer-normalised, and logits turned to probabilities.
    pub normalize_input: bool,
    /// Logits that `HiddenStatesClassifierWithLMHead` keeps; all without.
    pub topk: Option<u32>,
    /// Logits that the router reads, over all positions.
    pub logits_size: Option<u64>,
    /// Positions that a `Multi…` router reads.
    pub neural_window_size: u32,
    /// Whether the token embedding stayed that of the small model.
    pub freeze_lm_head: bool,
}

impl Default for InitArgs {
    fn default() -> Self {
        Self {
            hidden_dims: vec![256, 512, 256],
            use_position_embedding: false,
            normalize_input: false,
            topk: None,
            logits_size: None,
            neural_window_size: 3,
            freeze_lm_head: false,
        }
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct CommonArgs {
    threshold: Option<f64>,
}

impl Checkpoint {
    /// Read the metadata of a weights file.
    pub fn read(metadata: &str) -> Result<Self, PolicyError> {
        serde_json::from_str(metadata).map_err(|e| {
            // Its place is one in a text that nobody sees.
            let e = e.to_string();
            let e = e.split(" at line ").next().unwrap_or_default();
            PolicyError::new(format!(
                "the file, or the .json file beside it, cannot be used ({e}); a router needs model_type, init_args and \
                 common_args: take a .pt file as R2R saves it, or put them into a .json file of the same name \
                 beside the .safetensors file"
            ))
        })
    }

    /// The threshold found in training, if the file has one.
    pub fn threshold(&self) -> Result<Option<f64>, PolicyError> {
        match self.common_args.threshold {
            Some(threshold) if !(0.0..=1.0).contains(&threshold) => {
                Err(PolicyError::new(format!("common_args.threshold is {threshold}; it must be 0 to 1")))
            }
            threshold => Ok(threshold),
        }
    }
}
