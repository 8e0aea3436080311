//! Reading tensors from safetensors files, checked against the shapes that `config.json` implies.

use std::collections::{HashMap, HashSet};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use serde::Deserialize;
use tokenrouter_kernels as kernels;

use crate::runner::model_config::{LoadError, ModelConfig, read_json};
use crate::runner::safetensors_file::SafetensorsFile;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Bytes read at a time.
const CHUNK: usize = 4 << 20;

/// Called with bytes loaded so far and in total.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

/// The tensors of a model directory.
pub(crate) struct Weights<'a> {
    shards: Vec<SafetensorsFile>,
    /// Shard of each tensor.
    places: HashMap<String, usize>,
    /// Where the list of tensors comes from, for messages.
    source: PathBuf,
    progress: Option<Progress<'a>>,
    loaded: u64,
    total: u64,
    buffer: Vec<u8>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: HashMap<String, String>,
}

impl<'a> Weights<'a> {
    /// Open the files of `dir` and read their headers.
    pub(crate) fn open(dir: &Path, progress: Option<Progress<'a>>) -> Result<Self, LoadError> {
        let index_path = dir.join(INDEX);
        let (mut shards, mut places) = (Vec::new(), HashMap::new());
        let source = if let Some(index) = read_json::<Index>(&index_path)? {
            let mut names: Vec<&String> = index.weight_map.values().collect();
            names.sort_unstable();
            names.dedup();
            for name in &names {
                if Path::new(name).components().count() != 1 || !name.ends_with(".safetensors") {
                    let message = format!("weight_map names `{name}`, which is no safetensors file of this directory");
                    return Err(LoadError::new(&index_path, message));
                }
                let path = dir.join(name);
                if !path.is_file() {
                    let message = format!("weight_map names `{name}`, which is missing; download it again");
                    return Err(LoadError::new(&index_path, message));
                }
                shards.push(SafetensorsFile::open(path)?);
            }
            for (tensor, name) in &index.weight_map {
                if let Ok(shard) = names.binary_search(&name) {
                    places.insert(tensor.clone(), shard);
                }
            }
            index_path
        } else {
            let path = dir.join(SINGLE);
            if !path.is_file() {
                return Err(LoadError::new(
                    dir,
                    format!(
                        "has neither {SINGLE} nor {INDEX}; weights in other formats (.bin, .gguf) must be converted to safetensors"
                    ),
                ));
            }
            let shard = SafetensorsFile::open(path.clone())?;
            places.extend(shard.header.tensors().into_keys().map(|name| (name, 0)));
            shards.push(shard);
            path
        };
        Ok(Self { shards, places, source, progress, loaded: 0, total: 0, buffer: Vec::new() })
    }

    /// How many bytes will be read, for the progress callback.
    pub(crate) fn expect(&mut self, tensors: impl Iterator<Item = String>) {
        self.total = tensors
            .filter_map(|name| {
                let (start, end) = self.shards[*self.places.get(&name)?].header.info(&name)?.data_offsets;
                Some((end - start) as u64)
            })
            .sum();
    }

    /// Refuse layers' tensors that are not among `used`: the model would run without an error and with
    /// wrong answers, because config.json is of another model.
    pub(crate) fn refuse_unused(&self, config: &ModelConfig, used: &[String]) -> Result<(), LoadError> {
        let used: HashSet<&str> = used.iter().map(String::as_str).collect();
        let stored = self.shards.iter().flat_map(|shard| shard.header.offset_keys());
        // By layer and name, so that the same files always give the same message.
        let unused = (self.places.keys().cloned().chain(stored))
            .filter_map(|name| Some((layer_of(&name)?, name)))
            .filter(|(_, name)| !used.contains(name.as_str()) && !is_computed(name))
            .min();
        let Some((layer, name)) = unused else { return Ok(()) };
        let layers = config.layers;
        let message = if layer.is_some_and(|layer| layer >= layers) {
            format!("tensor `{name}` is of a layer beyond num_hidden_layers {layers} of config.json")
        } else {
            let architecture = config.architecture.name();
            format!("tensor `{name}` is not part of the {architecture} model that config.json describes")
        };
        Err(LoadError::new(&self.source, format!("{message}; download the config.json that belongs to these weights")))
    }

    /// A tensor as f32.
    pub(crate) fn load(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        let mut values = vec![0.0; shape.iter().product()];
        self.read(name, shape, CHUNK / size_of::<f32>(), &mut |start, stored| {
            stored.to_f32(&mut values[start..start + stored.len()]);
            Ok(())
        })?;
        Ok(values)
    }

