//! Router networks on the CPU. Like everything in this runner, a row's score does not depend on what
//! else is computed with it.

use tokenrouter_kernels::{self as kernels, PackedMatrix};

use super::model::Linear;
use crate::request::TokenId;
use crate::runner::net::{Net, Op};

/// A net in the layout of the kernels.
pub(super) struct CpuNet {
    nodes: Vec<Node>,
    pub(super) width: usize,
    /// Positions before the row that it reads.
    pub(super) back: usize,
}

struct Node {
    op: Compute,
    inputs: Vec<usize>,
    width: usize,
}

enum Compute {
    Linear(Linear),
    /// Everything whose tensors need no other layout.
    Plain(Op),
}

/// What a net reads, for `rows` rows.
pub(super) struct Inputs<'a> {
    /// By positions back: last hidden states, `[rows, hidden]`.
    pub(super) hidden: &'a [Vec<f32>],
    /// By positions back: raw logits, `[rows, vocabulary]`; empty where the net reads none.
    pub(super) logits: &'a [Vec<f32>],
    pub(super) candidates: &'a [TokenId],
    pub(super) embedding: &'a PackedMatrix,
}

impl CpuNet {
    pub(super) fn new(net: Net) -> Self {
        let (width, back) = (net.width(), net.back() as usize);
        let nodes = net.nodes.into_iter().map(|node| {
            let op = match node.op {
                Op::Linear { weight, bias } => {
                    let inputs = weight.len() / node.width;
                    Compute::Linear(Linear { weight: PackedMatrix::from_rows(inputs, &weight), bias })
                }
                op => Compute::Plain(op),
            };
            Node { op, inputs: node.inputs.into_iter().map(|i| i as usize).collect(), width: node.width }
        });
        Self { nodes: nodes.collect(), width, back }
    }

    /// Whether it reads logits `back` positions before the row.
    pub(super) fn reads_logits(&self, back: usize) -> bool {
        let reads =
            |node: &Node| matches!(node.op, Compute::Plain(Op::TopLogits { back: b, .. }) if b as usize == back);
        self.nodes.iter().any(reads)
    }

    /// Scores, `[rows, width]`.
    pub(super) fn evaluate(&self, inputs: &Inputs<'_>, scratch: &mut Vec<[f32; 16]>) -> Vec<f32> {
        let rows = inputs.candidates.len();
        let mut values: Vec<Vec<f32>> = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            let input = |i: usize| values[node.inputs[i]].as_slice();
            let mut out = vec![0.0; rows * node.width];
            match &node.op {
                Compute::Linear(linear) => {
                    kernels::linear(&linear.weight, input(0), &mut out, scratch);
                    if !linear.bias.is_empty() {
                        kernels::add_bias(&mut out, &linear.bias);
                    }
                }
                Compute::Plain(op) => plain(op, node, inputs, &values, &mut out),
            }
            values.push(out);
        }
        values.pop().unwrap_or_default()
    }
}

/// Run `net` on made-up rows of a model with these sizes: it has its scores, and each row's are the same alone.
#[cfg(any(test, fuzzing))]
pub(crate) fn try_out(net: Net, hidden: usize, vocab: usize) {
    const ROWS: usize = 3;
    let made_up = |count: usize| (0..count).map(|i| (i * 7 % 11) as f32 - 5.0).collect::<Vec<f32>>();
    let net = CpuNet::new(net);
    let back = net.back + 1;
    let embedding = PackedMatrix::from_rows(hidden, &made_up(vocab * hidden));
    let (states, logits) = (made_up(ROWS * hidden), made_up(ROWS * vocab));
    let scores = |rows: std::ops::Range<usize>| {
        let inputs = Inputs {
            hidden: &vec![states[rows.start * hidden..rows.end * hidden].to_vec(); back],
            logits: &vec![logits[rows.start * vocab..rows.end * vocab].to_vec(); back],
            candidates: &rows.map(|row| (row % vocab) as TokenId).collect::<Vec<_>>(),
            embedding: &embedding,
        };
        net.evaluate(&inputs, &mut Vec::new())
    };
    // One NaN is as good as another.
    let bits = |score: f32| if score.is_nan() { f32::NAN.to_bits() } else { score.to_bits() };
    let bits = |scores: Vec<f32>| scores.into_iter().map(bits).collect::<Vec<_>>();
    let all = bits(scores(0..ROWS));
    assert_eq!(all.len(), ROWS * net.width);
    let alone: Vec<u32> = (0..ROWS).flat_map(|row| bits(scores(row..row + 1))).collect();
    assert_eq!(all, alone, "a row's score depends on the others");
}

