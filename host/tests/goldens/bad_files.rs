//! Damaged and unsupported model directories: one clear line each.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;
use tokenrouter::runner::Runner;
use tokenrouter::runner::cpu::{CpuRunner, LoadOptions};

use crate::support::{options, tiny};

struct Model(TempDir);

impl Model {
    fn new(architecture: &str) -> Self {
        let dir = TempDir::new().unwrap();
        for file in ["config.json", "model.safetensors"] {
            fs::copy(tiny::dir(architecture).join(file), dir.path().join(file)).unwrap();
        }
        Self(dir)
    }

    fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }

    fn config(self, changes: Value) -> Self {
        let mut config: Value = serde_json::from_slice(&fs::read(self.path("config.json")).unwrap()).unwrap();
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        fs::write(self.path("config.json"), config.to_string()).unwrap();
        self
    }

    /// Change the bytes of the weights.
    fn weights(self, change: impl FnOnce(&mut Vec<u8>)) -> Self {
        let mut bytes = fs::read(self.path("model.safetensors")).unwrap();
        change(&mut bytes);
        fs::write(self.path("model.safetensors"), bytes).unwrap();
        self
    }

    /// Change the header of the weights, keeping the data.
    fn header(self, change: impl FnOnce(&mut Value)) -> Self {
        self.weights(|bytes| {
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
            change(&mut header);
            let header = header.to_string();
            let data = bytes.split_off(8 + length);
            *bytes = (header.len() as u64).to_le_bytes().to_vec();
            bytes.extend(header.as_bytes());
            bytes.extend(data);
        })
    }

    /// Split off into two shards with an index.
    fn sharded(self) -> Self {
        let bytes = fs::read(self.path("model.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let (first, second): (Vec<_>, Vec<_>) =
            file.tensors().into_iter().partition(|(name, _)| name.contains("layers.0"));
        let mut index = serde_json::Map::new();
        for (shard, tensors) in [("model-1.safetensors", first), ("model-2.safetensors", second)] {
            index.extend(tensors.iter().map(|(name, _)| (name.clone(), json!(shard))));
            fs::write(self.path(shard), safetensors::serialize(tensors, None).unwrap()).unwrap();
        }
        fs::write(self.path("model.safetensors.index.json"), json!({"weight_map": index}).to_string()).unwrap();
        fs::remove_file(self.path("model.safetensors")).unwrap();
        self
    }

    fn load(&self) -> Result<CpuRunner, String> {
        load(self.0.path())
    }

    /// The error has one line and holds all of `parts`.
    fn fails(&self, parts: &[&str]) {
        fails(self.load(), parts);
    }
}

fn load(dir: &Path) -> Result<CpuRunner, String> {
    CpuRunner::load(dir, options(8)).map_err(|e| e.to_string())
}

fn fails(result: Result<CpuRunner, String>, parts: &[&str]) {
    let Err(message) = result else { panic!("loaded, but should fail with {parts:?}") };
    assert_eq!(message.lines().count(), 1, "{message}");
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

#[test]
fn missing_files() {
    fails(load(Path::new("no/such/model")), &["no/such/model", "no such directory"]);
    let model = Model::new("qwen3");
    fs::remove_file(model.path("model.safetensors")).unwrap();
    fs::write(model.path("pytorch_model.bin"), "pickle").unwrap();
    model.fails(&["model.safetensors", "converted"]);
    fs::remove_file(model.path("config.json")).unwrap();
    model.fails(&["config.json", "no such file"]);
}

#[test]
fn damaged_configuration() {
    let model = Model::new("qwen3");
    fs::write(model.path("config.json"), "{").unwrap();
    model.fails(&["config.json", "download"]);
    fs::write(model.path("config.json"), "{\"architectures\": [\"Qwen3ForCausalLM\"]}").unwrap();
    model.fails(&["config.json", "vocab_size"]);
    Model::new("qwen3").config(json!({"num_key_value_heads": 3})).fails(&["num_key_value_heads 3"]);
    Model::new("qwen3").config(json!({"num_key_value_heads": 0})).fails(&["num_key_value_heads is 0"]);
    Model::new("qwen3").config(json!({"head_dim": 15})).fails(&["head_dim is 15"]);
    Model::new("qwen3").config(json!({"vocab_size": 5_000_000_000u64})).fails(&["vocab_size is 5000000000"]);
    Model::new("qwen3").config(json!({"rope_theta": 0.0})).fails(&["rope_theta is 0.0"]);
    let model = Model::new("qwen3");
    fs::write(model.path("generation_config.json"), "{\"eos_token_id\": \"two\"}").unwrap();
    model.fails(&["generation_config.json", "`eos_token_id`: expected a token id"]);
    Model::new("qwen3")
        .config(json!({"eos_token_id": -1}))
        .fails(&["config.json", "`eos_token_id`: expected a token id"]);
    Model::new("qwen3").config(json!({"hidden_size": "64"})).fails(&["config.json", "`hidden_size`: ", "whole number"]);
    let model = Model::new("qwen3");
    fs::write(model.path("config.json"), "[]").unwrap();
    model.fails(&["config.json", "is no JSON object"]);
}

#[test]
fn unsupported_models() {
    Model::new("qwen3")
        .config(json!({"architectures": ["GPT2LMHeadModel"]}))
        .fails(&["GPT2LMHeadModel", "Qwen3ForCausalLM"]);
    Model::new("qwen3").config(json!({"architectures": null})).fails(&["architectures"]);
    Model::new("qwen3").config(json!({"hidden_act": "gelu"})).fails(&["hidden_act", "gelu", "silu"]);
    Model::new("qwen3").config(json!({"quantization_config": {"quant_method": "awq"}})).fails(&["awq"]);
    Model::new("qwen3")
        .config(json!({"rope_scaling": {"type": "yarn", "factor": 4.0}}))
        .fails(&["rope_scaling", "yarn"]);
    Model::new("qwen3-head-dim")
        .config(json!({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e6}}))
        .fails(&["rope_parameters", "dynamic"]);
    Model::new("llama3").config(json!({"rope_scaling": {"rope_type": "llama3"}})).fails(&["rope_scaling.factor"]);
    Model::new("llama2").config(json!({"partial_rotary_factor": 0.5})).fails(&["partial_rotary_factor 0.5"]);
}

#[test]
fn sliding_windows() {
    let model = Model::new("mistral").config(json!({"sliding_window": 256}));
    model.fails(&["sliding_window 256", "context 512", "at most 256"]);
    let short = LoadOptions { context: Some(256), ..options(8) };
    assert_eq!(CpuRunner::load(model.0.path(), short).unwrap_or_else(|e| panic!("{e}")).info().context, 256);
    assert!(Model::new("mistral").config(json!({"sliding_window": 512})).load().is_ok());
    assert!(Model::new("qwen2").config(json!({"sliding_window": 64})).load().is_ok(), "use_sliding_window is false");
    Model::new("qwen2")
        .config(json!({"sliding_window": 64, "use_sliding_window": true, "layer_types": ["full_attention", "sliding_attention"]}))
        .fails(&["sliding_window 64"]);
}

#[test]
fn impossible_options() {
    let model = Model::new("qwen3");
    let long = LoadOptions { context: Some(513), ..options(8) };
    fails(CpuRunner::load(model.0.path(), long).map_err(|e| e.to_string()), &["513", "512"]);
    fails(CpuRunner::load(model.0.path(), options(0)).map_err(|e| e.to_string()), &["0 pages"]);
    fails(
        CpuRunner::load(model.0.path(), options(u32::MAX)).map_err(|e| e.to_string()),
        &["4294967295 pages", "bytes"],
    );
}

#[test]
fn damaged_weights() {
    Model::new("qwen3").weights(|w| w.truncate(w.len() - 1)).fails(&["model.safetensors", "cut off"]);
    Model::new("qwen3").weights(|w| w.truncate(500)).fails(&["model.safetensors", "500"]);
    Model::new("qwen3").weights(Vec::clear).fails(&["model.safetensors", "0 bytes"]);
    Model::new("qwen3").weights(|w| w[7] = 0x7f).fails(&["model.safetensors", "header"]);
    Model::new("qwen3").weights(|w| w[8] = b'x').fails(&["model.safetensors", "header"]);
    Model::new("qwen3").weights(|w| w.push(0)).fails(&["model.safetensors", "damaged"]);
}

#[test]
fn weights_of_another_model() {
    Model::new("qwen3").config(json!({"intermediate_size": 100})).fails(&[
        "model.layers.0.mlp.gate_proj.weight",
        "[96, 64]",
        "[100, 64]",
    ]);
    Model::new("qwen3")
        .config(json!({"num_hidden_layers": 3}))
        .fails(&["model.layers.2.input_layernorm.weight", "missing"]);
    Model::new("qwen3-head-dim").config(json!({"tie_word_embeddings": false})).fails(&["lm_head.weight", "missing"]);
    Model::new("llama2").config(json!({"attention_bias": true})).fails(&[
        "model.layers.0.self_attn.q_proj.bias",
        "[64]",
        "missing",
    ]);
    Model::new("qwen3").header(|h| h["model.norm.weight"]["dtype"] = json!("I16")).fails(&[
        "model.norm.weight",
        "I16",
        "bf16",
    ]);
}

#[test]
fn tensors_that_config_json_leaves_out() {
    // Of the first layer left out, and the same for shards.
    let unused = ["tensor `model.layers.1.input_layernorm.weight`", "num_hidden_layers 1", "download the config.json"];
    Model::new("qwen3").config(json!({"num_hidden_layers": 1})).fails(&unused);
    Model::new("qwen3").sharded().config(json!({"num_hidden_layers": 1})).fails(&unused);
    // Norms of heads and biases that the named architecture does not have.
    let without_norms = Model::new("qwen3").config(json!({"architectures": ["LlamaForCausalLM"]}));
    without_norms.fails(&["tensor `model.layers.0.self_attn.k_norm.weight`", "llama"]);
    let without_biases = Model::new("qwen2").config(json!({"architectures": ["LlamaForCausalLM"]}));
    without_biases.fails(&["tensor `model.layers.0.self_attn.k_proj.bias`", "llama"]);
}

#[test]
fn further_tensors_are_fine() {
    let empty = json!({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]});
    for name in [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.9.attn.masked_bias",
        "vision.layers.0.weight",
        "router.weight",
    ] {
        let model = Model::new("qwen3").header(|header| header[name] = empty.clone());
        model.load().unwrap_or_else(|e| panic!("{name}: {e}"));
    }
    assert!(
        Model::new("qwen3").config(json!({"tie_word_embeddings": true})).load().is_ok(),
        "an unused lm_head.weight"
    );
}