    /// Give `each` the numbers of a tensor in order, at most `most` at a time, with the place of the first.
    pub(crate) fn read(
        &mut self,
        name: &str,
        shape: &[usize],
        most: usize,
        each: &mut dyn FnMut(usize, Stored<'_>) -> Result<(), LoadError>,
    ) -> Result<(), LoadError> {
        let Some(&place) = self.places.get(name) else {
            let message = format!(
                "tensor `{name}` {shape:?} is missing, which config.json implies; download the weights that belong to config.json"
            );
            return Err(LoadError::new(&self.source, message));
        };
        let shard = &mut self.shards[place];
        let Some(info) = shard.header.info(name) else {
            let message =
                format!("tensor `{name}` is missing, though {INDEX} says it is in this file; download both again");
            return Err(LoadError::new(&shard.path, message));
        };
        if info.shape != shape {
            let message = format!(
                "tensor `{name}` has shape {:?}, but config.json implies {shape:?}; the two belong to different models",
                info.shape
            );
            return Err(LoadError::new(&shard.path, message));
        }
        let width = match info.dtype {
            Dtype::BF16 | Dtype::F16 => 2,
            Dtype::F32 => 4,
            other => {
                let message = format!(
                    "tensor `{name}` is stored as {other:?}, which is not supported; use bf16, f16 or f32 weights"
                );
                return Err(LoadError::new(&shard.path, message));
            }
        };
        let dtype = info.dtype;
        let failed = |e: std::io::Error| LoadError::new(&shard.path, format!("tensor `{name}` cannot be read: {e}"));
        shard.file.seek(SeekFrom::Start(shard.data_start + info.data_offsets.0 as u64)).map_err(failed)?;
        let count = shape.iter().product();
        let mut start = 0;
        while start < count {
            let part = most.min(count - start);
            self.buffer.resize(part * width, 0);
            shard.file.read_exact(&mut self.buffer).map_err(failed)?;
            each(start, Stored { dtype, bytes: &self.buffer })?;
            start += part;
            self.loaded += (part * width) as u64;
            if let Some(progress) = &mut self.progress {
                progress(self.loaded, self.total);
            }
        }
        Ok(())
    }
}

/// Numbers as a file stores them: bf16, f16 or f32.
pub(crate) struct Stored<'a> {
    dtype: Dtype,
    bytes: &'a [u8],
}

impl Stored<'_> {
    pub(crate) fn len(&self) -> usize {
        self.bytes.len() / if self.dtype == Dtype::F32 { 4 } else { 2 }
    }

    /// As f32; `out` is as long as these.
    pub(crate) fn to_f32(&self, out: &mut [f32]) {
        match self.dtype {
            Dtype::BF16 => kernels::bf16_to_f32(self.bytes, out),
            Dtype::F16 => kernels::f16_to_f32(self.bytes, out),
            _ => kernels::f32_from_le(self.bytes, out),
        }
    }

    /// As bf16, rounded to nearest even; `out` is as long as these.
    pub(crate) fn to_bf16(&self, out: &mut [u16]) {
        if self.dtype == Dtype::BF16 {
            for (out, bytes) in out.iter_mut().zip(self.bytes.as_chunks().0) {
                *out = u16::from_le_bytes(*bytes);
            }
            return;
        }
        let mut values = vec![0.0; out.len()];
        self.to_f32(&mut values);
        for (out, value) in out.iter_mut().zip(values) {
            *out = half::bf16::from_f32(value).to_bits();
        }
    }
}

/// Number of the layer that a tensor is of; `None` outside of layers, and inside for one without a number.
fn layer_of(name: &str) -> Option<Option<usize>> {
    let rest = name.strip_prefix("model.layers.")?;
    Some(rest.split('.').next().and_then(|number| number.parse().ok()))
}

/// Old files store tables and masks that are computed anew.
fn is_computed(name: &str) -> bool {
    name.contains(".rotary_emb.") || name.ends_with(".attn.masked_bias")
}

/// The tensors of a model.
pub(crate) fn tensor_names(config: &ModelConfig) -> Vec<String> {
    let mut names = vec!["model.embed_tokens.weight".to_owned(), "model.norm.weight".to_owned()];
    if !config.tied {
        names.push("lm_head.weight".to_owned());
    }
    let mut parts = vec!["input_layernorm.weight".to_owned(), "post_attention_layernorm.weight".to_owned()];
    for (part, bias) in [
        ("self_attn.q_proj", config.qkv_bias),
        ("self_attn.k_proj", config.qkv_bias),
        ("self_attn.v_proj", config.qkv_bias),
        ("self_attn.o_proj", config.output_bias),
        ("mlp.gate_proj", config.mlp_bias),
        ("mlp.up_proj", config.mlp_bias),
        ("mlp.down_proj", config.mlp_bias),
    ] {
        parts.push(format!("{part}.weight"));
        if bias {
            parts.push(format!("{part}.bias"));
        }
    }
    if config.qk_norm {
        parts.extend(["self_attn.q_norm.weight".to_owned(), "self_attn.k_norm.weight".to_owned()]);
    }
    for layer in 0..config.layers {
        names.extend(parts.iter().map(|part| format!("model.layers.{layer}.{part}")));
    }
    names
}
