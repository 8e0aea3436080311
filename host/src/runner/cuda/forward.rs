//! A step as kernels on a stream, from the upload to the samples.

use tokenrouter_kernels::gpu::ops::{
    AttentionArgs, Epilogue, Kernels, LinearArgs, MAX_STREAMED_ROWS, PARAMS_WORDS, PrepareArgs, Rows, SamplingArgs,
};
use tokenrouter_kernels::gpu::{DevicePtr, GpuError, Stream};

use super::Dtype;
use super::memory::{Buffers, Layer, Linear, Tensors, UploadLayout, kv_layer_bytes, pitch, qkv_width, results};
use crate::runner::model_config::ModelConfig;

/// How much a step computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Size {
    /// For a graph: all rows of its bucket.
    pub(super) rows: u32,
    /// 0: no row is sampled.
    pub(super) slots: u32,
    pub(super) items: u32,
    /// Every row is of a sequence of its own.
    pub(super) single: bool,
}

/// What a step reads and writes.
pub(super) struct Forward<'a> {
    pub(super) kernels: &'a Kernels,
    pub(super) stream: &'a Stream,
    pub(super) config: &'a ModelConfig,
    pub(super) dtype: Dtype,
    pub(super) tensors: &'a Tensors,
    pub(super) buffers: &'a Buffers,
    pub(super) kv: DevicePtr,
    pub(super) pages: u32,
    /// Hidden states by page, where a net looks back.
    pub(super) hidden_pages: Option<DevicePtr>,
    pub(super) layout: UploadLayout,
}

const NONE: DevicePtr = DevicePtr(0);

