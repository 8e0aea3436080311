//! A step as kernels on a stream, from the upload to the samples.

use tokenrouter_kernels::gpu::ops::{
    AttentionArgs, Epilogue, Kernels, LinearArgs, MAX_STREAMED_ROWS, PARAMS_WORDS, PrepareArgs, Rows, SamplingArgs,
    parts,
};
use tokenrouter_kernels::gpu::{DevicePtr, GpuError, Stream};

use super::Dtype;
use super::memory::{Buffers, Layer, Linear, Tensors, UploadLayout, kv_layer_bytes, pitch, qkv_width, results};
use super::step::Step;
use crate::runner::model_config::ModelConfig;

/// How much a step computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Size {
    /// For a graph: all rows of its bucket.
    pub(super) rows: u32,
    /// 0: no row is sampled.
    pub(super) slots: u32,
    pub(super) items: u32,
}

impl Size {
    /// Of a graph for as many rows.
    const fn of_graph(rows: u32, items: u32) -> Self {
        Self { rows, slots: rows, items }
    }

    /// Of a step that is longer than any graph.
    pub(super) fn of_prompt(step: &Step) -> Self {
        let slots = step.slots.len() as u32;
        let slots = GRAPHS.iter().map(|size| size.rows).find(|rows| slots <= *rows).filter(|_| slots > 0).unwrap_or(0);
        Self { rows: step.rows as u32, slots, items: step.items as u32 }
    }
}

/// Sizes of the graphs. Attention of one item has a kernel of its own, which gives the same bits.
pub(super) const GRAPHS: [Size; 5] = [
    Size::of_graph(8, 1),
    Size::of_graph(8, 8),
    Size::of_graph(16, 16),
    Size::of_graph(32, 32),
    Size::of_graph(MAX_STREAMED_ROWS, MAX_STREAMED_ROWS),
];

/// The smallest graph that holds a step of up to [`MAX_STREAMED_ROWS`] rows.
pub(super) fn graph_of(step: &Step) -> usize {
    let holds = |size: &Size| step.rows <= size.rows as usize && step.items <= size.items as usize;
    GRAPHS.iter().position(holds).unwrap_or(GRAPHS.len() - 1)
}

/// The kernels of a step in bf16, in order. Those from `Qkv` to `Down` run once a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kernel {
    Embed,
    Qkv,
    /// Norms of heads, rotary positions, keys and values to their pages.
    Prepare,
    Attention,
    Output,
    Gated,
    Down,
    FinalRows,
    Head,
    Sample,
}

