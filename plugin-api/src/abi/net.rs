//! Mirrors of router networks and of what a weights file holds.

use abi_stable::{
    StableAbi,
    std_types::{RString, RVec},
};

use crate::net::{Net, Node, Op, TensorInfo, WeightsInfo};

#[repr(C)]
#[derive(StableAbi)]
pub struct RawNet {
    pub name: RString,
    pub weights: RString,
    pub nodes: RVec<RawNode>,
}

/// An operation: its number, the nodes it reads, the tensors it names, and its numbers.
#[repr(C)]
#[derive(StableAbi)]
pub struct RawNode {
    pub inputs: RVec<u32>,
    pub tensors: RVec<RString>,
    pub kind: u32,
    /// `count` or `row`; 0 where the operation has none.
    pub number: u32,
    pub back: u32,
    pub eps: f32,
}

impl From<Net> for RawNet {
    fn from(from: Net) -> Self {
        let Net { name, weights, nodes } = from;
        Self { name: name.into(), weights: weights.into(), nodes: nodes.into_iter().map(RawNode::from).collect() }
    }
}

impl TryFrom<RawNet> for Net {
    type Error = String;
    fn try_from(raw: RawNet) -> Result<Self, String> {
        let name = raw.name.to_string();
        let node = |(at, raw)| {
            Node::try_from(raw).map_err(|kind| format!("net `{name}`: node {at} is an operation ({kind}) unknown here"))
        };
        let nodes = raw.nodes.into_iter().enumerate().map(node).collect::<Result<_, _>>()?;
        Ok(Self { name, weights: raw.weights.to_string(), nodes })
    }
}

impl From<Node> for RawNode {
    fn from(from: Node) -> Self {
        let (mut number, mut back, mut eps) = (0, 0, 0.0);
        let (kind, tensors) = match from.op {
            Op::Hidden { back: b } => {
                back = b;
                (0, vec![])
            }
            Op::TopLogits { count, back: b } => {
                (number, back) = (count, b);
                (1, vec![])
            }
            Op::TokenEmbedding => (2, vec![]),
            Op::Embedding { weight } => (3, vec![weight]),
            Op::Row { tensor, row } => {
                number = row;
                (4, vec![tensor])
            }
            Op::Linear { weight, bias } => (5, std::iter::once(weight).chain(bias).collect()),
            Op::BatchNorm { prefix, eps: e } => {
                eps = e;
                (6, vec![prefix])
            }
            Op::LayerNorm { weight, bias, eps: e } => {
                eps = e;
                (7, vec![weight, bias])
            }
            Op::RmsNorm { weight, eps: e } => {
                eps = e;
                (8, vec![weight])
            }
            Op::Concat => (9, vec![]),
            Op::Add => (10, vec![]),
            Op::Softmax => (11, vec![]),
            Op::Gelu => (12, vec![]),
            Op::Silu => (13, vec![]),
            Op::Relu => (14, vec![]),
            Op::Tanh => (15, vec![]),
            Op::Sigmoid => (16, vec![]),
            Op::TopK { count } => {
                number = count;
                (17, vec![])
            }
        };
        let tensors = tensors.into_iter().map(RString::from).collect();
        Self { inputs: from.inputs.into(), tensors, kind, number, back, eps }
    }
}

