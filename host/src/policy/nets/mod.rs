//! Router networks: from a policy's description and a weights file to a net that a runner can take.
//!
//! Every shape is checked here, so that runners need not: a description that fits the file but not the
//! model is refused at start, with both numbers in the message.

mod file;
mod pickle;
#[cfg(test)]
mod tests;
mod torch;
mod written;

pub use file::WeightsFile;
pub use written::{HostNet, written};

use std::path::Path;

use tokenrouter_plugin_api::net::{Net as Description, NodeIndex, Op as DescribedOp};

use crate::plain::plain;
use crate::runner::ModelInfo;
use crate::runner::net::{Net, Node, Op};

/// Most nodes of a net.
const MOST_NODES: usize = 4096;
/// Most inputs of a node.
const MOST_INPUTS: usize = 64;
/// Most numbers of a node's value: wider than any vocabulary.
const WIDEST: usize = 1 << 22;
/// Widest score.
const WIDEST_SCORE: usize = 64;
/// Farthest look back, in positions.
const FARTHEST_BACK: u32 = 15;

/// What a weights file holds, for a policy's `create`. `directory` is where relative paths start.
pub fn describe(directory: &Path, path: &str) -> Result<tokenrouter_plugin_api::net::WeightsInfo, String> {
    WeightsFile::open(&directory.join(path)).map(|file| file.info())
}

/// Read the weights of `net`, which `plugin` described for `model`, and check all of it.
pub fn load(plugin: &str, net: &Description, directory: &Path, model: &ModelInfo) -> Result<Net, String> {
    let mut file = WeightsFile::open(&directory.join(&net.weights))?;
    let name = format!("net `{}` of {plugin}", net.name);
    build(&name, net, &mut file, model).map_err(|e| plain(&format!("{name}: {e}")))
}

pub(crate) fn build(name: &str, net: &Description, file: &mut WeightsFile, model: &ModelInfo) -> Result<Net, String> {
    if net.nodes.is_empty() || net.nodes.len() > MOST_NODES {
        return Err(format!("has {} nodes; give 1 to {MOST_NODES}", net.nodes.len()));
    }
    let mut builder = Builder { file, model, nodes: Vec::with_capacity(net.nodes.len()), place: Vec::new() };
    for (at, node) in net.nodes.iter().enumerate() {
        // Names of tensors may be anything.
        let named = |e: String| plain(&format!("node {at} ({:?}): {e}", node.op));
        let value = builder.node(&node.op, &node.inputs, net).map_err(named)?;
        builder.place.push(value);
    }
    let (nodes, place) = (builder.nodes, builder.place);
    let last = place.last().copied().unwrap_or_default();
    if last as usize + 1 != nodes.len() {
        return Err("its last node is not its score".into());
    }
    let mut read = vec![false; nodes.len()];
    nodes.iter().flat_map(|node| &node.inputs).for_each(|&at| read[at as usize] = true);
    if let Some(unread) = read[..last as usize].iter().position(|read| !read) {
        return Err(format!("the value of {} is not used", describe_op(&nodes[unread])));
    }
    let net = Net { name: name.to_owned(), nodes };
    if net.width() > WIDEST_SCORE {
        return Err(format!("its score has {} numbers; the most is {WIDEST_SCORE}", net.width()));
    }
    Ok(net)
}

struct Builder<'a> {
    file: &'a mut WeightsFile,
    model: &'a ModelInfo,
    nodes: Vec<Node>,
    /// Where the value of each described node is among `nodes`: folded ones have none of their own.
    place: Vec<NodeIndex>,
}