fn plain(op: &Op, node: &Node, inputs: &Inputs<'_>, values: &[Vec<f32>], out: &mut [f32]) {
    let width = node.width;
    let first = || values[node.inputs[0]].as_slice();
    let rows = || inputs.candidates.iter();
    let mut apply = |function: fn(&mut [f32])| {
        out.copy_from_slice(first());
        function(out);
    };
    match op {
        Op::Gelu => apply(kernels::gelu),
        Op::Silu => apply(kernels::silu),
        Op::Relu => apply(kernels::relu),
        Op::Tanh => apply(kernels::tanh),
        Op::Sigmoid => apply(kernels::sigmoid),
        Op::Softmax => {
            out.copy_from_slice(first());
            out.chunks_exact_mut(width).for_each(softmax);
        }
        Op::Hidden { back } => out.copy_from_slice(&inputs.hidden[*back as usize]),
        Op::TopLogits { count, back } => {
            largest(&inputs.logits[*back as usize], inputs.candidates.len(), *count as usize, out);
        }
        Op::TopK { count } => largest(first(), inputs.candidates.len(), *count as usize, out),
        Op::TokenEmbedding => {
            rows().zip(out.chunks_exact_mut(width)).for_each(|(&id, out)| inputs.embedding.copy_row(id as usize, out));
        }
        Op::Embedding { table } => {
            for (&id, out) in rows().zip(out.chunks_exact_mut(width)) {
                out.copy_from_slice(&table[id as usize * width..][..width]);
            }
        }
        Op::Constant { value } => out.chunks_exact_mut(width).for_each(|out| out.copy_from_slice(value)),
        Op::LayerNorm { weight, bias, eps } => kernels::layer_norm(first(), weight, bias, *eps, out),
        Op::RmsNorm { weight, eps } => kernels::rms_norm(first(), weight, *eps, out),
        Op::Concat => {
            let mut start = 0;
            for &input in &node.inputs {
                let part = values[input].len() / inputs.candidates.len();
                for (out, value) in out.chunks_exact_mut(width).zip(values[input].chunks_exact(part)) {
                    out[start..start + part].copy_from_slice(value);
                }
                start += part;
            }
        }
        Op::Add => node.inputs.iter().for_each(|&input| kernels::add(out, &values[input])),
        Op::Linear { .. } => unreachable!("linear layers have a layout of their own"),
    }
}

/// The `count` largest values of each of `rows` rows, descending.
fn largest(values: &[f32], rows: usize, count: usize, out: &mut [f32]) {
    let mut ids = Vec::new();
    for (row, out) in values.chunks_exact(values.len() / rows.max(1)).zip(out.chunks_exact_mut(count)) {
        kernels::top(row, count, &mut ids);
        // Values that are not numbers are left out of the ids; what has too few has no score.
        out.fill(f32::NAN);
        out.iter_mut().zip(&ids).for_each(|(out, &id)| *out = row[id as usize]);
    }
}

fn softmax(row: &mut [f32]) {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    row.iter_mut().for_each(|v| *v = (*v - max).exp());
    let sum: f32 = row.iter().sum();
    row.iter_mut().for_each(|v| *v /= sum);
}

#[cfg(test)]
mod tests;
