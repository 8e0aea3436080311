//! Weights files of routers for a small model with a hidden state of 8 and an embedding of 6.

use serde_json::{Value, json};
use tokenrouter_plugin_api::net::{TensorInfo, WeightsInfo};

/// A weights file under construction.
#[derive(Clone)]
pub struct Router {
    pub tensors: Vec<TensorInfo>,
    pub meta: Value,
}

impl Router {
    /// A file of class `model_type` with a backbone for `init_args.hidden_dims` and `outputs` classes.
    pub fn new(model_type: &str, init_args: Value, outputs: u64) -> Self {
        let dims: Vec<u64> = serde_json::from_value(init_args["hidden_dims"].clone()).unwrap();
        let common_args = json!({"threshold": 0.625, "input_type": ["hidden_states"]});
        let meta = json!({"model_type": model_type, "init_args": init_args, "common_args": common_args});
        let mut file = Self { tensors: Vec::new(), meta };
        file.linear("backbone.input_projection", dims[0], dims[0]);
        for (i, &width) in dims.iter().enumerate() {
            let next = dims.get(i + 1).copied().unwrap_or(width);
            file.norm(&format!("backbone.blocks.{i}.layer_norm"), width);
            file.linear(&format!("backbone.blocks.{i}.mlp.0"), 4 * width, width);
            file.linear(&format!("backbone.blocks.{i}.mlp.3"), next, 4 * width);
            if next != width {
                file.linear(&format!("backbone.blocks.{i}.dim_change"), next, width);
            }
        }
        let last = *dims.last().unwrap();
        file.norm("backbone.output_layer.0", last);
        file.linear("backbone.output_layer.1", outputs, last);
        file
    }

    pub fn tensor(&mut self, name: &str, shape: &[u64]) -> &mut Self {
        self.tensors.retain(|tensor| tensor.name != name);
        self.tensors.push(TensorInfo { name: name.into(), shape: shape.into() });
        self
    }

    pub fn linear(&mut self, prefix: &str, outputs: u64, inputs: u64) -> &mut Self {
        self.tensor(&format!("{prefix}.weight"), &[outputs, inputs]).tensor(&format!("{prefix}.bias"), &[outputs])
    }

    pub fn norm(&mut self, prefix: &str, width: u64) -> &mut Self {
        self.tensor(&format!("{prefix}.weight"), &[width]).tensor(&format!("{prefix}.bias"), &[width])
    }

    pub fn remove(&mut self, name: &str) -> &mut Self {
        let before = self.tensors.len();
        self.tensors.retain(|tensor| tensor.name != name);
        assert_eq!(self.tensors.len() + 1, before, "no tensor {name}");
        self
    }

    pub fn info(&self) -> WeightsInfo {
        WeightsInfo::new(self.tensors.clone(), self.meta.to_string())
    }
}

/// As the published routers: hidden state, token and 10 logits, two blocks of equal width.
pub fn published() -> Router {
    let args = json!({
        "pretrained_model_name": "small", "hidden_states_size": 8, "logits_size": 10, "hidden_dims": [16, 16],
        "expansion_factor": 4, "dropout_rate": 0.1, "use_position_embedding": false, "normalize_input": false,
        "freeze_lm_head": true
    });
    let mut file = Router::new("HiddenStatesTokenLMHeadLogitsClassifier", args, 1);
    file.linear("logits_projection", 8, 10).linear("combined_projection", 16, 8 + 6 + 8);
    file
}

/// Hidden states of three positions.
pub fn multi_hidden() -> Router {
    let args = json!({"hidden_states_size": 24, "hidden_dims": [16], "neural_window_size": 3});
    let mut file = Router::new("MultiHiddenStatesClassifier", args, 1);
    file.linear("hidden_states_projection", 16, 24);
    file
}
