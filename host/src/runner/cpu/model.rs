//! The weights of a decoder in the layout of the kernels.

use tokenrouter_kernels::PackedMatrix;

use crate::runner::model_config::{LoadError, ModelConfig};
use crate::runner::weights::{Weights, tensor_names};

/// A linear layer; several of the file's layers with one argument may be joined in it.
pub(super) struct Linear {
    pub(super) weight: PackedMatrix,
    /// Empty for none.
    pub(super) bias: Vec<f32>,
}

/// One decoder layer.
pub(super) struct Layer {
    pub(super) attention_norm: Vec<f32>,
    /// Queries, keys and values, one after the other.
    pub(super) qkv: Linear,
    /// Norms of the heads of queries and of keys.
    pub(super) qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    pub(super) output: Linear,
    pub(super) mlp_norm: Vec<f32>,
    /// Gate, then up.
    pub(super) gate_up: Linear,
    pub(super) down: Linear,
}

/// A decoder.
pub(super) struct Model {
    pub(super) embedding: PackedMatrix,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Vec<f32>,
    /// `None` when the embedding is the head.
    pub(super) head: Option<PackedMatrix>,
}

/// Names of a joined linear layer with the outputs of each.
type Parts<'a> = &'a [(&'a str, usize)];

impl Model {
    pub(super) fn load(config: &ModelConfig, weights: &mut Weights<'_>) -> Result<Self, LoadError> {
        let names = tensor_names(config);
        weights.refuse_unused(config, &names)?;
        weights.expect(names.into_iter());
        let hidden = config.hidden;
        let embedding =
            PackedMatrix::from_rows(hidden, &weights.load("model.embed_tokens.weight", &[config.vocab_size, hidden])?);
        let layers = (0..config.layers).map(|l| layer(config, weights, l)).collect::<Result<_, _>>()?;
        let norm = weights.load("model.norm.weight", &[hidden])?;
        let head = if config.tied {
            None
        } else {
            Some(PackedMatrix::from_rows(hidden, &weights.load("lm_head.weight", &[config.vocab_size, hidden])?))
        };
        Ok(Self { embedding, layers, norm, head })
    }

    pub(super) fn head(&self) -> &PackedMatrix {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    /// Bytes of all weights.
    pub(super) fn bytes(&self) -> u64 {
        let vector = |v: &[f32]| size_of_val(v);
        let linear = |l: &Linear| l.weight.bytes() + vector(&l.bias);
        let layers: usize = self
            .layers
            .iter()
            .map(|l| {
                let norms = l.qk_norm.as_ref().map_or(0, |(q, k)| vector(q) + vector(k));
                vector(&l.attention_norm)
                    + vector(&l.mlp_norm)
                    + norms
                    + [&l.qkv, &l.output, &l.gate_up, &l.down].into_iter().map(linear).sum::<usize>()
            })
            .sum();
        let head = self.head.as_ref().map_or(0, PackedMatrix::bytes);
        (layers + self.embedding.bytes() + head + vector(&self.norm)) as u64
    }
}

fn layer(config: &ModelConfig, weights: &mut Weights<'_>, index: usize) -> Result<Layer, LoadError> {
    let (hidden, inner) = (config.hidden, config.intermediate);
    let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
    let name = |part: &str| format!("model.layers.{index}.{part}");
    let qkv: Parts = &[("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)];
    Ok(Layer {
        attention_norm: weights.load(&name("input_layernorm.weight"), &[hidden])?,
        qkv: linear(weights, name, qkv, hidden, config.qkv_bias)?,
        qk_norm: if config.qk_norm {
            let mut norm = |part| weights.load(&name(part), &[config.head_dim]);
            Some((norm("self_attn.q_norm.weight")?, norm("self_attn.k_norm.weight")?))
        } else {
            None
        },
        output: linear(weights, name, &[("self_attn.o_proj", hidden)], q, config.output_bias)?,
        mlp_norm: weights.load(&name("post_attention_layernorm.weight"), &[hidden])?,
        gate_up: linear(weights, name, &[("mlp.gate_proj", inner), ("mlp.up_proj", inner)], hidden, config.mlp_bias)?,
        down: linear(weights, name, &[("mlp.down_proj", hidden)], inner, config.mlp_bias)?,
    })
}

fn linear(
    weights: &mut Weights<'_>,
    name: impl Fn(&str) -> String,
    parts: Parts<'_>,
    inputs: usize,
    with_bias: bool,
) -> Result<Linear, LoadError> {
    let mut weight = PackedMatrix::zeros(0, inputs);
    let mut bias = Vec::new();
    for &(part, outputs) in parts {
        let rows = weights.load(&name(&format!("{part}.weight")), &[outputs, inputs])?;
        let first = weight.outputs();
        weight.grow(outputs);
        weight.set_rows(first, &rows);
        if with_bias {
            bias.extend(weights.load(&name(&format!("{part}.bias")), &[outputs])?);
        }
    }
    Ok(Linear { weight, bias })
}
