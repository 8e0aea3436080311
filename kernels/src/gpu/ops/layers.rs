//! `layers.cu`: the parts of a decoder between its matrix products, and the whole of it in f32.

use super::{Find, Kernels};
use crate::gpu::{Args, DevicePtr, Function, GpuError, Launch, Stream, launch};

#[derive(Debug)]
pub(super) struct Functions {
    embed: [Function; 2],
    prepare: [Function; 2],
    final_rows: [Function; 2],
    fill_random: [Function; 2],
    store_hidden: Function,
    norm_rows: Function,
    silu_mul: Function,
    add_bias: Function,
    linear: Function,
    attention: Function,
    pack_rows: Function,
}

impl Functions {
    pub(super) fn new(find: Find<'_>) -> Result<Self, GpuError> {
        let both = |name: &str| {
            Ok::<_, GpuError>([find("layers.cu", &format!("{name}_bf16"))?, find("layers.cu", &format!("{name}_f32"))?])
        };
        Ok(Self {
            embed: both("embed")?,
            prepare: both("prepare")?,
            final_rows: both("final_rows")?,
            fill_random: both("fill_random")?,
            store_hidden: find("layers.cu", "store_hidden")?,
            norm_rows: find("layers.cu", "norm_rows_f32")?,
            silu_mul: find("layers.cu", "silu_mul_f32")?,
            add_bias: find("layers.cu", "add_bias")?,
            linear: find("layers.cu", "linear_f32")?,
            attention: find("layers.cu", "attention_f32")?,
            pack_rows: find("layers.cu", "pack_rows")?,
        })
    }
}

/// `PrepareArgs` of `layers.cu`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct PrepareArgs {
    pub qkv: DevicePtr,
    pub bias: DevicePtr,
    pub q_norm: DevicePtr,
    pub k_norm: DevicePtr,
    pub frequencies: DevicePtr,
    pub positions: DevicePtr,
    pub page_starts: DevicePtr,
    pub page_list: DevicePtr,
    pub header: DevicePtr,
    pub q: DevicePtr,
    pub kv: DevicePtr,
    pub eps: f32,
    pub heads: u32,
    pub kv_heads: u32,
    pub dim: u32,
}

/// Where the rows of a step are: the step's upload.
#[derive(Debug, Clone, Copy)]
pub struct Rows {
    pub header: DevicePtr,
    pub tokens: DevicePtr,
    pub positions: DevicePtr,
    pub page_starts: DevicePtr,
    pub page_list: DevicePtr,
}

impl Kernels {
    fn plain(&self, grid: [u32; 3], block: u32) -> Launch {
        Launch { grid, block, cluster: 1, shared: 0, overlap: self.clusters }
    }

    /// `x[rows, hidden]` from the embedding; in bf16 (packed) also the first norm's input and sums of squares.
    ///
    /// # Safety
    /// See the module.
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn embed(
        &self,
        stream: &Stream,
        bf16: bool,
        table: DevicePtr,
        at: &Rows,
        rows: u32,
        hidden: u32,
        x: DevicePtr,
        [norm, normed, squares]: [DevicePtr; 3],
    ) -> Result<(), GpuError> {
        let args = Args::new().ptr(table).ptr(at.tokens).ptr(at.header).ptr(x).u32(hidden);
        let args = args.ptr(norm).ptr(normed).ptr(squares);
        // SAFETY: the caller's.
        unsafe { launch(&self.layers.embed[usize::from(!bf16)], &self.plain([rows, 1, 1], 256), stream, args) }
    }

    /// Biases, norms of heads, rotary positions; keys and values to their pages.
    ///
    /// # Safety
    /// See the module; `dim` is at most 256.
    pub unsafe fn prepare(&self, stream: &Stream, bf16: bool, rows: u32, args: PrepareArgs) -> Result<(), GpuError> {
        let heads = args.heads + 2 * args.kv_heads;
        let how = self.plain([rows, heads.div_ceil(4), 1], 128);
        // SAFETY: the caller's.
        unsafe { launch(&self.layers.prepare[usize::from(!bf16)], &how, stream, Args::new().value(&args)) }
    }

    /// The last norm at the sampled rows: `sampled` has a row number every `stride` words.
    ///
    /// # Safety
    /// See the module.
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn final_rows(
        &self,
        stream: &Stream,
        bf16: bool,
        slots: u32,
        x: DevicePtr,
        (sampled, stride): (DevicePtr, u32),
        header: DevicePtr,
        (norm, eps): (DevicePtr, f32),
        hidden: u32,
        [out, exact]: [DevicePtr; 2],
    ) -> Result<(), GpuError> {
        let args = Args::new().ptr(x).ptr(sampled).u32(stride).ptr(header).ptr(norm).f32(eps).u32(hidden);
        let args = args.ptr(out).ptr(exact);
        let how = self.plain([slots, 1, 1], 256);
        // SAFETY: the caller's.
        unsafe { launch(&self.layers.final_rows[usize::from(!bf16)], &how, stream, args) }
    }