impl Builder<'_> {
    /// Add a node; answers with where its value is.
    fn node(&mut self, op: &DescribedOp, described: &[NodeIndex], net: &Description) -> Result<NodeIndex, String> {
        if let Some(later) = described.iter().find(|&&i| i as usize >= self.place.len()) {
            return Err(format!("reads node {later}, which does not come before it"));
        }
        let inputs: Vec<NodeIndex> = described.iter().map(|&i| self.place[i as usize]).collect();
        let (low, high) = match op {
            DescribedOp::Hidden { .. }
            | DescribedOp::TopLogits { .. }
            | DescribedOp::TokenEmbedding
            | DescribedOp::Embedding { .. }
            | DescribedOp::Row { .. } => (0, 0),
            DescribedOp::Concat | DescribedOp::Add => (1, MOST_INPUTS),
            _ => (1, 1),
        };
        if !(low..=high).contains(&inputs.len()) {
            return Err(format!("has {} inputs; give {low} to {high}", inputs.len()));
        }
        let width = inputs.first().map_or(0, |&i| self.nodes[i as usize].width);
        let (op, width) = match op {
            DescribedOp::BatchNorm { prefix, eps } => {
                let readers = |at: NodeIndex| net.nodes.iter().filter(|node| node.inputs.contains(&at)).count();
                if readers(described[0]) != 1 {
                    return Err("its input is read by another node too, so it cannot be folded into it".into());
                }
                self.fold(inputs[0], prefix, *eps)?;
                return Ok(inputs[0]);
            }
            DescribedOp::Hidden { back } => (Op::Hidden { back: near(*back)? }, self.model.hidden_size as usize),
            DescribedOp::TopLogits { count, back } => {
                let count = self.count(*count, self.model.vocab_size as usize, "tokens")?;
                (Op::TopLogits { count, back: near(*back)? }, count as usize)
            }
            DescribedOp::TokenEmbedding => (Op::TokenEmbedding, self.model.hidden_size as usize),
            DescribedOp::Embedding { weight } => {
                let [rows, width] = self.matrix(weight)?;
                of_width(width)?;
                let vocab = self.model.vocab_size as usize;
                if rows < vocab {
                    return Err(format!("has a row for {rows} tokens, but model `{}` has {vocab}", self.model.name));
                }
                (Op::Embedding { table: self.file.read(weight)? }, width)
            }
            DescribedOp::Row { tensor, row } => {
                let [rows, width] = self.matrix(tensor)?;
                of_width(width)?;
                let row = *row as usize;
                if row >= rows {
                    return Err(format!("the tensor has {rows} rows"));
                }
                let table = self.file.read(tensor)?;
                (Op::Constant { value: table[row * width..][..width].to_vec() }, width)
            }
            DescribedOp::Linear { weight, bias } => {
                let [outputs, takes] = self.matrix(weight)?;
                if takes != width {
                    return Err(self.unfit(weight, &[outputs, takes], takes, inputs[0]));
                }
                of_width(outputs)?;
                let bias = bias.as_ref().map(|bias| self.vector(bias, outputs)).transpose()?.unwrap_or_default();
                (Op::Linear { weight: self.file.read(weight)?, bias }, outputs)
            }
            DescribedOp::LayerNorm { weight, bias, eps } => {
                self.norm(weight, width, inputs[0])?;
                let (weight, bias) = (self.vector(weight, width)?, self.vector(bias, width)?);
                (Op::LayerNorm { weight, bias, eps: positive(*eps)? }, width)
            }
            DescribedOp::RmsNorm { weight, eps } => {
                self.norm(weight, width, inputs[0])?;
                (Op::RmsNorm { weight: self.vector(weight, width)?, eps: positive(*eps)? }, width)
            }
            // Each width is bounded, and so is their number: the sum cannot overflow.
            DescribedOp::Concat => (Op::Concat, inputs.iter().map(|&i| self.nodes[i as usize].width).sum()),
            DescribedOp::Add => {
                if let Some(&other) = inputs.iter().find(|&&i| self.nodes[i as usize].width != width) {
                    let [a, b] = [inputs[0], other].map(|i| describe_op(&self.nodes[i as usize]));
                    return Err(format!("cannot add {a} and {b}"));
                }
                (Op::Add, width)
            }
            DescribedOp::Softmax => (Op::Softmax, width),
            DescribedOp::Gelu => (Op::Gelu, width),
            DescribedOp::Silu => (Op::Silu, width),
            DescribedOp::Relu => (Op::Relu, width),
            DescribedOp::Tanh => (Op::Tanh, width),
            DescribedOp::Sigmoid => (Op::Sigmoid, width),
            DescribedOp::TopK { count } => {
                let count = self.count(*count, width, "numbers")?;
                (Op::TopK { count }, count as usize)
            }
            _ => return Err("is an operation unknown here".into()),
        };
        of_width(width)?;
        self.nodes.push(Node { op, inputs, width });
        Ok(self.nodes.len() as NodeIndex - 1)
    }

    /// Fold a batch normalisation into the linear layer before it: `(w x + b - mean) / sqrt(variance + eps)
    /// * gain + shift` is a linear layer again.
    fn fold(&mut self, input: NodeIndex, prefix: &str, eps: f32) -> Result<(), String> {
        let width = self.nodes[input as usize].width;
        let [gain, shift, mean, variance] = ["weight", "bias", "running_mean", "running_var"]
            .map(|part| self.vector(&format!("{prefix}.{part}"), width));
        let (gain, shift, mean, variance) = (gain?, shift?, mean?, variance?);
        if let Some(at) = variance.iter().position(|&v| v < 0.0) {
            return Err(format!("{prefix}.running_var is {} at index {at}; a variance is not negative", variance[at]));
        }
        let eps = f64::from(positive(eps)?);
        let Op::Linear { weight, bias } = &mut self.nodes[input as usize].op else {
            return Err("its input is no Linear".into());
        };
        bias.resize(width, 0.0);
        let inputs = weight.len() / width;
        for (i, row) in weight.chunks_exact_mut(inputs).enumerate() {
            let scale = f64::from(gain[i]) / (f64::from(variance[i]) + eps).sqrt();
            row.iter_mut().for_each(|w| *w = (f64::from(*w) * scale) as f32);
            bias[i] = ((f64::from(bias[i]) - f64::from(mean[i])) * scale + f64::from(shift[i])) as f32;
            if !bias[i].is_finite() || row.iter().any(|w| !w.is_finite()) {
                return Err(format!("output {i} is too large once `{prefix}` is folded into the layer before it"));
            }
        }
        Ok(())
    }

    fn shape(&self, name: &str) -> Result<&[usize], String> {
        self.file.shape(name).ok_or_else(|| format!("{} has no tensor `{name}`", self.file.name()))
    }

    fn matrix(&self, name: &str) -> Result<[usize; 2], String> {
        let shape = self.shape(name)?;
        <[usize; 2]>::try_from(shape)
            .map_err(|_| format!("`{name}` of {} has shape {shape:?}, but a matrix is needed", self.file.name()))
    }

    fn vector(&mut self, name: &str, length: usize) -> Result<Vec<f32>, String> {
        let shape = self.shape(name)?;
        if shape != [length] {
            return Err(format!("`{name}` of {} has shape {shape:?}, but [{length}] is needed", self.file.name()));
        }
        self.file.read(name)
    }

    fn norm(&self, weight: &str, width: usize, input: NodeIndex) -> Result<(), String> {
        match self.shape(weight)? {
            [length] if *length != width => Err(self.unfit(weight, &[*length], *length, input)),
            _ => Ok(()),
        }
    }

    /// Tensor and input do not fit: most often the router was trained for another model.
    fn unfit(&self, tensor: &str, shape: &[usize], takes: usize, input: NodeIndex) -> String {
        let input = &self.nodes[input as usize];
        let parts = match input.op {
            Op::Concat => {
                let parts: Vec<_> = input.inputs.iter().map(|&i| describe_op(&self.nodes[i as usize])).collect();
                format!(": {}", parts.join(" + "))
            }
            _ => String::new(),
        };
        format!(
            "`{tensor}` {shape:?} of {} takes {takes} numbers, but gets {} ({}{parts}); model `{}` has hidden size {}: use \
             the router that was trained for it",
            self.file.name(),
            input.width,
            describe_op(input),
            self.model.name,
            self.model.hidden_size,
        )
    }

    fn count(&self, count: u32, of: usize, what: &str) -> Result<u32, String> {
        if count == 0 || count as usize > of {
            return Err(format!("asks for {count} of {of} {what}"));
        }
        Ok(count)
    }
}

