//! `nets.cu`: the operations of router networks in f32 over the sampled rows.

use super::layers::Rows;
use super::{Find, Kernels, PARAMS_WORDS};
use crate::gpu::{Args, DevicePtr, Function, GpuError, Launch, Stream, launch};

const THREADS: u32 = 256;

/// Values of the slots: `[slots, pitch]`, of which `width` columns are meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrix {
    pub at: DevicePtr,
    /// 0: every slot has the same.
    pub pitch: u32,
    pub width: u32,
}

/// Functions of one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    Gelu,
    Silu,
    Relu,
    Tanh,
    Sigmoid,
}

#[derive(Debug)]
pub(super) struct Functions {
    linear: Function,
    norm: Function,
    activation: Function,
    softmax: Function,
    add: Function,
    copy: Function,
    /// Packed bf16, f32.
    embedding: [Function; 2],
    hidden_back: Function,
    top_logits: Function,
    top: Function,
    scores: Function,
}

impl Functions {
    pub(super) fn new(find: Find<'_>) -> Result<Self, GpuError> {
        Ok(Self {
            linear: find("nets.cu", "net_linear")?,
            norm: find("nets.cu", "net_norm")?,
            activation: find("nets.cu", "net_activation")?,
            softmax: find("nets.cu", "net_softmax")?,
            add: find("nets.cu", "net_add")?,
            copy: find("nets.cu", "net_copy")?,
            embedding: [find("nets.cu", "net_embedding_packed")?, find("nets.cu", "net_embedding_f32")?],
            hidden_back: find("nets.cu", "net_hidden_back")?,
            top_logits: find("nets.cu", "net_top_logits")?,
            top: find("nets.cu", "net_top")?,
            scores: find("nets.cu", "net_scores")?,
        })
    }
}

/// All take the step's header; `slots` is the most that it can have.
///
/// # Safety
/// See the module.
impl Kernels {
    fn how(&self, width: u32, slots: u32) -> Launch {
        let grid = [width.div_ceil(THREADS), slots, 1];
        Launch { grid, block: THREADS, cluster: 1, shared: 0, overlap: self.clusters }
    }

    /// `out = x w^T + bias`; `bias` is null for none.
    ///
    /// # Safety
    /// See the module.
    pub unsafe fn net_linear(
        &self,
        stream: &Stream,
        header: DevicePtr,
        [weight, bias]: [DevicePtr; 2],
        x: Matrix,
        out: Matrix,
    ) -> Result<(), GpuError> {
        let args = Args::new().ptr(header).ptr(weight).ptr(bias).ptr(x.at).u32(x.pitch).u32(x.width).u32(out.width);
        let how = Launch { grid: [out.width.div_ceil(8), 1, 1], ..self.how(1, 1) };
        // SAFETY: the caller's.
        unsafe { launch(&self.nets.linear, &how, stream, args.ptr(out.at).u32(out.pitch)) }
    }

    /// Layer norm with a bias, or without one the root-mean-square norm.
    ///
    /// # Safety
    /// See the module.
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn net_norm(
        &self,
        stream: &Stream,
        header: DevicePtr,
        slots: u32,
        [weight, bias]: [DevicePtr; 2],
        eps: f32,
        x: Matrix,
        out: Matrix,
    ) -> Result<(), GpuError> {
        let centred = u32::from(bias.0 != 0);
        let args = Args::new().ptr(header).u32(centred).ptr(weight).ptr(bias).f32(eps).ptr(x.at).u32(x.pitch);
        let how = Launch { grid: [slots, 1, 1], ..self.how(1, 1) };
        // SAFETY: the caller's.
        unsafe { launch(&self.nets.norm, &how, stream, args.u32(x.width).ptr(out.at).u32(out.pitch)) }
    }

    /// A function of each number.
    ///
    /// # Safety
    /// See the module.
    pub unsafe fn net_activation(
        &self,
        stream: &Stream,
        header: DevicePtr,
        slots: u32,
        kind: Activation,
        x: Matrix,
        out: Matrix,
    ) -> Result<(), GpuError> {
        let args = Args::new().ptr(header).u32(kind as u32).ptr(x.at).u32(x.pitch).u32(x.width);
        // SAFETY: the caller's.
        unsafe { launch(&self.nets.activation, &self.how(x.width, slots), stream, args.ptr(out.at).u32(out.pitch)) }
    }

    /// Softmax of each slot.
    ///
    /// # Safety
    /// See the module.
    pub unsafe fn net_softmax(
        &self,
        stream: &Stream,
        header: DevicePtr,
        slots: u32,
        x: Matrix,
        out: Matrix,
    ) -> Result<(), GpuError> {
        let args = Args::new().ptr(header).ptr(x.at).u32(x.pitch).u32(x.width).ptr(out.at).u32(out.pitch);
        let how = Launch { grid: [slots, 1, 1], ..self.how(1, 1) };
        // SAFETY: the caller's.
        unsafe { launch(&self.nets.softmax, &how, stream, args) }
    }

