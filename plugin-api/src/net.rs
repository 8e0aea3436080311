//! Router networks: a policy describes a network, the host runs it on the model's device inside the
//! forward, and only its scores leave the device.
//!
//! The description is a closed graph of operations over what the model knows of one row; see [`Op`].
//! Weights stay in a file that the host reads, see [`Context::weights`](crate::Context::weights).

use std::collections::BTreeSet;

use crate::PolicyError;

/// Index of a node among the nodes of its net.
pub type NodeIndex = u32;

/// A router network. The value of its last node is the score: `width` numbers a row, usually one.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Net {
    /// Name of the net within the policy, for messages and recorded signals.
    pub name: String,
    /// The weights file, as in [`Context::weights`](crate::Context::weights).
    pub weights: String,
    /// Operations. Inputs of a node come before it. Nodes without a reader are an error, except for
    /// the last.
    pub nodes: Vec<Node>,
}

/// One operation and what it reads.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Node {
    /// What it computes.
    pub op: Op,
    /// Its arguments.
    pub inputs: Vec<NodeIndex>,
}

/// The operations. All are on f32 vectors, one a row; `[n]` is a vector of n numbers.
///
/// `back` says how many positions before the row: 0 is the row itself, 1 the row before it, which
/// predicted the token that this row reads. Before the first position of the prompt there are zeros.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Op {
    /// The model's last hidden state after the final norm: `[hidden size]`. No input.
    Hidden {
        /// Positions before the row.
        back: u32,
    },
    /// The `count` largest raw logits, descending: `[count]`. No input.
    TopLogits {
        /// How many.
        count: u32,
        /// Positions before the row.
        back: u32,
    },
    /// The candidate's row of the model's input embedding: `[embedding size]`. No input.
    TokenEmbedding,
    /// The candidate's row of a stored matrix `[vocabulary, n]`: `[n]`. No input.
    Embedding {
        /// Name of the tensor.
        weight: String,
    },
    /// A row of a stored matrix `[rows, n]`: `[n]`. No input.
    Row {
        /// Name of the tensor.
        tensor: String,
        /// Which row.
        row: u32,
    },
    /// `w x + b`, with `w` a stored matrix `[outputs, inputs]` and `b` a stored vector: `[outputs]`.
    Linear {
        /// Name of `w`.
        weight: String,
        /// Name of `b`, if there is one.
        bias: Option<String>,
    },
    /// Batch normalisation with running statistics, from the tensors `prefix.weight`, `.bias`,
    /// `.running_mean` and `.running_var`. Its input must be a `Linear` that nothing else reads: the
    /// host folds it into that layer when it loads the net.
    BatchNorm {
        /// Common prefix of the tensors' names.
        prefix: String,
        /// Added to the variance.
        eps: f32,
    },
    /// `(x - mean) / sqrt(variance + eps) * w + b`.
    LayerNorm {
        /// Name of `w`.
        weight: String,
        /// Name of `b`.
        bias: String,
        /// Added to the variance.
        eps: f32,
    },
    /// `x / sqrt(mean of squares + eps) * w`.
    RmsNorm {
        /// Name of `w`.
        weight: String,
        /// Added to the mean of squares.
        eps: f32,
    },
    /// The inputs one after the other.
    Concat,
    /// The sum of the inputs, all of the same width.
    Add,
    /// `exp(x) / sum exp(x)`.
    Softmax,
    /// `x Φ(x)` with the exact normal distribution function.
    Gelu,
    /// `x sigmoid(x)`.
    Silu,
    /// `max(x, 0)`.
    Relu,
    /// Hyperbolic tangent.
    Tanh,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// The `count` largest values, descending: `[count]`.
    TopK {
        /// How many.
        count: u32,
    },
}

impl Net {
    /// A net without nodes; add them with its methods, each of which answers with its node. Names of
    /// tensors are given by prefix, as PyTorch names the tensors of a module.
    pub fn new(name: impl Into<String>, weights: impl Into<String>) -> Self {
        Self { name: name.into(), weights: weights.into(), nodes: Vec::new() }
    }

    /// Add any operation.
    pub fn push(&mut self, op: Op, inputs: &[NodeIndex]) -> NodeIndex {
        self.nodes.push(Node { op, inputs: inputs.to_vec() });
        self.nodes.len() as NodeIndex - 1
    }

    /// [`Op::Hidden`] of the row.
    pub fn hidden(&mut self) -> NodeIndex {
        self.push(Op::Hidden { back: 0 }, &[])
    }

    /// [`Op::TopLogits`] of the row.
    pub fn top_logits(&mut self, count: u32) -> NodeIndex {
        self.push(Op::TopLogits { count, back: 0 }, &[])
    }

    /// [`Op::TokenEmbedding`].
    pub fn token_embedding(&mut self) -> NodeIndex {
        self.push(Op::TokenEmbedding, &[])
    }

    /// [`Op::Linear`] with `prefix.weight` and `prefix.bias`.
    pub fn linear(&mut self, input: NodeIndex, prefix: &str) -> NodeIndex {
        self.push(Op::Linear { weight: format!("{prefix}.weight"), bias: Some(format!("{prefix}.bias")) }, &[input])
    }

    /// [`Op::LayerNorm`] with `prefix.weight`, `prefix.bias` and PyTorch's default eps, 1e-5.
    pub fn layer_norm(&mut self, input: NodeIndex, prefix: &str) -> NodeIndex {
        let (weight, bias) = (format!("{prefix}.weight"), format!("{prefix}.bias"));
        self.push(Op::LayerNorm { weight, bias, eps: 1e-5 }, &[input])
    }

