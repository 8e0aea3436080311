//! Router networks on the device: the same description as on the CPU, in f32.

use tokenrouter_kernels::gpu::ops::{Activation, Kernels, LIST, Matrix, Rows};
use tokenrouter_kernels::gpu::{Arena, Device, DevicePtr, GpuError, Stream};

use super::load::Loader;
use super::memory::{Allocate, Counter, SCORES, SLOTS};
use crate::runner::net::{Net, Op};

/// A net with its weights on the device.
pub(super) struct CudaNet {
    nodes: Vec<Node>,
    pub(super) width: usize,
    /// Positions before the row that it reads.
    pub(super) back: usize,
    /// Best logits that it reads.
    pub(super) list: usize,
    _arena: Arena,
}

struct Node {
    op: Op,
    /// Tensors of the operation: weight (or table, or constant), bias.
    tensors: [DevicePtr; 2],
    inputs: Vec<usize>,
    value: Matrix,
}

/// What nets read of a step.
pub(super) struct Inputs {
    pub(super) at: Rows,
    /// Sampling parameters of the slots.
    pub(super) params: DevicePtr,
    pub(super) samples: DevicePtr,
    pub(super) top_values: DevicePtr,
    /// `[SLOTS, hidden]`, f32.
    pub(super) hidden: DevicePtr,
    pub(super) hidden_pages: DevicePtr,
    pub(super) embedding: DevicePtr,
    pub(super) packed_embedding: bool,
}

impl CudaNet {
    /// Upload the weights. The error is one sentence.
    pub(super) fn new(device: &Device, loader: &mut Loader<'_>, net: Net) -> Result<Self, String> {
        check_net(&net)?;
        let name = net.name.clone();
        Self::upload(device, loader, net).map_err(|error| format!("{name}: {error}"))
    }

    fn upload(device: &Device, loader: &mut Loader<'_>, net: Net) -> Result<Self, GpuError> {
        let (width, back) = (net.width(), net.back() as usize);
        let list = net.nodes.iter().map(|node| top_logits(&node.op)).max().unwrap_or(0);
        let mut counter = Counter::default();
        for node in &net.nodes {
            allocate(node.width, &node.op, &mut counter)?;
        }
        let mut arena = Arena::new(device, counter.0)?;
        let mut nodes = Vec::new();
        for node in net.nodes {
            let (value, tensors) = allocate(node.width, &node.op, &mut arena)?;
            for (values, at) in stored(&node.op).into_iter().zip(tensors) {
                loader.floats(values, at)?;
            }
            let value = Matrix { at: value, pitch: node.width as u32, width: node.width as u32 };
            let inputs = node.inputs.iter().map(|input| *input as usize).collect();
            nodes.push(Node { op: without_tensors(node.op), tensors, inputs, value });
        }
        Ok(Self { nodes, width, back, list, _arena: arena })
    }

