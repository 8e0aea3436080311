//! The CUDA runner.

use std::path::Path;

use super::model_config::{LoadError, ModelConfig};
use super::{PAGE_TOKENS, Runner};
use crate::request::ModelId;

pub use super::cpu::Progress;

/// A device that the CUDA runner can use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    pub ordinal: u32,
    pub name: String,
    /// Bytes of its memory.
    pub total: u64,
    /// Bytes that nobody uses now.
    pub free: u64,
}

/// The device number `ordinal`. The error is one sentence: what was looked for and where.
pub fn device(ordinal: u32) -> Result<DeviceInfo, String> {
    Err(missing(ordinal))
}

fn missing(ordinal: u32) -> String {
    format!("no CUDA device {ordinal} was found: this build has no CUDA runner")
}

/// Type of the weights and of K/V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    Bf16,
    F32,
}

impl Dtype {
    /// Bytes of one number.
    pub fn size(self) -> u64 {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }
}

/// Bytes of the weights, before anything is loaded.
pub fn weight_bytes(config: &ModelConfig, dtype: Dtype) -> u64 {
    config.parameters() * dtype.size()
}

/// Bytes of one K/V page over all layers.
pub fn page_bytes(config: &ModelConfig, dtype: Dtype) -> u64 {
    2 * (config.layers * config.kv_heads * config.head_dim * PAGE_TOKENS) as u64 * dtype.size()
}

/// Bytes of everything else that a loaded model keeps on its device.
pub fn workspace_bytes(config: &ModelConfig, dtype: Dtype, max_rows: u32, prefill_chunk: u32) -> u64 {
    u64::from(max_rows.max(prefill_chunk)) * (config.vocab_size + config.intermediate) as u64 * dtype.size()
}

/// Where the weights come from.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// A Hugging Face directory.
    Directory(&'a Path),
    /// Generated on the device.
    Random { seed: u64 },
}

/// How to load a model.
pub struct LoadOptions<'a> {
    /// Name in the configuration.
    pub name: String,
    /// Index of the model; keys its sampling noise.
    pub model: ModelId,
    pub ordinal: u32,
    pub dtype: Dtype,
    /// Pages of the K/V pool.
    pub pages: u32,
    /// Most rows of one forward.
    pub max_rows: u32,
    /// Most prompt rows of one request in one forward.
    pub prefill_chunk: u32,
    /// Its steps go before those of models of normal priority on the same device.
    pub high_priority: bool,
    /// Told how far loading is.
    pub progress: Option<Progress<'a>>,
}

/// A model on a CUDA device.
pub struct CudaRunner;

impl CudaRunner {
    /// Load a model.
    pub fn load(
        _config: ModelConfig,
        source: Source<'_>,
        options: LoadOptions<'_>,
    ) -> Result<Box<dyn Runner>, LoadError> {
        let place = match source {
            Source::Directory(directory) => directory,
            Source::Random { .. } => Path::new(&options.name),
        };
        Err(LoadError::new(place, missing(options.ordinal)))
    }
}
