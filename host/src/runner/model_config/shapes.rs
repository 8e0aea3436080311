//! Shapes of published models, for models with random weights.
//!
//! The numbers are those of each repository's `config.json` on the Hugging Face hub; the tests hold them
//! against the published numbers of parameters.

use super::{Architecture, ModelConfig, RopeScaling, lowered};

/// The shape of one published model.
#[derive(Debug, PartialEq)]
pub struct Shape {
    pub name: &'static str,
    /// Repository on the hub whose `config.json` has the numbers.
    pub source: &'static str,
    architecture: Architecture,
    vocab_size: usize,
    hidden: usize,
    intermediate: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    norm_eps: f32,
    rope_theta: f64,
    rope_scaling: RopeScaling,
    tied: bool,
    context: usize,
}

impl Shape {
    /// What a model of this shape computes. `context` lowers the longest sequence. It has no end tokens:
    /// random weights would write one by chance, and no answer would have the length that was asked for.
    pub fn config(&self, context: Option<u32>) -> Result<ModelConfig, String> {
        Ok(ModelConfig {
            architecture: self.architecture,
            vocab_size: self.vocab_size,
            hidden: self.hidden,
            intermediate: self.intermediate,
            layers: self.layers,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            norm_eps: self.norm_eps,
            rope_theta: self.rope_theta,
            rope_scaling: self.rope_scaling,
            tied: self.tied,
            qkv_bias: self.architecture == Architecture::Qwen2,
            output_bias: false,
            mlp_bias: false,
            qk_norm: self.architecture == Architecture::Qwen3,
            context: lowered(self.context, context)?,
            eos: Vec::new(),
        })
    }
}

/// The shape called `name`.
pub fn find(name: &str) -> Option<&'static Shape> {
    SHAPES.iter().find(|shape| shape.name == name)
}

/// What the models of a family share.
const QWEN3: Shape = Shape {
    name: "",
    source: "",
    architecture: Architecture::Qwen3,
    vocab_size: 151_936,
    hidden: 0,
    intermediate: 0,
    layers: 0,
    heads: 0,
    kv_heads: 8,
    head_dim: 128,
    norm_eps: 1e-6,
    rope_theta: 1e6,
    rope_scaling: RopeScaling::None,
    tied: false,
    context: 40_960,
};
const QWEN25: Shape = Shape { architecture: Architecture::Qwen2, vocab_size: 152_064, context: 32_768, ..QWEN3 };
const LLAMA3: Shape = Shape {
    architecture: Architecture::Llama,
    vocab_size: 128_256,
    norm_eps: 1e-5,
    rope_theta: 5e5,
    context: 131_072,
    ..QWEN3
};

const fn llama3_scaling(factor: f64) -> RopeScaling {
    RopeScaling::Llama3 { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192.0 }
}