fn of_width(width: usize) -> Result<(), String> {
    if (1..=WIDEST).contains(&width) {
        return Ok(());
    }
    Err(format!("its value has {width} numbers; the most is {WIDEST}"))
}

fn near(back: u32) -> Result<u32, String> {
    if back > FARTHEST_BACK {
        Err(format!("looks {back} positions back; the most is {FARTHEST_BACK}"))
    } else {
        Ok(back)
    }
}

fn positive(eps: f32) -> Result<f32, String> {
    if eps.is_finite() && eps > 0.0 { Ok(eps) } else { Err(format!("has eps {eps}; give a number above 0")) }
}

/// A node and its width in words.
fn describe_op(node: &Node) -> String {
    let what = match node.op {
        Op::Hidden { back: 0 } => "hidden state",
        Op::Hidden { .. } => "earlier hidden state",
        Op::TopLogits { .. } => "top logits",
        Op::TokenEmbedding => "token embedding",
        Op::Embedding { .. } => "stored token embedding",
        Op::Constant { .. } => "stored row",
        Op::Linear { .. } => "linear layer",
        Op::LayerNorm { .. } | Op::RmsNorm { .. } => "norm",
        Op::Concat => "concatenation",
        Op::Add => "sum",
        Op::Softmax => "softmax",
        Op::Gelu | Op::Silu | Op::Relu | Op::Tanh | Op::Sigmoid => "activation",
        Op::TopK { .. } => "largest values",
    };
    format!("{what} [{}]", node.width)
}
