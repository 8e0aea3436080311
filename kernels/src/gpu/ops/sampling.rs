//! `sampling.cu`: from logits to candidates and signals.

use super::{Find, Kernels};
use crate::gpu::{Args, DevicePtr, Function, GpuError, Launch, Stream, launch};

/// Most tokens in a list of the best.
pub const LIST: usize = 128;
/// Logits of a chunk.
const CHUNK: usize = 4096;
/// Largest vocabulary.
pub const MAX_VOCABULARY: usize = 80 * CHUNK;
/// Words of [`SampleParams`].
pub const PARAMS_WORDS: usize = 12;
/// Words of what a slot gives: token, finite, logit, max, second, logsumexp, entropy, reserved.
pub const SAMPLE_WORDS: usize = 8;

/// How a slot is sampled.
pub mod mode {
    /// The most likely token.
    pub const GREEDY: u32 = 0;
    /// A draw from all tokens.
    pub const ALL: u32 = 1;
    /// A draw from the best `top_k`.
    pub const LIST: u32 = 2;
    /// On the host, from the logits; the token is the most likely one until then.
    pub const HOST: u32 = 3;
}

/// `SampleParams` of `sampling.cu`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SampleParams {
    pub row: u32,
    pub mode: u32,
    pub inv_temperature: f32,
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
    /// The draw, in [0, 1).
    pub uniform: f64,
    /// Range of the masked tokens' list: start and count.
    pub masked: (u32, u32),
    /// How many best tokens are wanted, at most [`LIST`].
    pub list: u32,
    /// One past where in the masked tokens' list the bits of the tokens that may be drawn begin; 0: all may. Only for
    /// [`mode::GREEDY`] and [`mode::ALL`].
    pub allowed: u32,
}

impl SampleParams {
    /// As uploaded.
    pub fn words(&self) -> [u32; PARAMS_WORDS] {
        let bits = self.uniform.to_bits();
        [
            self.row,
            self.mode,
            self.inv_temperature.to_bits(),
            self.top_k,
            self.top_p.to_bits(),
            self.min_p.to_bits(),
            bits as u32,
            (bits >> 32) as u32,
            self.masked.0,
            self.masked.1,
            self.list,
            self.allowed,
        ]
    }
}

/// Chunks of a row of logits.
pub fn chunks(vocabulary: usize) -> usize {
    vocabulary.div_ceil(CHUNK)
}

/// Addresses for sampling; sizes by slots.
#[derive(Debug, Clone, Copy)]
pub struct SamplingArgs {
    pub header: DevicePtr,
    /// [`SampleParams`].
    pub params: DevicePtr,
    /// Tokens, and bits of those that may be drawn, u32.
    pub masked: DevicePtr,
    /// Tokens whose raw logit is wanted, u32.
    pub token_logit_ids: DevicePtr,
    /// `[slots, pitch]`, f32.
    pub logits: DevicePtr,
    pub vocabulary: u32,
    /// Multiple of 4.
    pub pitch: u32,
    /// `[slots, chunks, 8]` words.
    pub stats: DevicePtr,
    /// `[slots, chunks, LIST]`, u64.
    pub keys: DevicePtr,
    /// `[slots, SAMPLE_WORDS]`.
    pub out: DevicePtr,
    /// `[slots, LIST]`.
    pub token_logits: DevicePtr,
    /// `[slots, LIST]`.
    pub top_values: DevicePtr,
    /// `[slots, LIST]`.
    pub top_ids: DevicePtr,
}

#[derive(Debug)]
pub(super) struct Functions {
    chunks: Function,
    rows: Function,
}

impl Functions {
    pub(super) fn new(find: Find<'_>) -> Result<Self, GpuError> {
        Ok(Self { chunks: find("sampling.cu", "logit_chunks")?, rows: find("sampling.cu", "sample_rows")? })
    }
}

impl Kernels {
    /// Sample `slots` rows of logits; masked tokens become -inf in them.
    ///
    /// # Safety
    /// See the module; the vocabulary is at most [`MAX_VOCABULARY`].
    pub unsafe fn sample(&self, stream: &Stream, slots: u32, a: &SamplingArgs) -> Result<(), GpuError> {
        let chunks = chunks(a.vocabulary as usize) as u32;
        let how = |grid, block| Launch { grid, block, cluster: 1, shared: 0, overlap: self.clusters };
        let args = Args::new().ptr(a.header).ptr(a.params).ptr(a.masked).ptr(a.token_logit_ids).ptr(a.logits);
        let args = args.u32(a.vocabulary).u32(a.pitch).ptr(a.token_logits).ptr(a.stats).ptr(a.keys);
        // SAFETY: the caller's.
        unsafe { launch(&self.sampling.chunks, &how([chunks, slots, 1], 256), stream, args)? };
        let args = Args::new().ptr(a.header).ptr(a.params).ptr(a.masked).ptr(a.logits).u32(a.vocabulary).u32(a.pitch);
        let args = args.u32(chunks).ptr(a.stats).ptr(a.keys).ptr(a.out).ptr(a.top_values).ptr(a.top_ids);
        // SAFETY: the caller's.
        unsafe { launch(&self.sampling.rows, &how([slots, 1, 1], 512), stream, args) }
    }
}
