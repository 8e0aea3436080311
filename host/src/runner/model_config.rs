//! The architecture of a model directory, read from its `config.json` and checked.

mod ends;
mod json;
mod rope;
pub mod shapes;

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::PAGE_TOKENS;
use crate::plain::plain;
use crate::request::TokenId;

pub(crate) use json::read_json;
pub use rope::RopeScaling;
use rope::{RawRope, rope};

/// Bound of every size that config.json gives, large enough for any published model.
const LARGEST_SIZE: usize = 1 << 22;
const LARGEST_HEAD: usize = 1 << 12;
const LARGEST_DEPTH: usize = 1 << 12;

/// Why a model directory cannot be loaded. One line that names the file, the value and the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {message}", file.display())]
pub struct LoadError {
    /// The file (or directory) at fault.
    pub file: PathBuf,
    /// What is wrong with it and what helps.
    pub message: String,
}

impl LoadError {
    pub(crate) fn new(file: &Path, message: impl Into<String>) -> Self {
        // Keys of the file and the parser's words stand in it as they are.
        Self { file: file.to_owned(), message: plain(&message.into()) }
    }
}

/// Decoders that are supported. They differ in biases and norms only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
}

impl Architecture {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }
}

/// Everything that determines the computation and the shapes of the weights.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    pub architecture: Architecture,
    pub vocab_size: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub norm_eps: f32,
    pub rope_theta: f64,
    pub rope_scaling: RopeScaling,
    /// The head is the embedding.
    pub tied: bool,
    pub qkv_bias: bool,
    pub output_bias: bool,
    pub mlp_bias: bool,
    /// Heads of queries and keys are normalised.
    pub qk_norm: bool,
    /// Most positions of a sequence.
    pub context: usize,
    /// All tokens that end a sequence, ascending.
    pub eos: Vec<TokenId>,
}

/// `config.json` as published; unknown keys are common and harmless.
#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct Raw {
    architectures: Option<Vec<String>>,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    rms_norm_eps: f64,
    hidden_act: Option<String>,
    max_position_embeddings: usize,
    rope_theta: Option<f64>,
    rope_scaling: Option<RawRope>,
    rope_parameters: Option<RawRope>,
    partial_rotary_factor: Option<f64>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    sliding_window: Option<usize>,
    use_sliding_window: Option<bool>,
    layer_types: Option<Vec<String>>,
    quantization_config: Option<serde_json::Value>,
    eos_token_id: Option<TokenIds>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a token id (a whole number from 0) or a list of them")]
enum TokenIds {
    One(TokenId),
    Many(Vec<TokenId>),
}

impl TokenIds {
    fn into_vec(self) -> Vec<TokenId> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}

impl ModelConfig {
    /// Read a model directory. `context` lowers the longest sequence below what the model allows.
    pub fn load(dir: &Path, context: Option<u32>) -> Result<Self, LoadError> {
        if !dir.is_dir() {
            return Err(LoadError::new(dir, "no such directory; `path` must name a Hugging Face model directory"));
        }
        let file = dir.join("config.json");
        let raw: Raw = read_json(&file)?.ok_or_else(|| {
            LoadError::new(&file, "no such file; `path` must name a Hugging Face model directory with config.json")
        })?;
        let mut config = Self::check(raw, context).map_err(|message| LoadError::new(&file, message))?;
        config.known_end_tokens(&file, "eos_token_id", &config.eos)?;
        config.add_end_tokens(dir)?;
        Ok(config)
    }

