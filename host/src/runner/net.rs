//! A router network with its weights, checked and ready for a runner.

use std::any::Any;

use sha2::{Digest, Sha256};
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

/// Stands for what a [`Net`] computes, whatever it is called and wherever its weights were read.
pub type NetDigest = [u8; 32];

/// A net made ready for one kind of runner, away from the runner's thread.
pub struct ReadyNet(Box<dyn Any + Send>);

impl ReadyNet {
    pub fn new<N: Any + Send>(net: N) -> Self {
        Self(Box::new(net))
    }

    /// What it was made of, if that is an `N`.
    pub fn take<N: Any + Send>(self) -> Option<N> {
        self.0.downcast().ok().map(|net| *net)
    }
}

/// Makes nets ready for one kind of runner.
pub type MakeReady = fn(Net) -> ReadyNet;

impl Net {
    /// The same for nets of the same nodes with the same numbers.
    pub fn digest(&self) -> NetDigest {
        let mut hash = Sha256::new();
        for node in &self.nodes {
            let (tensors, kind): (&[&[f32]], _) = match &node.op {
                Op::Embedding { table } => (&[table], "embedding".into()),
                Op::Constant { value } => (&[value], "constant".into()),
                Op::Linear { weight, bias } => (&[weight, bias], "linear".into()),
                Op::LayerNorm { weight, bias, eps } => (&[weight, bias], format!("layer_norm {}", eps.to_bits())),
                Op::RmsNorm { weight, eps } => (&[weight], format!("rms_norm {}", eps.to_bits())),
                plain => (&[], format!("{plain:?}")),
            };
            hash.update(format!("{kind} {:?} {}\n", node.inputs, node.width));
            for numbers in tensors {
                hash.update((numbers.len() as u64).to_le_bytes());
                let mut bytes = [0; 4096];
                for part in numbers.chunks(bytes.len() / 4) {
                    bytes.chunks_exact_mut(4).zip(part).for_each(|(to, x)| to.copy_from_slice(&x.to_le_bytes()));
                    hash.update(&bytes[..part.len() * 4]);
                }
            }
        }
        hash.finalize().into()
    }

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
