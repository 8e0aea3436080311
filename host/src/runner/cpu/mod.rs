//! The CPU runner: f32, the reference for every other runner.

mod forward;
mod model;
pub(crate) mod nets;

use std::path::Path;

use tokenrouter_kernels::{KvPool, KvShape, PAGE};

use super::model_config::{LoadError, ModelConfig};
use super::net::{MakeReady, Net, NetId, ReadyNet};
use super::sampler::Sampler;
pub use super::weights::Progress;
use super::weights::Weights;
use super::{ModelInfo, PAGE_TOKENS, RowBatch, RowOutputs, Runner, RunnerError, check};
use crate::request::ModelId;
use forward::Buffers;
use model::Model;
use nets::CpuNet;

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
    /// By id; `None` for one that was given up.
    nets: Vec<Option<CpuNet>>,
    /// Last hidden state at each position of each page, `[pages, PAGE, hidden]`: for nets that look back.
    /// Empty without such a net; kept only for sequences that name one.
    hidden_pages: Vec<f32>,
}

/// Bytes of one K/V page over all layers, before anything is loaded.
pub fn page_bytes(config: &ModelConfig) -> u64 {
    kv_shape(config).page_bytes()
}

/// Bytes of the weights, before anything is loaded.
pub fn weight_bytes(config: &ModelConfig) -> u64 {
    config.parameters() * size_of::<f32>() as u64
}

/// Bytes that a page takes besides its K/V where a net looks back: the hidden states of its positions.
pub fn hidden_page_bytes(info: &ModelInfo) -> u64 {
    (PAGE_TOKENS * info.hidden_size as usize * size_of::<f32>()) as u64
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
            hidden_size: config.hidden as u32,
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
            nets: Vec::new(),
            hidden_pages: Vec::new(),
            info,
            config,
            model,
        })
    }

    /// The model's architecture.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn net(&self, id: NetId) -> Option<&CpuNet> {
        self.nets.get(id.0 as usize)?.as_ref()
    }
}

fn ready(net: Net) -> ReadyNet {
    ReadyNet::new(CpuNet::new(net))
}

impl Runner for CpuRunner {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn load_net(&mut self, net: Net) -> Result<NetId, RunnerError> {
        let (id, name) = (NetId(self.nets.len() as u32), net.name.clone());
        self.place_net(id, ready(net)).map_err(|e| RunnerError::new(format!("{name}: {e}")))?;
        Ok(id)
    }

    fn net_maker(&self) -> Option<MakeReady> {
        Some(ready)
    }

    fn place_net(&mut self, id: NetId, net: ReadyNet) -> Result<(), RunnerError> {
        let net: CpuNet = net.take().ok_or_else(|| RunnerError::new("the net is not one for the CPU"))?;
        // Kept once it is there: pages of the prefix cache count on what it holds.
        if net.back > 0 && self.hidden_pages.is_empty() {
            let numbers = self.info.pages as usize * PAGE_TOKENS * self.config.hidden;
            if !fits_in_memory(numbers as u64 * size_of::<f32>() as u64) {
                let message = format!("no memory for the hidden states of {} pages", self.info.pages);
                return Err(RunnerError::new(message));
            }
            self.hidden_pages = vec![0.0; numbers];
        }
        let place = id.0 as usize;
        self.nets.resize_with(self.nets.len().max(place + 1), || None);
        self.nets[place] = Some(net);
        Ok(())
    }

    fn remove_net(&mut self, id: NetId) -> Option<ReadyNet> {
        self.nets.get_mut(id.0 as usize)?.take().map(ReadyNet::new)
    }

    fn forget_nets(&mut self) {
        self.nets.clear();
    }

    fn forward(&mut self, batch: &RowBatch<'_>) -> Result<RowOutputs, RunnerError> {
        check(&self.info, |net| self.net(net).is_some(), batch)?;
        self.compute(batch);
        let mut outputs = self.sample(batch);
        outputs.scores = self.score(batch);
        self.evaluate_nets(batch, &mut outputs);
        if batch.hidden {
            outputs.hidden.clone_from(&self.buffers.hidden);
        }
        Ok(outputs)
    }
}