    /// Hidden states of all rows after the last norm, to the pages of their positions.
    ///
    /// # Safety
    /// See the module.
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn store_hidden(
        &self,
        stream: &Stream,
        rows: u32,
        x: DevicePtr,
        at: &Rows,
        (norm, eps): (DevicePtr, f32),
        hidden: u32,
        pages: DevicePtr,
    ) -> Result<(), GpuError> {
        let args = Args::new().ptr(x).ptr(at.positions).ptr(at.page_starts).ptr(at.page_list).ptr(at.header);
        let args = args.ptr(norm).f32(eps).u32(hidden).ptr(pages);
        // SAFETY: the caller's.
        unsafe { launch(&self.layers.store_hidden, &self.plain([rows, 1, 1], 256), stream, args) }
    }

    /// Rows through a norm, f32.
    ///
    /// # Safety
    /// See the module.
    pub unsafe fn norm_rows(
        &self,
        stream: &Stream,
        rows: u32,
        x: DevicePtr,
        (norm, eps): (DevicePtr, f32),
        hidden: u32,
        out: DevicePtr,
    ) -> Result<(), GpuError> {
        let args = Args::new().ptr(x).ptr(norm).f32(eps).u32(hidden).ptr(out);
        // SAFETY: the caller's.
        unsafe { launch(&self.layers.norm_rows, &self.plain([rows, 1, 1], 256), stream, args) }
    }

    /// `silu(gate) * up`, f32.
    ///
    /// # Safety
    /// See the module.
    pub unsafe fn silu_mul(
        &self,
        stream: &Stream,
        rows: u32,
        gate_up: DevicePtr,
        bias: DevicePtr,
        inner: u32,
        out: DevicePtr,
    ) -> Result<(), GpuError> {
        let args = Args::new().ptr(gate_up).ptr(bias).u32(inner).ptr(out);
        let how = self.plain([inner.div_ceil(256), rows, 1], 256);
        // SAFETY: the caller's.
        unsafe { launch(&self.layers.silu_mul, &how, stream, args) }
    }

    /// `x[rows, width] += bias`.
    ///
    /// # Safety
    /// See the module.
    pub unsafe fn add_bias(
        &self,
        stream: &Stream,
        rows: u32,
        x: DevicePtr,
        bias: DevicePtr,
        width: u32,
    ) -> Result<(), GpuError> {
        let how = self.plain([width.div_ceil(256), rows, 1], 256);
        // SAFETY: the caller's.
        unsafe { launch(&self.layers.add_bias, &how, stream, Args::new().ptr(x).ptr(bias).u32(width)) }
    }

    /// `y[rows, outputs]` (pitch `outputs`) `= x w^T` in f32, or added to it.
    ///
    /// # Safety
    /// See the module.
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn linear_f32(
        &self,
        stream: &Stream,
        rows: u32,
        w: DevicePtr,
        x: DevicePtr,
        (inputs, outputs): (u32, u32),
        y: DevicePtr,
        pitch: u32,
        accumulate: bool,
    ) -> Result<(), GpuError> {
        let args = Args::new().ptr(w).ptr(x).u32(rows).u32(inputs).u32(outputs).ptr(y).u32(pitch);
        let how = self.plain([outputs.div_ceil(8), rows.div_ceil(8), 1], 256);
        // SAFETY: the caller's.
        unsafe { launch(&self.layers.linear, &how, stream, args.u32(accumulate.into())) }
    }

    /// Attention in f32; `dim` is at most 256.
    ///
    /// # Safety
    /// See the module.
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn attention_f32(
        &self,
        stream: &Stream,
        rows: u32,
        [q, kv, out]: [DevicePtr; 3],
        at: &Rows,
        scale: f32,
        [heads, kv_heads, dim]: [u32; 3],
    ) -> Result<(), GpuError> {
        let args = Args::new().ptr(q).ptr(kv).ptr(at.positions).ptr(at.page_starts).ptr(at.page_list);
        let args = args.ptr(at.header).ptr(out).f32(scale).u32(heads).u32(kv_heads).u32(dim);
        // SAFETY: the caller's.
        unsafe { launch(&self.layers.attention, &self.plain([rows, heads, 1], 128), stream, args) }
    }

    /// Rows of bf16 into packed weights: row r becomes row `r / run * stride + r % run + offset`.
    ///
    /// # Safety
    /// See the module; `inputs` is a multiple of 32.
    pub unsafe fn pack_rows(
        &self,
        stream: &Stream,
        from: DevicePtr,
        (rows, inputs): (u32, u32),
        [run, stride, offset]: [u32; 3],
        to: DevicePtr,
    ) -> Result<(), GpuError> {
        let how = Launch { grid: [rows, 1, 1], block: 256, cluster: 1, shared: 0, overlap: false };
        let args = Args::new().ptr(from).u32(inputs).u32(run).u32(stride).u32(offset).ptr(to);
        // SAFETY: the caller's.
        unsafe { launch(&self.layers.pack_rows, &how, stream, args) }
    }

    /// `count` random numbers with this mean and standard deviation.
    ///
    /// # Safety
    /// See the module.
    pub unsafe fn fill_random(
        &self,
        stream: &Stream,
        bf16: bool,
        (out, count): (DevicePtr, u64),
        seed: u64,
        (mean, deviation): (f32, f32),
    ) -> Result<(), GpuError> {
        let how = Launch { grid: [4096, 1, 1], block: 256, cluster: 1, shared: 0, overlap: false };
        let args = Args::new().ptr(out).u64(count).u64(seed).f32(mean).f32(deviation);
        // SAFETY: the caller's.
        unsafe { launch(&self.layers.fill_random[usize::from(!bf16)], &how, stream, args) }
    }
}
