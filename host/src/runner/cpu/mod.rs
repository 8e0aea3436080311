//! The CPU runner: f32, the reference for every other runner.

mod forward;
mod model;
mod weights;

use std::path::Path;

use tokenrouter_kernels::{KvPool, KvShape, PAGE};

use super::model_config::{LoadError, ModelConfig};
use super::sampler::Sampler;
use super::{ModelInfo, PAGE_TOKENS, RowBatch, RowOutputs, Runner, RunnerError};
use crate::request::ModelId;
use forward::Buffers;
use model::Model;
pub use weights::Progress;
use weights::Weights;

const _: () = assert!(PAGE_TOKENS == PAGE, "pages of the host and of the kernels");

/// How to load a model.
pub struct LoadOptions<'a> {
    /// Name in the configuration.
    pub name: String,
    /// Index of the model; keys its sampling noise.
    pub model: ModelId,
    /// Pages of the K/V pool.
    pub pages: u32,
    /// Longest sequence, if shorter than the model allows.
    pub context: Option<u32>,
    /// Told how far loading is.
    pub progress: Option<Progress<'a>>,
}

/// A model on the CPU.
pub struct CpuRunner {
    info: ModelInfo,
    config: ModelConfig,
    model: Model,
    pool: KvPool,
    frequencies: Vec<f32>,
    sampler: Sampler,
    buffers: Buffers,
}

/// Bytes of one K/V page over all layers, before anything is loaded.
pub fn page_bytes(config: &ModelConfig) -> u64 {
    kv_shape(config).page_bytes()
}

/// Bytes of the weights, before anything is loaded.
pub fn weight_bytes(config: &ModelConfig) -> u64 {
    config.parameters() * size_of::<f32>() as u64
}

fn kv_shape(config: &ModelConfig) -> KvShape {
    KvShape { layers: config.layers, kv_heads: config.kv_heads, head_dim: config.head_dim }
}

/// Whether so much can be allocated; a failed allocation of the pool itself would end the process.
fn fits_in_memory(bytes: u64) -> bool {
    // Systems that overcommit promise more than any machine has.
    const MOST: u64 = 1 << 44;
    bytes < MOST && usize::try_from(bytes).is_ok_and(|bytes| Vec::<u8>::new().try_reserve_exact(bytes).is_ok())
}

impl CpuRunner {
    /// Load the model of a Hugging Face directory.
    pub fn load(dir: &Path, options: LoadOptions<'_>) -> Result<Self, LoadError> {
        let config = ModelConfig::load(dir, options.context)?;
        let shape = kv_shape(&config);
        let pool_bytes = u64::from(options.pages).saturating_mul(shape.page_bytes());
        if options.pages == 0 || !fits_in_memory(pool_bytes) {
            let pages = options.pages;
            return Err(LoadError::new(
                dir,
                format!(
                    "a K/V pool of {pages} pages ({pool_bytes} bytes) is not possible; give between 1 and what memory holds"
                ),
            ));
        }
        let model = Model::load(&config, &mut Weights::open(dir, options.progress)?)?;
        let info = ModelInfo {
            name: options.name,
            description: config.describe(),
            vocab_size: config.vocab_size as u32,
            context: config.context as u32,
            eos: config.eos.clone(),
            pages: options.pages,
            weight_bytes: model.bytes(),
            page_bytes: shape.page_bytes(),
        };
        Ok(Self {
            pool: KvPool::new(shape, options.pages as usize),
            frequencies: config.rope_frequencies(),
            sampler: Sampler::new(options.model, info.eos.clone()),
            buffers: Buffers::default(),
            info,
            config,
            model,
        })
    }

    /// The model's architecture.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }
}

impl Runner for CpuRunner {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn forward(&mut self, batch: &RowBatch<'_>) -> Result<RowOutputs, RunnerError> {
        self.check(batch)?;
        self.compute(batch);
        Ok(self.sample(batch))
    }
}