#[test]
fn numbers_out_of_range() {
    for (eps, shown) in [(json!(0), "0.0"), (json!(-1e-6), "-1e-6"), (json!(0.2), "0.2"), (json!(1e-60), "1e-60")] {
        Model::new("qwen3").config(json!({"rms_norm_eps": eps})).fails(&[
            "config.json",
            &format!("rms_norm_eps is {shown};"),
            "at most 0.1",
        ]);
    }
    for theta in [0.5, -1e4, 1e13] {
        Model::new("qwen3")
            .config(json!({"rope_theta": theta}))
            .fails(&["config.json: rope_theta is", "from 1 to 1e12"]);
    }
    Model::new("qwen3-head-dim")
        .config(json!({"rope_parameters": {"rope_type": "default", "rope_theta": 0.1}}))
        .fails(&["rope_parameters.rope_theta is 0.1"]);
    Model::new("qwen3")
        .config(json!({"rope_scaling": {"type": "linear", "factor": 0.01}}))
        .fails(&["rope_scaling.factor is 0.01"]);
    Model::new("llama3")
        .config(
            json!({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4,
            "original_max_position_embeddings": 8192}}),
        )
        .fails(&["rope_scaling.high_freq_factor is 4.0", "above low_freq_factor 4.0"]);
}