    /// From the text of `config.json` alone.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn from_json(text: &[u8], context: Option<u32>) -> Result<Self, LoadError> {
        let config = json::parse_json(text).and_then(|raw| Self::check(raw, context));
        config.map_err(|message| LoadError::new(Path::new("config.json"), message))
    }

    fn check(raw: Raw, context: Option<u32>) -> Result<Self, String> {
        let architecture = architecture(raw.architectures.as_deref().unwrap_or_default())?;
        match raw.hidden_act.as_deref() {
            None | Some("silu" | "swish") => {}
            Some(other) => {
                return Err(format!("hidden_act `{other}` is not supported; models with `silu` are"));
            }
        }
        if let Some(quantization) = &raw.quantization_config {
            let method = quantization.get("quant_method").and_then(|m| m.as_str()).unwrap_or("unknown");
            return Err(format!(
                "quantization_config `{method}` is not supported; use the bf16, f16 or f32 weights of the model"
            ));
        }
        let heads = raw.num_attention_heads;
        if raw.num_hidden_layers > LARGEST_DEPTH {
            return Err(format!(
                "num_hidden_layers is {}; at most {LARGEST_DEPTH} are possible",
                raw.num_hidden_layers
            ));
        }
        let kv_heads = raw.num_key_value_heads.unwrap_or(heads);
        for (name, value) in [
            ("vocab_size", raw.vocab_size),
            ("hidden_size", raw.hidden_size),
            ("intermediate_size", raw.intermediate_size),
            ("num_hidden_layers", raw.num_hidden_layers),
            ("num_attention_heads", heads),
            ("num_key_value_heads", kv_heads),
            ("max_position_embeddings", raw.max_position_embeddings),
        ] {
            // With these bounds no product of sizes overflows.
            if value == 0 || value > LARGEST_SIZE {
                return Err(format!("{name} is {value}; it must be between 1 and {LARGEST_SIZE}"));
            }
        }
        if !heads.is_multiple_of(kv_heads) {
            return Err(format!(
                "num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}; the file is damaged"
            ));
        }
        let head_dim = raw.head_dim.unwrap_or(raw.hidden_size / heads);
        if head_dim == 0 || !head_dim.is_multiple_of(2) || head_dim > LARGEST_HEAD {
            return Err(format!("head_dim is {head_dim}; it must be an even number between 2 and {LARGEST_HEAD}"));
        }
        let allowed = raw.max_position_embeddings;
        if heads.saturating_mul(head_dim) > LARGEST_SIZE {
            return Err(format!(
                "num_attention_heads {heads} of head_dim {head_dim} are more than {LARGEST_SIZE} together"
            ));
        }
        let context = lowered(allowed, context)?;
        let slides = raw.use_sliding_window.unwrap_or(true)
            && raw.layer_types.as_ref().is_none_or(|types| types.iter().any(|t| t == "sliding_attention"));
        if let Some(window) = raw.sliding_window.filter(|&window| slides && window < context) {
            return Err(format!(
                "sliding_window {window} is smaller than the context {context}, which is not supported; set the model's context to at most {window}"
            ));
        }
        let (rope_theta, rope_scaling) = rope(&raw)?;
        let norm_eps = raw.rms_norm_eps as f32;
        if !(norm_eps > 0.0 && raw.rms_norm_eps <= 0.1) {
            let eps = raw.rms_norm_eps;
            return Err(format!(
                "rms_norm_eps is {eps:?}; it must be above 0 and at most 0.1 (1e-6 is common); download the file again"
            ));
        }
        let attention_bias = raw.attention_bias.unwrap_or(false);
        Ok(Self {
            architecture,
            vocab_size: raw.vocab_size,
            hidden: raw.hidden_size,
            intermediate: raw.intermediate_size,
            layers: raw.num_hidden_layers,
            heads,
            kv_heads,
            head_dim,
            norm_eps,
            rope_theta,
            rope_scaling,
            tied: raw.tie_word_embeddings.unwrap_or(false),
            qkv_bias: attention_bias || architecture == Architecture::Qwen2,
            output_bias: attention_bias,
            mlp_bias: raw.mlp_bias.unwrap_or(false),
            qk_norm: architecture == Architecture::Qwen3,
            context,
            eos: raw.eos_token_id.map(TokenIds::into_vec).unwrap_or_default(),
        })
    }

    /// An end token that the model cannot write would never end a sequence.
    fn known_end_tokens(&self, file: &Path, key: &str, ids: &[TokenId]) -> Result<(), LoadError> {
        let size = self.vocab_size;
        match ids.iter().find(|id| **id as usize >= size) {
            None => Ok(()),
            Some(id) => Err(LoadError::new(
                file,
                format!(
                    "{key} is {id}, but vocab_size of config.json is {size}; download the files of one model, or remove the id"
                ),
            )),
        }
    }

    /// Radians a position, for each pair of a head.
    pub fn rope_frequencies(&self) -> Vec<f32> {
        let full = self.head_dim as f64;
        (0..self.head_dim / 2)
            .map(|i| {
                let frequency = self.rope_theta.powf(-2.0 * i as f64 / full);
                self.rope_scaling.apply(frequency) as f32
            })
            .collect()
    }

    /// Number of weights.
    pub fn parameters(&self) -> u64 {
        let (h, q, kv) = (self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let bias = |on: bool, n: usize| if on { n } else { 0 };
        let layer = h * (q + 2 * kv)
            + q * h
            + 3 * h * self.intermediate
            + 2 * h
            + bias(self.qkv_bias, q + 2 * kv)
            + bias(self.output_bias, h)
            + bias(self.mlp_bias, 2 * self.intermediate + h)
            + bias(self.qk_norm, 2 * self.head_dim);
        let embeddings = self.vocab_size * h * if self.tied { 1 } else { 2 };
        (self.layers * layer + embeddings + h) as u64
    }

    /// Pages that hold one sequence of the longest length.
    pub fn pages_per_sequence(&self) -> usize {
        self.context.div_ceil(PAGE_TOKENS)
    }

    /// Architecture and size in words.
    pub fn describe(&self) -> String {
        let n = self.parameters() as f64;
        let size = match n {
            n if n >= 1e9 => format!("{:.1} B", n / 1e9),
            n if n >= 1e6 => format!("{:.1} M", n / 1e6),
            n => format!("{:.1} k", n / 1e3),
        };
        format!("{}, {} layers x {}, {size}", self.architecture.name(), self.layers, self.hidden)
    }
}

/// The longest sequence: what the model allows, or less where `context` asks for less.
fn lowered(allowed: usize, context: Option<u32>) -> Result<usize, String> {
    match context.map(|c| c as usize) {
        None => Ok(allowed),
        Some(c) if (1..=allowed).contains(&c) => Ok(c),
        Some(c) => Err(format!(
            "max_position_embeddings is {allowed}; a context of {c} is not possible, set at most {allowed}"
        )),
    }
}

fn architecture(names: &[String]) -> Result<Architecture, String> {
    let name = names.first().map_or("", String::as_str);
    match name {
        "LlamaForCausalLM" => Ok(Architecture::Llama),
        "MistralForCausalLM" => Ok(Architecture::Mistral),
        "Qwen2ForCausalLM" => Ok(Architecture::Qwen2),
        "Qwen3ForCausalLM" => Ok(Architecture::Qwen3),
        _ => Err(format!(
            "architectures names `{name}`, which is not supported; use a model of LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM"
        )),
    }
}
