//! R2R's router networks: which operations each published class computes, over which tensors.

use std::collections::BTreeSet;

use tokenrouter_plugin_api::PolicyError;
use tokenrouter_plugin_api::net::{Net, NodeIndex, Op, WeightsInfo};

use crate::checkpoint::{Checkpoint, InitArgs};

/// Name of the token embedding, which a file may leave to the model.
const TOKEN_EMBEDDINGS: &str = "token_embeddings.weight";

/// Most positions that a router may read. R2R's have 3.
const MAX_WINDOW: u32 = 64;

/// A router as the host shall run it.
#[derive(Clone, Debug, PartialEq)]
pub struct Router {
    /// The network. Its last value is the probability that the candidate diverges: the only class of a
    /// binary router, the last of a three-class one.
    pub net: Net,
    /// The threshold stored with it.
    pub threshold: Option<f64>,
    /// Its class.
    pub model_type: &'static str,
    /// Whether its class reads a window of positions.
    pub multi: bool,
    /// Positions that it reads: 1 for a class without a window.
    pub window: u32,
    /// Whether it was trained with a token embedding of its own that the file does not hold.
    pub lacks_embedding: bool,
}

/// What a class reads, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Logits,
    Hidden,
    HiddenLmHead,
    /// Hidden state with, in this order, the token and the logits.
    Combined {
        token: bool,
        logits: bool,
    },
    MultiLogits,
    MultiHidden,
}

const CLASSES: [(&str, Class); 8] = [
    ("LogitsClassifier", Class::Logits),
    ("HiddenStatesClassifier", Class::Hidden),
    ("HiddenStatesClassifierWithLMHead", Class::HiddenLmHead),
    ("HiddenStatesTokenLMHeadClassifier", Class::Combined { token: true, logits: false }),
    ("HiddenStatesTokenLMHeadLogitsClassifier", Class::Combined { token: true, logits: true }),
    ("HiddenStatesLogitsClassifier", Class::Combined { token: false, logits: true }),
    ("MultiLogitsClassifier", Class::MultiLogits),
    ("MultiHiddenStatesClassifier", Class::MultiHidden),
];

impl Router {
    /// The router in the weights file at `path`, which holds `info`.
    pub fn new(path: &str, info: &WeightsInfo) -> Result<Self, PolicyError> {
        Self::build(path, info).map_err(|e| PolicyError::new(format!("router `{path}`: {e}")))
    }

    fn build(path: &str, info: &WeightsInfo) -> Result<Self, PolicyError> {
        let checkpoint = Checkpoint::read(&info.metadata)?;
        let asked = &checkpoint.model_type;
        let &(model_type, class) =
            CLASSES.iter().find(|(name, _)| name.eq_ignore_ascii_case(asked)).ok_or_else(|| {
                let names: Vec<_> = CLASSES.iter().map(|(name, _)| *name).collect();
                PolicyError::new(format!("model_type `{asked}` is not supported; supported are {}", names.join(", ")))
            })?;
        let multi = matches!(class, Class::MultiLogits | Class::MultiHidden);
        let args = &checkpoint.init_args;
        let window = if multi { args.neural_window_size } else { 1 };
        if !(1..=MAX_WINDOW).contains(&window) {
            return Err(PolicyError::new(format!(
                "init_args.neural_window_size is {window}; it must be 1 to {MAX_WINDOW}"
            )));
        }
        let mut builder = Builder { net: Net::new("r2r", path), info, args, window };
        let features = builder.features(class)?;
        builder.backbone(features)?;
        let net = builder.net;
        net.check_tensors(info)
            .map_err(|e| PolicyError::new(format!("{e}; it does not fit its model_type and init_args")))?;
        let own_embedding = matches!(class, Class::Combined { token: true, .. }) && !args.freeze_lm_head;
        let lacks_embedding = own_embedding && info.get(TOKEN_EMBEDDINGS).is_none();
        Ok(Self { net, threshold: checkpoint.threshold()?, model_type, multi, window, lacks_embedding })
    }
}