impl Kernel {
    /// Those of a layer.
    pub(crate) const LAYER: [Self; 6] =
        [Self::Qkv, Self::Prepare, Self::Attention, Self::Output, Self::Gated, Self::Down];
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
        let config = self.config;
        // SAFETY: the caller's.
        unsafe {
            self.embed(size)?;
            for index in 0..self.tensors.layers.len() {
                if self.bf16() {
                    for kernel in Kernel::LAYER {
                        self.kernel(kernel, index, size)?;
                    }
                } else {
                    self.in_f32(index, size.rows)?;
                }
            }
            if let Some(pages) = self.hidden_pages {
                let norm = (self.tensors.norm, config.norm_eps);
                let (x, hidden) = (self.buffers.x, config.hidden as u32);
                self.kernels.store_hidden(self.stream, size.rows, x, &self.rows(), norm, hidden, pages)?;
            }
            if size.slots == 0 {
                return Ok(());
            }
            self.final_rows(size.slots)?;
            self.head(size.slots)?;
            self.kernels.sample(self.stream, size.slots, &self.sampling())
        }
    }

    /// Enqueue one kernel of a step in bf16; `layer` counts for those of a layer. Norms are folded into the
    /// products before and after them. Without slots those of sampled rows do nothing.
    ///
    /// # Safety
    /// As for [`Self::enqueue`].
    pub(super) unsafe fn kernel(&self, kernel: Kernel, layer: usize, size: Size) -> Result<(), GpuError> {
        // SAFETY: the caller's.
        unsafe {
            match kernel {
                Kernel::Embed => self.embed(size),
                Kernel::Prepare => self.kernels.prepare(self.stream, true, size.rows, self.prepare_args(layer)),
                Kernel::Attention => self.attention(layer, size),
                Kernel::Qkv | Kernel::Output | Kernel::Gated | Kernel::Down => self.linear(kernel, layer, size.rows),
                Kernel::FinalRows | Kernel::Head | Kernel::Sample if size.slots == 0 => Ok(()),
                Kernel::FinalRows => self.final_rows(size.slots),
                Kernel::Head => self.head(size.slots),
                Kernel::Sample => self.kernels.sample(self.stream, size.slots, &self.sampling()),
            }
        }
    }

    unsafe fn embed(&self, size: Size) -> Result<(), GpuError> {
        let b = self.buffers;
        let first_norm = self.tensors.layers.first().map_or(NONE, |layer| layer.attention_norm);
        let for_norm = if self.bf16() { [first_norm, b.normed, b.squares] } else { [NONE; 3] };
        let (table, hidden) = (self.tensors.embedding, self.config.hidden as u32);
        // SAFETY: the caller's.
        unsafe { self.kernels.embed(self.stream, self.bf16(), table, &self.rows(), size.rows, hidden, b.x, for_norm) }
    }

    fn kv(&self, layer: usize) -> DevicePtr {
        self.kv.offset(layer * (u64::from(self.pages) * kv_layer_bytes(self.config, self.dtype)) as usize)
    }

    fn prepare_args(&self, layer: usize) -> PrepareArgs {
        let (b, config, at) = (self.buffers, self.config, self.rows());
        let Layer { qkv, qk_norm: [q_norm, k_norm], .. } = self.tensors.layers[layer];
        PrepareArgs {
            qkv: b.qkv,
            bias: qkv.bias,
            q_norm,
            k_norm,
            frequencies: self.tensors.frequencies,
            positions: at.positions,
            page_starts: at.page_starts,
            page_list: at.page_list,
            header: at.header,
            q: b.q,
            kv: self.kv(layer),
            eps: config.norm_eps,
            heads: config.heads as u32,
            kv_heads: config.kv_heads as u32,
            dim: config.head_dim as u32,
        }
    }

    unsafe fn attention(&self, layer: usize, size: Size) -> Result<(), GpuError> {
        let (b, config, at) = (self.buffers, self.config, self.rows());
        let group = (config.heads / config.kv_heads) as u32;
        let args = AttentionArgs {
            q: b.q,
            kv: self.kv(layer),
            items: self.upload(self.layout.items()),
            page_list: at.page_list,
            header: at.header,
            out: b.heads,
            scale: std::f32::consts::LOG2_E / (config.head_dim as f32).sqrt(),
            kv_heads: config.kv_heads as u32,
            parts: parts(group),
            group: group / parts(group),
        };
        // SAFETY: the caller's.
        unsafe {
            if size.rows > MAX_STREAMED_ROWS {
                self.kernels.attention_whole(self.stream, config.head_dim, size.items, args)
            } else {
                self.kernels.attention_split(self.stream, config.head_dim, size.items, args)
            }
        }
    }

    unsafe fn linear(&self, kernel: Kernel, index: usize, rows: u32) -> Result<(), GpuError> {
        let (b, config) = (self.buffers, self.config);
        let (hidden, inner) = (config.hidden as u32, config.intermediate as u32);
        let layer = &self.tensors.layers[index];
        let next_norm = self.tensors.layers.get(index + 1).map_or(self.tensors.norm, |next| next.attention_norm);
        let base = LinearArgs { rows, eps: config.norm_eps, ..LinearArgs::default() };
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
        let (epilogue, args) = match kernel {
            Kernel::Output => {
                let q_width = (config.heads * config.head_dim) as u32;
                (Epilogue::Residual, residual(layer.output, b.heads, q_width, layer.mlp_norm))
            }
            Kernel::Gated => {
                let to = LinearArgs { w: layer.gate_up.weight, bias: layer.gate_up.bias, outputs: inner, ..normed };
                (Epilogue::Gated, LinearArgs { y: b.gated, pitch: inner, ..to })
            }
            Kernel::Down => (Epilogue::Residual, residual(layer.down, b.gated, inner, next_norm)),
            _ => {
                let qkv = qkv_width(config) as u32;
                let to = LinearArgs { w: layer.qkv.weight, outputs: qkv, y: b.qkv, pitch: qkv, ..normed };
                (Epilogue::Store, to)
            }
        };
        // SAFETY: the caller's.
        unsafe { self.kernels.linear(self.stream, epilogue, args) }
    }

    /// A layer in f32, plainly.
    unsafe fn in_f32(&self, index: usize, rows: u32) -> Result<(), GpuError> {
        let (k, b, config, stream) = (self.kernels, self.buffers, self.config, self.stream);
        let layer = &self.tensors.layers[index];
        let prepare = self.prepare_args(index);
        let dims = [prepare.heads, prepare.kv_heads, prepare.dim];
        let scale = (config.head_dim as f32).sqrt().recip();
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
            k.prepare(stream, false, rows, prepare)?;
            k.attention_f32(stream, rows, [b.q, prepare.kv, b.heads], &self.rows(), scale, dims)?;
            add(&layer.output, b.heads, q_width)?;
            k.norm_rows(stream, rows, b.x, (layer.mlp_norm, eps), hidden, b.normed)?;
            let both = 2 * inner;
            k.linear_f32(stream, rows, layer.gate_up.weight, b.normed, (hidden, both), b.gate_up, both, false)?;
            k.silu_mul(stream, rows, b.gate_up, layer.gate_up.bias, inner, b.gated)?;
            add(&layer.down, b.gated, inner)
        }
    }

    /// The last norm at the sampled rows.
    unsafe fn final_rows(&self, slots: u32) -> Result<(), GpuError> {
        let (b, hidden) = (self.buffers, self.config.hidden as u32);
        let sampled = (self.upload(self.layout.samples()), PARAMS_WORDS as u32);
        let norm = (self.tensors.norm, self.config.norm_eps);
        let (bf16, header, out) = (self.bf16(), self.upload(0), [b.last, b.hidden]);
        // SAFETY: the caller's.
        unsafe { self.kernels.final_rows(self.stream, bf16, slots, b.x, sampled, header, norm, hidden, out) }
    }

    /// Logits of `slots` slots; for bf16, 8, 16, 32 or 64.
    unsafe fn head(&self, slots: u32) -> Result<(), GpuError> {
        let (k, b, stream, w) = (self.kernels, self.buffers, self.stream, self.tensors.head);
        let (hidden, vocabulary) = (self.config.hidden as u32, self.config.vocab_size as u32);
        let pitch = pitch(self.config) as u32;
        // SAFETY: the caller's.
        unsafe {
            if self.bf16() {
                let head = LinearArgs { w, x: b.last, rows: slots, ..LinearArgs::default() };
                let to = LinearArgs { inputs: hidden, outputs: vocabulary, y: b.logits, pitch, ..head };
                k.linear(stream, Epilogue::Store, to)
            } else {
                k.linear_f32(stream, slots, w, b.last, (hidden, vocabulary), b.logits, pitch, false)
            }
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
