//! What a model keeps on its device: weights, K/V pages and work memory, laid out by one walk that both
//! counts bytes for the plan and gives out addresses.

use tokenrouter_kernels::gpu::ops::{self, HEADER_WORDS, ITEM_WORDS, LIST, PARAMS_WORDS, SAMPLE_WORDS, chunks};
use tokenrouter_kernels::gpu::{ALIGNMENT, Arena, DevicePtr, GpuError};

use super::Dtype;
use crate::constraint::mask_words;
use crate::runner::PAGE_TOKENS;
use crate::runner::model_config::ModelConfig;

/// Sampled rows of a step.
pub(super) const SLOTS: usize = 64;
/// Columns for the scores of all nets of a model.
pub(super) const SCORES: usize = 16;
/// Numbers that are read from a file and uploaded at a time.
pub(super) const STAGED: usize = 4 << 20;
/// Tokens that can be masked in one step, over all lists.
const MASKED: usize = 1 << 18;

/// Gives out device memory.
pub(super) trait Allocate {
    fn bytes(&mut self, count: usize) -> Result<DevicePtr, GpuError>;
}

impl Allocate for Arena {
    fn bytes(&mut self, count: usize) -> Result<DevicePtr, GpuError> {
        self.alloc(count)
    }
}

/// Counts instead of giving.
#[derive(Default)]
pub(super) struct Counter(pub(super) usize);

impl Allocate for Counter {
    fn bytes(&mut self, count: usize) -> Result<DevicePtr, GpuError> {
        self.0 = self.0.next_multiple_of(ALIGNMENT) + count;
        Ok(DevicePtr(0))
    }
}

fn f32s(to: &mut dyn Allocate, count: usize) -> Result<DevicePtr, GpuError> {
    to.bytes(count * size_of::<f32>())
}

/// A linear layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Linear {
    /// Packed bf16, or f32 row by row.
    pub(super) weight: DevicePtr,
    /// f32, or null for none.
    pub(super) bias: DevicePtr,
}

impl Linear {
    fn allocate(
        dtype: Dtype,
        outputs: usize,
        inputs: usize,
        bias: bool,
        to: &mut dyn Allocate,
    ) -> Result<Self, GpuError> {
        let weight = matrix(dtype, outputs, inputs, to)?;
        let bias = if bias { f32s(to, outputs)? } else { DevicePtr(0) };
        Ok(Self { weight, bias })
    }
}

fn matrix(dtype: Dtype, outputs: usize, inputs: usize, to: &mut dyn Allocate) -> Result<DevicePtr, GpuError> {
    to.bytes(match dtype {
        Dtype::Bf16 => ops::packed_numbers(outputs, inputs) * 2,
        Dtype::F32 => outputs * inputs * 4,
    })
}

/// A decoder layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layer {
    pub(super) attention_norm: DevicePtr,
    pub(super) qkv: Linear,
    /// Of the heads of queries and of keys; null for none.
    pub(super) qk_norm: [DevicePtr; 2],
    pub(super) output: Linear,
    pub(super) mlp_norm: DevicePtr,
    /// In bf16 mixed as `linear.cuh` says, in f32 gate, then up.
    pub(super) gate_up: Linear,
    pub(super) down: Linear,
}

/// The weights of a decoder.
#[derive(Clone, Debug)]
pub(super) struct Tensors {
    pub(super) embedding: DevicePtr,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: DevicePtr,
    /// The embedding where the head is tied.
    pub(super) head: DevicePtr,
    pub(super) frequencies: DevicePtr,
}

impl Tensors {
    pub(super) fn allocate(config: &ModelConfig, dtype: Dtype, to: &mut dyn Allocate) -> Result<Self, GpuError> {
        let (hidden, inner) = (config.hidden, config.intermediate);
        let q = config.heads * config.head_dim;
        let embedding = matrix(dtype, config.vocab_size, hidden, to)?;
        let head = if config.tied { embedding } else { matrix(dtype, config.vocab_size, hidden, to)? };
        let norm = f32s(to, hidden)?;
        let frequencies = f32s(to, config.head_dim / 2)?;
        let mut layer = |_| {
            Ok(Layer {
                attention_norm: f32s(to, hidden)?,
                qkv: Linear::allocate(dtype, qkv_width(config), hidden, config.qkv_bias, to)?,
                qk_norm: if config.qk_norm {
                    [f32s(to, config.head_dim)?, f32s(to, config.head_dim)?]
                } else {
                    [DevicePtr(0); 2]
                },
                output: Linear::allocate(dtype, hidden, q, config.output_bias, to)?,
                mlp_norm: f32s(to, hidden)?,
                gate_up: Linear::allocate(dtype, 2 * inner, hidden, config.mlp_bias, to)?,
                down: Linear::allocate(dtype, hidden, inner, config.mlp_bias, to)?,
            })
        };
        let layers = (0..config.layers).map(&mut layer).collect::<Result<_, GpuError>>()?;
        Ok(Self { embedding, layers, norm, head, frequencies })
    }
}

/// Queries, keys and values of a row.
pub(super) fn qkv_width(config: &ModelConfig) -> usize {
    (config.heads + 2 * config.kv_heads) * config.head_dim
}

/// Where things lie in a step's upload, in words; the page list is last,
/// and behind it are the masked tokens and the bits of those that may be drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UploadLayout {
    /// Rows that it has room for.
    pub(super) rows: usize,
}