struct Builder<'a> {
    net: Net,
    info: &'a WeightsInfo,
    args: &'a InitArgs,
    window: u32,
}

impl Builder<'_> {
    /// What goes into the backbone.
    fn features(&mut self, class: Class) -> Result<NodeIndex, PolicyError> {
        Ok(match class {
            Class::Logits | Class::MultiLogits => {
                let logits = self.logits()?;
                self.net.linear(logits, "logits_projection")
            }
            Class::Hidden => {
                let hidden = self.hidden("layer_norm");
                self.net.linear(hidden, "hidden_states_projection")
            }
            Class::MultiHidden => {
                self.check_norm_of_window()?;
                let hidden = self.hidden("layer_norm");
                self.net.linear(hidden, "hidden_states_projection")
            }
            Class::HiddenLmHead => {
                let hidden = self.hidden("layer_norm");
                let mut logits = self.net.linear(hidden, "lm_head");
                if let Some(count) = self.args.topk {
                    logits = self.net.push(Op::TopK { count }, &[logits]);
                }
                self.net.linear(logits, "post_lm_projection")
            }
            Class::Combined { token, logits } => {
                let mut parts = vec![self.hidden("layer_norm_hidden_states")];
                if token {
                    parts.push(self.token());
                }
                if logits {
                    let logits = self.logits()?;
                    parts.push(self.net.linear(logits, "logits_projection"));
                }
                let combined = self.net.concat(&parts);
                self.net.linear(combined, "combined_projection")
            }
        })
    }

    /// The hidden states of the window, oldest first, each normalised by itself.
    fn hidden(&mut self, norm: &str) -> NodeIndex {
        let parts: Vec<_> = (0..self.window)
            .rev()
            .map(|back| {
                let hidden = self.net.push(Op::Hidden { back }, &[]);
                if self.args.normalize_input { self.net.layer_norm(hidden, norm) } else { hidden }
            })
            .collect();
        self.joined(&parts)
    }

    /// The largest logits of the window, oldest first, each position turned to probabilities by itself.
    fn logits(&mut self) -> Result<NodeIndex, PolicyError> {
        let [_, inputs] = self.matrix("logits_projection.weight")?;
        if let Some(size) = self.args.logits_size.filter(|&size| size != inputs) {
            return Err(PolicyError::new(format!(
                "init_args.logits_size is {size}, but logits_projection.weight reads {inputs} values; \
                 the file is damaged"
            )));
        }
        let window = u64::from(self.window);
        let count = u32::try_from(inputs / window).ok().filter(|_| inputs % window == 0 && inputs > 0);
        let count = count.ok_or_else(|| {
            PolicyError::new(format!(
                "logits_projection.weight reads {inputs} values, which is no whole number of logits for each \
                 of {window} positions; check init_args.neural_window_size"
            ))
        })?;
        let parts: Vec<_> = (0..self.window)
            .rev()
            .map(|back| {
                let logits = self.net.push(Op::TopLogits { count, back }, &[]);
                if self.args.normalize_input { self.net.softmax(logits) } else { logits }
            })
            .collect();
        Ok(self.joined(&parts))
    }

    /// The candidate's embedding: the file's own, or else the model's.
    fn token(&mut self) -> NodeIndex {
        let token = match self.info.get(TOKEN_EMBEDDINGS) {
            Some(_) => self.net.push(Op::Embedding { weight: TOKEN_EMBEDDINGS.into() }, &[]),
            None => self.net.token_embedding(),
        };
        if self.args.normalize_input { self.net.layer_norm(token, "layer_norm_token") } else { token }
    }

    fn joined(&mut self, parts: &[NodeIndex]) -> NodeIndex {
        match parts {
            [only] => *only,
            _ => self.net.concat(parts),
        }
    }

    /// Blocks of `x + W3 gelu(W0 norm(x))` and the output, the score behind it included.
    fn backbone(&mut self, features: NodeIndex) -> Result<(), PolicyError> {
        self.check_blocks()?;
        let mut x = self.net.linear(features, "backbone.input_projection");
        if self.args.use_position_embedding {
            // The routers judge single rows, which all have position 0.
            let row = Op::Row { tensor: "backbone.position_embedding".into(), row: 0 };
            let position = self.net.push(row, &[]);
            x = self.net.add(&[x, position]);
        }
        let dims = &self.args.hidden_dims;
        for (i, &width) in dims.iter().enumerate() {
            let block = format!("backbone.blocks.{i}");
            let inner = self.net.layer_norm(x, &format!("{block}.layer_norm"));
            let inner = self.net.linear(inner, &format!("{block}.mlp.0"));
            let inner = self.net.gelu(inner);
            let inner = self.net.linear(inner, &format!("{block}.mlp.3"));
            let widens = dims.get(i + 1).is_some_and(|&next| next != width);
            let residual = if widens { self.net.linear(x, &format!("{block}.dim_change")) } else { x };
            x = self.net.add(&[residual, inner]);
        }
        let x = self.net.layer_norm(x, "backbone.output_layer.0");
        let x = self.net.linear(x, "backbone.output_layer.1");
        match self.matrix("backbone.output_layer.1.weight")? {
            [1, _] => self.net.sigmoid(x),
            [3, _] => self.net.softmax(x),
            [outputs, _] => {
                return Err(PolicyError::new(format!(
                    "backbone.output_layer.1.weight has {outputs} outputs; supported are 1 (divergent or not) \
                     and 3 (match, mismatch, divergent)"
                )));
            }
        };
        Ok(())
    }

    /// The blocks in the file are those of `hidden_dims`.
    fn check_blocks(&self) -> Result<(), PolicyError> {
        let dims = &self.args.hidden_dims;
        let names = self.info.tensors.iter().filter_map(|tensor| tensor.name.strip_prefix("backbone.blocks."));
        let blocks: BTreeSet<&str> = names.filter_map(|rest| rest.split('.').next()).collect();
        if dims.is_empty() || blocks.len() != dims.len() {
            return Err(PolicyError::new(format!(
                "init_args.hidden_dims is {dims:?}, one block each, but the file has {} blocks (backbone.blocks.*)",
                blocks.len()
            )));
        }
        for (i, &width) in dims.iter().enumerate() {
            let name = format!("backbone.blocks.{i}.layer_norm.weight");
            let shape = self.info.shape(&name)?;
            if shape != [width] {
                return Err(PolicyError::new(format!(
                    "init_args.hidden_dims[{i}] is {width}, but {name} has shape {shape:?}"
                )));
            }
        }
        Ok(())
    }

    /// With `normalize_input` each position is normalised by itself, so the norm is one position wide.
    fn check_norm_of_window(&self) -> Result<(), PolicyError> {
        if !self.args.normalize_input {
            return Ok(());
        }
        let [_, inputs] = self.matrix("hidden_states_projection.weight")?;
        let shape = self.info.shape("layer_norm.weight")?;
        let window = u64::from(self.window);
        if inputs % window != 0 || shape != [inputs / window] {
            return Err(PolicyError::new(format!(
                "layer_norm.weight has shape {shape:?}, but each of {window} positions has 1/{window} of the {inputs} \
                 values that hidden_states_projection.weight reads; R2R's class cannot run with normalize_input \
                 and a window either"
            )));
        }
        Ok(())
    }

    fn matrix(&self, name: &str) -> Result<[u64; 2], PolicyError> {
        let shape = self.info.shape(name)?;
        shape.try_into().map_err(|_| PolicyError::new(format!("{name} has shape {shape:?}; it must be a matrix")))
    }
}