#[test]
fn end_tokens_outside_the_vocabulary() {
    let parts = |file, id| [file, id, "vocab_size of config.json is 256", "remove the id"];
    Model::new("qwen3").config(json!({"eos_token_id": [2, 256]})).fails(&parts("/config.json", "eos_token_id is 256"));
    let model = Model::new("qwen3");
    fs::write(model.path("generation_config.json"), "{\"eos_token_id\": 999}").unwrap();
    model.fails(&parts("generation_config.json", "eos_token_id is 999"));
    fs::remove_file(model.path("generation_config.json")).unwrap();
    fs::write(model.path("tokenizer_config.json"), "{\"eos_token\": \"<end>\"}").unwrap();
    fs::write(model.path("tokenizer.json"), "{\"added_tokens\": [{\"id\": 300, \"content\": \"<end>\"}]}").unwrap();
    model.fails(&parts("tokenizer.json", "the id of the eos_token `<end>` is 300"));
}

#[test]
fn shards() {
    let model = Model::new("qwen3").sharded();
    assert!(model.load().is_ok());
    fs::remove_file(model.path("model-2.safetensors")).unwrap();
    model.fails(&["index.json", "model-2.safetensors", "missing"]);
    fs::copy(model.path("model-1.safetensors"), model.path("model-2.safetensors")).unwrap();
    model.fails(&["model-2.safetensors", "tensor `", "index"]);
    fs::write(model.path("model.safetensors.index.json"), "{\"weight_map\": {\"x\": \"../x.safetensors\"}}").unwrap();
    model.fails(&["../x.safetensors"]);
}

#[test]
fn end_tokens_of_all_files_are_united() {
    let model = Model::new("qwen3");
    fs::write(model.path("generation_config.json"), "{\"eos_token_id\": [9, 2, 7]}").unwrap();
    fs::write(model.path("tokenizer_config.json"), "{\"eos_token\": {\"content\": \"<end>\"}}").unwrap();
    fs::write(
        model.path("tokenizer.json"),
        "{\"added_tokens\": [{\"id\": 5, \"content\": \"<end>\"}, {\"id\": 6, \"content\": \"<pad>\"}]}",
    )
    .unwrap();
    assert_eq!(model.load().unwrap().info().eos, [2, 5, 7, 9]);
}

#[test]
fn progress_ends_at_the_total() {
    let model = Model::new("qwen2");
    let mut seen = Vec::new();
    let mut progress = |done, total| seen.push((done, total));
    let options = LoadOptions { progress: Some(&mut progress), ..options(8) };
    CpuRunner::load(model.0.path(), options).unwrap_or_else(|e| panic!("{e}"));
    assert!(seen.is_sorted());
    let (done, total) = *seen.last().unwrap();
    assert_eq!(done, total);
}