/// All shapes, by family and size.
pub const SHAPES: [Shape; 15] = [
    Shape {
        name: "qwen3-0.6b",
        source: "Qwen/Qwen3-0.6B",
        hidden: 1024,
        intermediate: 3072,
        layers: 28,
        heads: 16,
        tied: true,
        ..QWEN3
    },
    Shape {
        name: "qwen3-1.7b",
        source: "Qwen/Qwen3-1.7B",
        hidden: 2048,
        intermediate: 6144,
        layers: 28,
        heads: 16,
        tied: true,
        ..QWEN3
    },
    Shape {
        name: "qwen3-4b",
        source: "Qwen/Qwen3-4B",
        hidden: 2560,
        intermediate: 9728,
        layers: 36,
        heads: 32,
        tied: true,
        ..QWEN3
    },
    Shape {
        name: "qwen3-8b",
        source: "Qwen/Qwen3-8B",
        hidden: 4096,
        intermediate: 12_288,
        layers: 36,
        heads: 32,
        ..QWEN3
    },
    Shape {
        name: "qwen3-14b",
        source: "Qwen/Qwen3-14B",
        hidden: 5120,
        intermediate: 17_408,
        layers: 40,
        heads: 40,
        ..QWEN3
    },
    Shape {
        name: "qwen3-32b",
        source: "Qwen/Qwen3-32B",
        hidden: 5120,
        intermediate: 25_600,
        layers: 64,
        heads: 64,
        ..QWEN3
    },
    Shape {
        name: "qwen2.5-0.5b",
        source: "Qwen/Qwen2.5-0.5B-Instruct",
        vocab_size: 151_936,
        hidden: 896,
        intermediate: 4864,
        layers: 24,
        heads: 14,
        kv_heads: 2,
        head_dim: 64,
        tied: true,
        ..QWEN25
    },
    Shape {
        name: "qwen2.5-1.5b",
        source: "Qwen/Qwen2.5-1.5B-Instruct",
        vocab_size: 151_936,
        hidden: 1536,
        intermediate: 8960,
        layers: 28,
        heads: 12,
        kv_heads: 2,
        tied: true,
        ..QWEN25
    },
    Shape {
        name: "qwen2.5-7b",
        source: "Qwen/Qwen2.5-7B-Instruct",
        hidden: 3584,
        intermediate: 18_944,
        layers: 28,
        heads: 28,
        kv_heads: 4,
        ..QWEN25
    },
    Shape {
        name: "qwen2.5-14b",
        source: "Qwen/Qwen2.5-14B-Instruct",
        hidden: 5120,
        intermediate: 13_824,
        layers: 48,
        heads: 40,
        ..QWEN25
    },
    Shape {
        name: "qwen2.5-32b",
        source: "Qwen/Qwen2.5-32B-Instruct",
        hidden: 5120,
        intermediate: 27_648,
        layers: 64,
        heads: 40,
        ..QWEN25
    },
    Shape {
        name: "llama-3.2-1b",
        source: "meta-llama/Llama-3.2-1B",
        hidden: 2048,
        intermediate: 8192,
        layers: 16,
        heads: 32,
        head_dim: 64,
        rope_scaling: llama3_scaling(32.0),
        tied: true,
        ..LLAMA3
    },
    Shape {
        name: "llama-3.2-3b",
        source: "meta-llama/Llama-3.2-3B",
        hidden: 3072,
        intermediate: 8192,
        layers: 28,
        heads: 24,
        rope_scaling: llama3_scaling(32.0),
        tied: true,
        ..LLAMA3
    },
    Shape {
        name: "llama-3.1-8b",
        source: "meta-llama/Llama-3.1-8B",
        hidden: 4096,
        intermediate: 14_336,
        layers: 32,
        heads: 32,
        rope_scaling: llama3_scaling(8.0),
        ..LLAMA3
    },
    Shape {
        name: "mistral-7b-v0.3",
        source: "mistralai/Mistral-7B-v0.3",
        architecture: Architecture::Mistral,
        vocab_size: 32_768,
        hidden: 4096,
        intermediate: 14_336,
        layers: 32,
        heads: 32,
        norm_eps: 1e-5,
        context: 32_768,
        ..QWEN3
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    /// As the hub shows them, an embedding that is also the head counted once.
    const PARAMETERS: [(&str, u64); 15] = [
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("llama-3.1-8b", 8_030_261_248),
        ("mistral-7b-v0.3", 7_248_023_552),
    ];

    #[test]
    fn published_numbers_of_parameters() {
        let computed = SHAPES.iter().map(|shape| (shape.name, shape.config(None).unwrap().parameters()));
        assert_eq!(computed.collect::<Vec<_>>(), PARAMETERS);
    }

    #[test]
    fn a_context_only_lowers() {
        let shape = find("qwen3-32b").unwrap();
        assert_eq!(shape.config(Some(8192)).unwrap().context, 8192);
        assert!(shape.config(Some(50_000)).unwrap_err().contains("max_position_embeddings is 40960"));
        assert_eq!(find("qwen3-32"), None);
    }
}