    /// Enqueue the net for all slots; its scores go to `out`.
    ///
    /// # Safety
    /// All addresses are of live memory of the sizes that are named.
    pub(super) unsafe fn enqueue(
        &self,
        k: &Kernels,
        stream: &Stream,
        read: &Inputs,
        out: Matrix,
    ) -> Result<(), GpuError> {
        let slots = SLOTS as u32;
        let header = read.at.header;
        for node in &self.nodes {
            let input = |index: usize| self.nodes[node.inputs[index]].value;
            let to = node.value;
            let activation =
                // SAFETY: the caller's.
                |kind| unsafe { k.net_activation(stream, header, slots, kind, input(0), to) };
            // SAFETY: the caller's.
            unsafe {
                match node.op {
                    Op::Hidden { back: 0 } => {
                        let from = Matrix { at: read.hidden, ..to };
                        k.net_copy(stream, header, slots, from, to)?;
                    }
                    Op::Hidden { back } => {
                        k.net_hidden_back(stream, slots, read.params, back, &read.at, read.hidden_pages, to)?;
                    }
                    Op::TopLogits { .. } => k.net_top_logits(stream, header, slots, read.top_values, to)?,
                    Op::TokenEmbedding => {
                        let table = (read.packed_embedding, read.embedding);
                        k.net_embedding(stream, header, slots, table.0, read.samples, table.1, to)?;
                    }
                    Op::Embedding { .. } => {
                        k.net_embedding(stream, header, slots, false, read.samples, node.tensors[0], to)?;
                    }
                    Op::Constant { .. } => {
                        let from = Matrix { at: node.tensors[0], pitch: 0, width: to.width };
                        k.net_copy(stream, header, slots, from, to)?;
                    }
                    Op::Linear { .. } => k.net_linear(stream, header, node.tensors, input(0), to)?,
                    Op::LayerNorm { eps, .. } | Op::RmsNorm { eps, .. } => {
                        k.net_norm(stream, header, slots, node.tensors, eps, input(0), to)?;
                    }
                    Op::Concat => {
                        let mut column = 0;
                        for index in 0..node.inputs.len() {
                            let from = input(index);
                            let part = Matrix { at: to.at.offset(column * 4), width: from.width, ..to };
                            k.net_copy(stream, header, slots, from, part)?;
                            column += from.width as usize;
                        }
                    }
                    Op::Add => {
                        k.net_copy(stream, header, slots, input(0), to)?;
                        for index in 1..node.inputs.len() {
                            k.net_add(stream, header, slots, [to, input(index)], to)?;
                        }
                    }
                    Op::Softmax => k.net_softmax(stream, header, slots, input(0), to)?,
                    Op::TopK { .. } => k.net_top(stream, header, slots, input(0), to)?,
                    Op::Gelu => activation(Activation::Gelu)?,
                    Op::Silu => activation(Activation::Silu)?,
                    Op::Relu => activation(Activation::Relu)?,
                    Op::Tanh => activation(Activation::Tanh)?,
                    Op::Sigmoid => activation(Activation::Sigmoid)?,
                }
            }
        }
        let Some(last) = self.nodes.last() else { return Ok(()) };
        // SAFETY: the caller's.
        unsafe { k.net_scores(stream, header, slots, read.samples, last.value, out) }
    }
}

/// Refuse what the kernels cannot do.
pub fn check_net(net: &Net) -> Result<(), String> {
    for node in &net.nodes {
        match node.op {
            Op::TopLogits { back, .. } if back > 0 => {
                return Err(format!(
                    "{}: reads the logits of {back} positions before the row, which CUDA does not keep; set the model's device to \"cpu\"",
                    net.name
                ));
            }
            Op::TopLogits { count, .. } if count as usize > LIST => {
                return Err(format!(
                    "{}: reads the {count} largest logits, but CUDA gives at most {LIST}; set the model's device to \"cpu\"",
                    net.name
                ));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Refuse more scores of all nets of a model than there is room for; `net` is the last of them.
pub fn check_scores(net: &str, columns: usize) -> Result<(), String> {
    if columns > SCORES {
        return Err(format!(
            "{net}: the model's nets give {columns} scores, but CUDA has room for {SCORES}; set the model's device to \"cpu\""
        ));
    }
    Ok(())
}

fn top_logits(op: &Op) -> usize {
    match op {
        Op::TopLogits { count, .. } => *count as usize,
        _ => 0,
    }
}

/// Stored numbers of an operation: weight, bias.
fn stored(op: &Op) -> Vec<&[f32]> {
    match op {
        Op::Embedding { table } => vec![table],
        Op::Constant { value } => vec![value],
        Op::Linear { weight, bias } | Op::LayerNorm { weight, bias, .. } => vec![weight, bias],
        Op::RmsNorm { weight, .. } => vec![weight],
        _ => Vec::new(),
    }
}

/// The numbers are on the device.
fn without_tensors(op: Op) -> Op {
    let none = Vec::new;
    match op {
        Op::Embedding { .. } => Op::Embedding { table: none() },
        Op::Constant { .. } => Op::Constant { value: none() },
        Op::Linear { .. } => Op::Linear { weight: none(), bias: none() },
        Op::LayerNorm { eps, .. } => Op::LayerNorm { weight: none(), bias: none(), eps },
        Op::RmsNorm { eps, .. } => Op::RmsNorm { weight: none(), eps },
        other => other,
    }
}

/// Memory of a node's value and its tensors; null for an empty one.
fn allocate(width: usize, op: &Op, to: &mut dyn Allocate) -> Result<(DevicePtr, [DevicePtr; 2]), GpuError> {
    let value = to.bytes(SLOTS * width * size_of::<f32>())?;
    let mut tensors = [DevicePtr(0); 2];
    for (values, at) in stored(op).into_iter().zip(&mut tensors) {
        if !values.is_empty() {
            *at = to.bytes(size_of_val(values))?;
        }
    }
    Ok((value, tensors))
}