impl UploadLayout {
    pub(super) fn tokens(self) -> usize {
        HEADER_WORDS
    }
    pub(super) fn positions(self) -> usize {
        self.tokens() + self.rows
    }
    pub(super) fn page_starts(self) -> usize {
        self.positions() + self.rows
    }
    pub(super) fn items(self) -> usize {
        self.page_starts() + self.rows
    }
    pub(super) fn samples(self) -> usize {
        self.items() + self.rows * ITEM_WORDS
    }
    pub(super) fn token_logits(self) -> usize {
        self.samples() + SLOTS * PARAMS_WORDS
    }
    pub(super) fn page_list(self) -> usize {
        self.token_logits() + LIST
    }
}

/// Where things lie in a step's results, in words. What every step needs comes first.
pub(super) mod results {
    use super::{LIST, SAMPLE_WORDS, SCORES, SLOTS};
    pub(crate) const SAMPLES: usize = 0;
    pub(crate) const SCORES_AT: usize = SLOTS * SAMPLE_WORDS;
    pub(crate) const TOKEN_LOGITS: usize = SCORES_AT + SLOTS * SCORES;
    pub(crate) const TOP_VALUES: usize = TOKEN_LOGITS + SLOTS * LIST;
    pub(crate) const TOP_IDS: usize = TOP_VALUES + SLOTS * LIST;
    pub(crate) const WORDS: usize = TOP_IDS + SLOTS * LIST;
}

/// Work memory of a model.
#[derive(Clone, Debug)]
pub(super) struct Buffers {
    /// Words of [`UploadLayout`] for the largest step.
    pub(super) upload: DevicePtr,
    pub(super) upload_words: usize,
    /// Words of [`results`].
    pub(super) results: DevicePtr,
    /// Residual stream `[rows, hidden]`, f32.
    pub(super) x: DevicePtr,
    /// What linear layers read after a norm `[rows, hidden]`.
    pub(super) normed: DevicePtr,
    /// Sums of squares `[rows, hidden / 16]`, f32; bf16 only.
    pub(super) squares: DevicePtr,
    /// `[rows, qkv_width]`, f32.
    pub(super) qkv: DevicePtr,
    pub(super) q: DevicePtr,
    /// What attention gives `[rows, heads * dim]`.
    pub(super) heads: DevicePtr,
    /// `[rows, 2 intermediate]`; f32 only.
    pub(super) gate_up: DevicePtr,
    pub(super) gated: DevicePtr,
    /// Last hidden states of the slots, as the head reads them.
    pub(super) last: DevicePtr,
    /// The same in f32.
    pub(super) hidden: DevicePtr,
    /// `[SLOTS, pitch]`, f32.
    pub(super) logits: DevicePtr,
    pub(super) stats: DevicePtr,
    pub(super) keys: DevicePtr,
    /// For loading: [`STAGED`] numbers of 4 bytes.
    pub(super) staging: DevicePtr,
}

impl Buffers {
    pub(super) fn allocate(
        config: &ModelConfig,
        dtype: Dtype,
        rows: usize,
        pages: usize,
        to: &mut dyn Allocate,
    ) -> Result<Self, GpuError> {
        let size = dtype.size() as usize;
        let (hidden, q) = (config.hidden, config.heads * config.head_dim);
        let only = |wanted: Dtype, count: usize| if dtype == wanted { count } else { 0 };
        let chunks = chunks(config.vocab_size);
        let upload_words =
            UploadLayout { rows }.page_list() + pages.max(SLOTS) + MASKED + SLOTS * mask_words(config.vocab_size);
        Ok(Self {
            upload: f32s(to, upload_words)?,
            upload_words,
            results: f32s(to, results::WORDS)?,
            x: f32s(to, rows * hidden)?,
            normed: to.bytes(rows * hidden * size)?,
            squares: f32s(to, only(Dtype::Bf16, rows * hidden / 16))?,
            qkv: f32s(to, rows * qkv_width(config))?,
            q: to.bytes(rows * q * size)?,
            heads: to.bytes(rows * q * size)?,
            gate_up: f32s(to, only(Dtype::F32, rows * 2 * config.intermediate))?,
            gated: to.bytes(rows * config.intermediate * size)?,
            last: to.bytes(SLOTS * hidden * size)?,
            hidden: f32s(to, SLOTS * hidden)?,
            logits: f32s(to, SLOTS * pitch(config))?,
            stats: f32s(to, SLOTS * chunks * 8)?,
            keys: to.bytes(SLOTS * chunks * LIST * size_of::<u64>())?,
            staging: f32s(to, STAGED)?,
        })
    }
}

/// Columns of a row of logits in memory.
pub(super) fn pitch(config: &ModelConfig) -> usize {
    config.vocab_size.next_multiple_of(4)
}

/// Rows that a model's work memory has room for.
pub(super) fn capacity(max_rows: u32) -> usize {
    (max_rows as usize).clamp(SLOTS, 8192)
}

pub(super) fn kv_layer_bytes(config: &ModelConfig, dtype: Dtype) -> u64 {
    2 * (config.kv_heads * config.head_dim * PAGE_TOKENS) as u64 * dtype.size()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_upload_has_room_for_each_part() {
        let layout = UploadLayout { rows: 100 };
        assert_eq!(layout.tokens(), 16);
        assert_eq!(layout.items() - layout.page_starts(), 100);
        assert_eq!(layout.samples() - layout.items(), 800);
        assert_eq!(layout.page_list() - layout.token_logits(), LIST);
    }

    #[test]
    fn a_counter_counts_as_an_arena_gives() {
        let mut counter = Counter::default();
        for bytes in [1, 256, 0, 300] {
            counter.bytes(bytes).unwrap();
        }
        assert_eq!(counter.0, 512 + 300);
    }
}
