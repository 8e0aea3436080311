//! Models with random weights in a directory, for runners that draw their own differently.

use serde_json::json;
use tempfile::TempDir;

use crate::nets::noise;

pub struct Shape {
    pub hidden: usize,
    pub vocabulary: usize,
    pub inner: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
}

/// Write a model in f32.
pub fn write_random(shape: &Shape) -> TempDir {
    let &Shape { hidden, vocabulary, inner, layers, heads, kv_heads, dim } = shape;
    let directory = TempDir::new().unwrap();
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": hidden, "vocab_size": vocabulary,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": dim, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": false, "eos_token_id": 2,
    });
    std::fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
    let mut tensors: Vec<(String, Vec<usize>)> = vec![
        ("model.embed_tokens.weight".into(), vec![vocabulary, hidden]),
        ("lm_head.weight".into(), vec![vocabulary, hidden]),
        ("model.norm.weight".into(), vec![hidden]),
    ];
    for layer in 0..layers {
        let of_layer = [
            ("input_layernorm", vec![hidden]),
            ("post_attention_layernorm", vec![hidden]),
            ("self_attn.q_proj", vec![heads * dim, hidden]),
            ("self_attn.k_proj", vec![kv_heads * dim, hidden]),
            ("self_attn.v_proj", vec![kv_heads * dim, hidden]),
            ("self_attn.o_proj", vec![hidden, heads * dim]),
            ("mlp.gate_proj", vec![inner, hidden]),
            ("mlp.up_proj", vec![inner, hidden]),
            ("mlp.down_proj", vec![hidden, inner]),
        ];
        tensors.extend(of_layer.map(|(name, shape)| (format!("model.layers.{layer}.{name}.weight"), shape)));
    }
    let values: Vec<Vec<u8>> = (0..).zip(&tensors).map(|(seed, (name, shape))| weights(name, shape, seed)).collect();
    let views = tensors.iter().zip(&values).map(|((name, shape), bytes)| {
        (name.clone(), safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes).unwrap())
    });
    let file = safetensors::serialize(views.collect::<Vec<_>>(), None).unwrap();
    std::fs::write(directory.path().join("model.safetensors"), file).unwrap();
    directory
}

/// Such that what a layer gives is about as large as what it gets.
fn weights(name: &str, shape: &[usize], seed: u64) -> Vec<u8> {
    let scale = match shape {
        [_, inputs] if name.contains("layers") => 6.0 / (*inputs as f32).sqrt(),
        _ => 2.0,
    };
    noise(shape.iter().product(), seed).iter().flat_map(|value| (value * scale).to_le_bytes()).collect()
}