impl Forward<'_> {
    fn upload(&self, words: usize) -> DevicePtr {
        self.buffers.upload.offset(words * 4)
    }

    pub(super) fn rows(&self) -> Rows {
        Rows {
            header: self.upload(0),
            tokens: self.upload(self.layout.tokens()),
            positions: self.upload(self.layout.positions()),
            page_starts: self.upload(self.layout.page_starts()),
            page_list: self.upload(self.layout.page_list()),
        }
    }

    fn bf16(&self) -> bool {
        self.dtype == Dtype::Bf16
    }

    /// Enqueue the whole step.
    ///
    /// # Safety
    /// All addresses are of live memory, laid out by `memory`; the upload is of this size.
    pub(super) unsafe fn enqueue(&self, size: Size) -> Result<(), GpuError> {
        let (k, b, config) = (self.kernels, self.buffers, self.config);
        let first_norm = self.tensors.layers.first().map_or(NONE, |layer| layer.attention_norm);
        let for_norm = if self.bf16() { [first_norm, b.normed, b.squares] } else { [NONE; 3] };
        let hidden = config.hidden as u32;
        let at = self.rows();
        // SAFETY: the caller's.
        unsafe {
            k.embed(self.stream, self.bf16(), self.tensors.embedding, &at, size.rows, hidden, b.x, for_norm)?;
            for index in 0..self.tensors.layers.len() {
                self.layer(index, size)?;
            }
            if let Some(pages) = self.hidden_pages {
                let norm = (self.tensors.norm, config.norm_eps);
                k.store_hidden(self.stream, size.rows, b.x, &at, norm, hidden, pages)?;
            }
            if size.slots > 0 { self.sample(size.slots) } else { Ok(()) }
        }
    }

    unsafe fn layer(&self, index: usize, size: Size) -> Result<(), GpuError> {
        let (k, b, config) = (self.kernels, self.buffers, self.config);
        let layer = &self.tensors.layers[index];
        let next_norm = self.tensors.layers.get(index + 1).map_or(self.tensors.norm, |next| next.attention_norm);
        let kv = self.kv.offset(index * (u64::from(self.pages) * kv_layer_bytes(config, self.dtype)) as usize);
        let at = self.rows();
        let prepare = PrepareArgs {
            qkv: b.qkv,
            bias: layer.qkv.bias,
            q_norm: layer.qk_norm[0],
            k_norm: layer.qk_norm[1],
            frequencies: self.tensors.frequencies,
            positions: at.positions,
            page_starts: at.page_starts,
            page_list: at.page_list,
            header: at.header,
            q: b.q,
            kv,
            eps: config.norm_eps,
            heads: config.heads as u32,
            kv_heads: config.kv_heads as u32,
            dim: config.head_dim as u32,
        };
        // SAFETY: the caller's.
        unsafe {
            if self.bf16() {
                self.streamed(layer, next_norm, &prepare, size)
            } else {
                let dims = [prepare.heads, prepare.kv_heads, prepare.dim];
                let scale = (config.head_dim as f32).sqrt().recip();
                self.in_f32(layer, &prepare, size.rows, |q| {
                    k.attention_f32(self.stream, size.rows, [q, kv, b.heads], &at, scale, dims)
                })
            }
        }
    }

    /// A layer in bf16: norms are folded into the products before and after them.
    unsafe fn streamed(
        &self,
        layer: &Layer,
        next_norm: DevicePtr,
        prepare: &PrepareArgs,
        size: Size,
    ) -> Result<(), GpuError> {
        let (k, b, config, stream) = (self.kernels, self.buffers, self.config, self.stream);
        let (hidden, inner) = (config.hidden as u32, config.intermediate as u32);
        let q_width = (config.heads * config.head_dim) as u32;
        let qkv = qkv_width(config) as u32;
        let base = LinearArgs { rows: size.rows, eps: config.norm_eps, ..LinearArgs::default() };
        let normed = LinearArgs { x: b.normed, squares: b.squares, inputs: hidden, ..base };
        let residual = |linear: Linear, x, inputs, norm| LinearArgs {
            w: linear.weight,
            bias: linear.bias,
            x,
            inputs,
            outputs: hidden,
            stream: b.x,
            norm,
            normed: b.normed,
            squares_out: b.squares,
            ..base
        };
        let attention = AttentionArgs {
            q: b.q,
            kv: prepare.kv,
            items: self.upload(self.layout.items()),
            page_list: prepare.page_list,
            header: prepare.header,
            out: b.heads,
            scale: std::f32::consts::LOG2_E / (config.head_dim as f32).sqrt(),
            kv_heads: prepare.kv_heads,
            group: prepare.heads / prepare.kv_heads,
        };
        // SAFETY: the caller's.
        unsafe {
            let to = LinearArgs { w: layer.qkv.weight, outputs: qkv, y: b.qkv, pitch: qkv, ..normed };
            k.linear(stream, Epilogue::Store, to)?;
            let (dim, items) = (config.head_dim, size.items);
            if size.rows > MAX_STREAMED_ROWS {
                k.prepare(stream, true, size.rows, *prepare)?;
                k.attention_whole(stream, dim, items, attention)?;
            } else if size.single {
                k.attention_decode(stream, dim, items, attention, *prepare)?;
            } else {
                k.prepare(stream, true, size.rows, *prepare)?;
                k.attention_split(stream, dim, items, attention)?;
            }
            k.linear(stream, Epilogue::Residual, residual(layer.output, b.heads, q_width, layer.mlp_norm))?;
            let to = LinearArgs { w: layer.gate_up.weight, bias: layer.gate_up.bias, outputs: inner, ..normed };
            k.linear(stream, Epilogue::Gated, LinearArgs { y: b.gated, pitch: inner, ..to })?;
            k.linear(stream, Epilogue::Residual, residual(layer.down, b.gated, inner, next_norm))
        }
    }

    /// A layer in f32, plainly.
    unsafe fn in_f32(
        &self,
        layer: &Layer,
        prepare: &PrepareArgs,
        rows: u32,
        attention: impl FnOnce(DevicePtr) -> Result<(), GpuError>,
    ) -> Result<(), GpuError> {
        let (k, b, config, stream) = (self.kernels, self.buffers, self.config, self.stream);
        let (hidden, inner, eps) = (config.hidden as u32, config.intermediate as u32, config.norm_eps);
        let q_width = (config.heads * config.head_dim) as u32;
        let qkv = qkv_width(config) as u32;
        // SAFETY: the caller's.
        unsafe {
            let add = |linear: &Linear, x, inputs| {
                k.linear_f32(stream, rows, linear.weight, x, (inputs, hidden), b.x, hidden, true)?;
                if linear.bias == NONE { Ok(()) } else { k.add_bias(stream, rows, b.x, linear.bias, hidden) }
            };
            k.norm_rows(stream, rows, b.x, (layer.attention_norm, eps), hidden, b.normed)?;
            k.linear_f32(stream, rows, layer.qkv.weight, b.normed, (hidden, qkv), b.qkv, qkv, false)?;
            k.prepare(stream, false, rows, *prepare)?;
            attention(b.q)?;
            add(&layer.output, b.heads, q_width)?;
            k.norm_rows(stream, rows, b.x, (layer.mlp_norm, eps), hidden, b.normed)?;
            let both = 2 * inner;
            k.linear_f32(stream, rows, layer.gate_up.weight, b.normed, (hidden, both), b.gate_up, both, false)?;
            k.silu_mul(stream, rows, b.gate_up, layer.gate_up.bias, inner, b.gated)?;
            add(&layer.down, b.gated, inner)
        }
    }

    /// Head and sampling of `slots` slots; for bf16, 8, 16, 32 or 64.
    unsafe fn sample(&self, slots: u32) -> Result<(), GpuError> {
        let (k, b, config, stream) = (self.kernels, self.buffers, self.config, self.stream);
        let (hidden, vocabulary) = (config.hidden as u32, config.vocab_size as u32);
        let pitch = pitch(config) as u32;
        let header = self.upload(0);
        let params = self.upload(self.layout.samples());
        let norm = (self.tensors.norm, config.norm_eps);
        // SAFETY: the caller's.
        unsafe {
            let sampled = (params, PARAMS_WORDS as u32);
            k.final_rows(stream, self.bf16(), slots, b.x, sampled, header, norm, hidden, [b.last, b.hidden])?;
            if self.bf16() {
                let head = LinearArgs { w: self.tensors.head, x: b.last, rows: slots, ..LinearArgs::default() };
                let to = LinearArgs { inputs: hidden, outputs: vocabulary, y: b.logits, pitch, ..head };
                k.linear(stream, Epilogue::Store, to)?;
            } else {
                let sizes = (hidden, vocabulary);
                k.linear_f32(stream, slots, self.tensors.head, b.last, sizes, b.logits, pitch, false)?;
            }
            k.sample(stream, slots, &self.sampling())
        }
    }

    pub(super) fn sampling(&self) -> SamplingArgs {
        let b = self.buffers;
        let result = |words: usize| b.results.offset(words * 4);
        SamplingArgs {
            header: self.upload(0),
            params: self.upload(self.layout.samples()),
            masked: self.upload(self.layout.page_list()),
            token_logit_ids: self.upload(self.layout.token_logits()),
            logits: b.logits,
            vocabulary: self.config.vocab_size as u32,
            pitch: pitch(self.config) as u32,
            stats: b.stats,
            keys: b.keys,
            out: result(results::SAMPLES),
            token_logits: result(results::TOKEN_LOGITS),
            top_values: result(results::TOP_VALUES),
            top_ids: result(results::TOP_IDS),
        }
    }
}