impl TryFrom<RawNode> for Node {
    /// The number of an unknown operation.
    type Error = u32;
    fn try_from(raw: RawNode) -> Result<Self, u32> {
        let RawNode { inputs, tensors, kind, number, back, eps } = raw;
        let mut tensors = tensors.into_iter().map(String::from);
        // A tensor that is missing has no name: the host then says that there is no tensor ``.
        let mut tensor = || tensors.next().unwrap_or_default();
        let op = match kind {
            0 => Op::Hidden { back },
            1 => Op::TopLogits { count: number, back },
            2 => Op::TokenEmbedding,
            3 => Op::Embedding { weight: tensor() },
            4 => Op::Row { tensor: tensor(), row: number },
            5 => Op::Linear { weight: tensor(), bias: tensors.next() },
            6 => Op::BatchNorm { prefix: tensor(), eps },
            7 => Op::LayerNorm { weight: tensor(), bias: tensor(), eps },
            8 => Op::RmsNorm { weight: tensor(), eps },
            9 => Op::Concat,
            10 => Op::Add,
            11 => Op::Softmax,
            12 => Op::Gelu,
            13 => Op::Silu,
            14 => Op::Relu,
            15 => Op::Tanh,
            16 => Op::Sigmoid,
            17 => Op::TopK { count: number },
            kind => return Err(kind),
        };
        Ok(Self { op, inputs: inputs.into() })
    }
}

#[repr(C)]
#[derive(StableAbi)]
pub struct RawTensor {
    pub name: RString,
    pub shape: RVec<u64>,
}

#[repr(C)]
#[derive(StableAbi)]
pub struct RawWeights {
    pub tensors: RVec<RawTensor>,
    pub metadata: RString,
}

impl From<WeightsInfo> for RawWeights {
    fn from(from: WeightsInfo) -> Self {
        let tensor = |t: TensorInfo| RawTensor { name: t.name.into(), shape: t.shape.into() };
        Self { tensors: from.tensors.into_iter().map(tensor).collect(), metadata: from.metadata.into() }
    }
}

impl From<RawWeights> for WeightsInfo {
    fn from(raw: RawWeights) -> Self {
        let tensor = |t: RawTensor| TensorInfo { name: t.name.into(), shape: t.shape.into() };
        Self::new(raw.tensors.into_iter().map(tensor).collect(), raw.metadata)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nets_survive_the_boundary() {
        let mut net = Net::new("n", "w.safetensors");
        let (hidden, top) = (net.hidden(), net.top_logits(100));
        let older = [net.push(Op::Hidden { back: 2 }, &[]), net.push(Op::TopLogits { count: 7, back: 1 }, &[])];
        let rows = [
            net.token_embedding(),
            net.push(Op::Embedding { weight: "e".into() }, &[]),
            net.push(Op::Row { tensor: "p".into(), row: 3 }, &[]),
        ];
        let x = net.linear(hidden, "a");
        let x = net.batch_norm(x, "bn");
        let y = net.push(Op::Linear { weight: "b".into(), bias: None }, &[top]);
        let y = net.layer_norm(y, "ln");
        let y = net.push(Op::RmsNorm { weight: "r".into(), eps: 1e-6 }, &[y]);
        let mut all = net.add(&[x, y]);
        for op in [Op::Softmax, Op::Gelu, Op::Silu, Op::Relu, Op::Tanh, Op::Sigmoid, Op::TopK { count: 4 }] {
            all = net.push(op, &[all]);
        }
        net.concat(&[all, older[0], older[1], rows[0], rows[1], rows[2]]);
        assert_eq!(Net::try_from(RawNet::from(net.clone())), Ok(net.clone()));

        let mut raw = RawNet::from(net);
        raw.nodes[1].kind = 99;
        assert_eq!(Net::try_from(raw).unwrap_err(), "net `n`: node 1 is an operation (99) unknown here");
    }

    #[test]
    fn weights_survive_the_boundary() {
        let tensor = |name: &str, shape: &[u64]| TensorInfo { name: name.into(), shape: shape.into() };
        let info = WeightsInfo::new(vec![tensor("b", &[2, 3]), tensor("a", &[])], r#"{"threshold": 0.5}"#);
        let back = WeightsInfo::from(RawWeights::from(info.clone()));
        assert_eq!(back, info);
        assert_eq!(back.shape("b"), Ok(&[2, 3][..]));
        assert_eq!(back.shape("c").unwrap_err().message, "the weights have no tensor `c`");
    }
}