    /// [`Op::BatchNorm`] with PyTorch's default eps, 1e-5.
    pub fn batch_norm(&mut self, input: NodeIndex, prefix: &str) -> NodeIndex {
        self.push(Op::BatchNorm { prefix: prefix.to_owned(), eps: 1e-5 }, &[input])
    }

    /// [`Op::Gelu`].
    pub fn gelu(&mut self, input: NodeIndex) -> NodeIndex {
        self.push(Op::Gelu, &[input])
    }

    /// [`Op::Relu`].
    pub fn relu(&mut self, input: NodeIndex) -> NodeIndex {
        self.push(Op::Relu, &[input])
    }

    /// [`Op::Sigmoid`].
    pub fn sigmoid(&mut self, input: NodeIndex) -> NodeIndex {
        self.push(Op::Sigmoid, &[input])
    }

    /// [`Op::Softmax`].
    pub fn softmax(&mut self, input: NodeIndex) -> NodeIndex {
        self.push(Op::Softmax, &[input])
    }

    /// [`Op::Concat`].
    pub fn concat(&mut self, inputs: &[NodeIndex]) -> NodeIndex {
        self.push(Op::Concat, inputs)
    }

    /// [`Op::Add`].
    pub fn add(&mut self, inputs: &[NodeIndex]) -> NodeIndex {
        self.push(Op::Add, inputs)
    }
}

impl Op {
    /// Names of the tensors that it reads.
    pub fn tensors(&self) -> Vec<String> {
        match self {
            Self::Embedding { weight } | Self::RmsNorm { weight, .. } => vec![weight.clone()],
            Self::Row { tensor, .. } => vec![tensor.clone()],
            Self::Linear { weight, bias } => std::iter::once(weight).chain(bias).cloned().collect(),
            Self::LayerNorm { weight, bias, .. } => vec![weight.clone(), bias.clone()],
            Self::BatchNorm { prefix, .. } => {
                ["weight", "bias", "running_mean", "running_var"].map(|part| format!("{prefix}.{part}")).into()
            }
            _ => Vec::new(),
        }
    }
}

impl Net {
    /// The file holds the tensors that the net reads and no others (a batch normalisation's
    /// `num_batches_tracked` aside, which inference does not use): else the file is of another network, and
    /// reading a part of it would give wrong scores. The error names up to three tensors of each kind.
    pub fn check_tensors(&self, file: &WeightsInfo) -> Result<(), PolicyError> {
        let needed: BTreeSet<String> = self.nodes.iter().flat_map(|node| node.op.tensors()).collect();
        let held = file.tensors.iter().map(|tensor| &tensor.name);
        let held: BTreeSet<String> = held.filter(|name| !name.ends_with(".num_batches_tracked")).cloned().collect();
        let few = |from: &BTreeSet<String>, without: &BTreeSet<String>| {
            let names: Vec<&str> = from.difference(without).map(String::as_str).collect();
            match names.len() {
                0..=3 => names.join(", "),
                all => format!("{} and {} more", names[..3].join(", "), all - 3),
            }
        };
        let (missing, unknown) = (few(&needed, &held), few(&held, &needed));
        let faults: Vec<String> = [
            (!missing.is_empty()).then(|| format!("lacks {missing}")),
            (!unknown.is_empty()).then(|| format!("has {unknown}, which the network does not read")),
        ]
        .into_iter()
        .flatten()
        .collect();
        if faults.is_empty() { Ok(()) } else { Err(PolicyError::new(format!("the file {}", faults.join(" and ")))) }
    }
}

/// A tensor of a weights file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name; for a PyTorch checkpoint that nests a `state_dict`, the name within it.
    pub name: String,
    /// Its shape; empty for a scalar.
    pub shape: Vec<u64>,
}

/// What a weights file holds, without the numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WeightsInfo {
    /// Its tensors, by name in ascending order.
    pub tensors: Vec<TensorInfo>,
    /// Everything else that is stored with them, as a JSON object: the other entries of a PyTorch
    /// checkpoint, or the content of a `.json` file of the same name beside a safetensors file.
    pub metadata: String,
}

impl WeightsInfo {
    /// For hosts and tests. `tensors` may have any order.
    pub fn new(mut tensors: Vec<TensorInfo>, metadata: impl Into<String>) -> Self {
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        Self { tensors, metadata: metadata.into() }
    }

    /// Shape of the tensor `name`, or an error that names it.
    pub fn shape(&self, name: &str) -> Result<&[u64], PolicyError> {
        self.get(name).ok_or_else(|| PolicyError::new(format!("the weights have no tensor `{name}`")))
    }

    /// Shape of the tensor `name`, if there is one.
    pub fn get(&self, name: &str) -> Option<&[u64]> {
        let at = self.tensors.binary_search_by(|tensor| tensor.name.as_str().cmp(name)).ok()?;
        Some(&self.tensors[at].shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_another_network_is_noticed() {
        let mut net = Net::new("n", "w");
        let x = net.hidden();
        let x = net.linear(x, "a");
        net.batch_norm(x, "b");
        let file = |names: &[&str]| {
            let tensor = |name: &&str| TensorInfo { name: name.to_string(), shape: vec![] };
            WeightsInfo::new(names.iter().map(tensor).collect(), "{}")
        };
        let all =
            ["a.weight", "a.bias", "b.weight", "b.bias", "b.running_mean", "b.running_var", "b.num_batches_tracked"];
        assert_eq!(net.check_tensors(&file(&all)), Ok(()));
        assert_eq!(net.check_tensors(&file(&all[1..])).unwrap_err().message, "the file lacks a.weight");
        assert_eq!(
            net.check_tensors(&file(&["a.bias", "c", "d", "e", "f"])).unwrap_err().message,
            "the file lacks a.weight, b.bias, b.running_mean and 2 more and has c, d, e and 1 more, which the network \
             does not read"
        );
    }
}
