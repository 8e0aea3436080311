//! A router network with its weights, checked and ready for a runner.

use tokenrouter_plugin_api::net::NodeIndex;

/// Index of a net that a runner has loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NetId(pub u32);

/// A network over what a model knows of one row. Every shape fits; inputs of a node come before it.
#[derive(Clone, Debug, PartialEq)]
pub struct Net {
    /// Policy and net, for messages.
    pub name: String,
    pub nodes: Vec<Node>,
}

impl Net {
    /// Numbers of the score: the width of the last node.
    pub fn width(&self) -> usize {
        self.nodes.last().map_or(0, |node| node.width)
    }

    /// Bytes of its tensors.
    pub fn bytes(&self) -> u64 {
        let numbers = |node: &Node| match &node.op {
            Op::Embedding { table } => table.len(),
            Op::Constant { value } => value.len(),
            Op::Linear { weight, bias } | Op::LayerNorm { weight, bias, .. } => weight.len() + bias.len(),
            Op::RmsNorm { weight, .. } => weight.len(),
            _ => 0,
        };
        self.nodes.iter().map(|node| (numbers(node) * size_of::<f32>()) as u64).sum()
    }

    /// How many positions before the row the net looks back.
    pub fn back(&self) -> u32 {
        let back = |node: &Node| match node.op {
            Op::Hidden { back } | Op::TopLogits { back, .. } => back,
            _ => 0,
        };
        self.nodes.iter().map(back).max().unwrap_or(0)
    }
}

/// One operation of a [`Net`].
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    pub op: Op,
    pub inputs: Vec<NodeIndex>,
    /// Numbers a row of its value.
    pub width: usize,
}

/// The operations of [`tokenrouter_plugin_api::net::Op`], with the tensors in place of their names.
/// Matrices are row-major.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    Hidden {
        back: u32,
    },
    TopLogits {
        count: u32,
        back: u32,
    },
    TokenEmbedding,
    /// The candidate's row of `[vocabulary, width]`.
    Embedding {
        table: Vec<f32>,
    },
    Constant {
        value: Vec<f32>,
    },
    /// `weight` is `[width, inputs]`; `bias` is empty for none.
    Linear {
        weight: Vec<f32>,
        bias: Vec<f32>,
    },
    LayerNorm {
        weight: Vec<f32>,
        bias: Vec<f32>,
        eps: f32,
    },
    RmsNorm {
        weight: Vec<f32>,
        eps: f32,
    },
    Concat,
    Add,
    Softmax,
    Gelu,
    Silu,
    Relu,
    Tanh,
    Sigmoid,
    TopK {
        count: u32,
    },
}