    /// `out = a + b`.
    ///
    /// # Safety
    /// See the module.
    pub unsafe fn net_add(
        &self,
        stream: &Stream,
        header: DevicePtr,
        slots: u32,
        [a, b]: [Matrix; 2],
        out: Matrix,
    ) -> Result<(), GpuError> {
        let args = Args::new().ptr(header).ptr(a.at).u32(a.pitch).ptr(b.at).u32(b.pitch).u32(a.width);
        // SAFETY: the caller's.
        unsafe { launch(&self.nets.add, &self.how(a.width, slots), stream, args.ptr(out.at).u32(out.pitch)) }
    }

    /// `out = x`.
    ///
    /// # Safety
    /// See the module.
    pub unsafe fn net_copy(
        &self,
        stream: &Stream,
        header: DevicePtr,
        slots: u32,
        x: Matrix,
        out: Matrix,
    ) -> Result<(), GpuError> {
        let args = Args::new().ptr(header).ptr(x.at).u32(x.pitch).u32(x.width).ptr(out.at).u32(out.pitch);
        // SAFETY: the caller's.
        unsafe { launch(&self.nets.copy, &self.how(x.width, slots), stream, args) }
    }

    /// The candidates' rows of a table: the model's packed bf16 embedding, or f32.
    ///
    /// # Safety
    /// See the module.
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn net_embedding(
        &self,
        stream: &Stream,
        header: DevicePtr,
        slots: u32,
        packed: bool,
        samples: DevicePtr,
        table: DevicePtr,
        out: Matrix,
    ) -> Result<(), GpuError> {
        let args = Args::new().ptr(header).ptr(samples).ptr(table).u32(out.width).ptr(out.at).u32(out.pitch);
        let function = &self.nets.embedding[usize::from(!packed)];
        // SAFETY: the caller's.
        unsafe { launch(function, &self.how(out.width, slots), stream, args) }
    }

    /// Hidden states `back` positions before the slots' rows, from `pages`.
    ///
    /// # Safety
    /// See the module.
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn net_hidden_back(
        &self,
        stream: &Stream,
        slots: u32,
        params: DevicePtr,
        back: u32,
        at: &Rows,
        pages: DevicePtr,
        out: Matrix,
    ) -> Result<(), GpuError> {
        let args = Args::new().ptr(at.header).ptr(params).u32(PARAMS_WORDS as u32).u32(back).ptr(at.positions);
        let args = args.ptr(at.page_starts).ptr(at.page_list).ptr(pages).u32(out.width);
        let how = self.how(out.width, slots);
        // SAFETY: the caller's.
        unsafe { launch(&self.nets.hidden_back, &how, stream, args.ptr(out.at).u32(out.pitch)) }
    }

    /// The best `out.width` logits that sampling listed.
    ///
    /// # Safety
    /// See the module.
    pub unsafe fn net_top_logits(
        &self,
        stream: &Stream,
        header: DevicePtr,
        slots: u32,
        top_values: DevicePtr,
        out: Matrix,
    ) -> Result<(), GpuError> {
        let args = Args::new().ptr(header).ptr(top_values).u32(out.width).ptr(out.at).u32(out.pitch);
        // SAFETY: the caller's.
        unsafe { launch(&self.nets.top_logits, &self.how(out.width, slots), stream, args) }
    }

    /// The `out.width` largest values, descending.
    ///
    /// # Safety
    /// See the module.
    pub unsafe fn net_top(
        &self,
        stream: &Stream,
        header: DevicePtr,
        slots: u32,
        x: Matrix,
        out: Matrix,
    ) -> Result<(), GpuError> {
        let args = Args::new().ptr(header).ptr(x.at).u32(x.pitch).u32(x.width).u32(out.width);
        let how = self.how(x.width.max(out.width), slots);
        // SAFETY: the caller's.
        unsafe { launch(&self.nets.top, &how, stream, args.ptr(out.at).u32(out.pitch)) }
    }

    /// The scores of a net: its last value, NaN for slots without a candidate. The last kernel of a net.
    ///
    /// # Safety
    /// See the module.
    pub unsafe fn net_scores(
        &self,
        stream: &Stream,
        header: DevicePtr,
        slots: u32,
        samples: DevicePtr,
        x: Matrix,
        out: Matrix,
    ) -> Result<(), GpuError> {
        let args = Args::new().ptr(header).ptr(samples).ptr(x.at).u32(x.pitch).u32(x.width);
        // SAFETY: the caller's.
        unsafe { launch(&self.nets.scores, &self.how(x.width, slots), stream, args.ptr(out.at).u32(out.pitch)) }
    }
}
