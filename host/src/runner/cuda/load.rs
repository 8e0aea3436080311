//! Weights into device memory: read from files through page-locked memory, or random.

use std::path::{Path, PathBuf};

use tokenrouter_kernels::gpu::ops::{Kernels, packed_numbers};
use tokenrouter_kernels::gpu::{Device, DevicePtr, GpuError, Pinned, Stream};

use super::memory::{Buffers, Layer, STAGED, Tensors};
use super::{Dtype, Progress};
use crate::runner::model_config::{LoadError, ModelConfig};
use crate::runner::weights::{Weights, tensor_names};

/// Puts tensors where they belong.
pub(super) struct Loader<'a> {
    pub(super) kernels: &'a Kernels,
    pub(super) stream: &'a Stream,
    pub(super) dtype: Dtype,
    /// On the device, [`STAGED`] numbers.
    staging: DevicePtr,
    pinned: Pinned<u32>,
    /// The model, for messages.
    place: PathBuf,
}

/// Where the rows of a matrix go: row r to `r / run * stride + r % run + offset`.
type Placement = [u32; 3];
const BELOW: fn(usize) -> Placement = |first| [1, 1, first as u32];

impl<'a> Loader<'a> {
    pub(super) fn new(
        device: &Device,
        kernels: &'a Kernels,
        stream: &'a Stream,
        dtype: Dtype,
        buffers: &Buffers,
        place: &Path,
    ) -> Result<Self, GpuError> {
        let pinned = Pinned::new(device, STAGED)?;
        Ok(Self { kernels, stream, dtype, staging: buffers.staging, pinned, place: place.to_owned() })
    }

    /// All tensors of the directory.
    pub(super) fn load(
        &mut self,
        dir: &Path,
        config: &ModelConfig,
        tensors: &Tensors,
        progress: Option<Progress<'_>>,
    ) -> Result<(), LoadError> {
        let mut weights = Weights::open(dir, progress)?;
        let names = tensor_names(config);
        weights.refuse_unused(config, &names)?;
        weights.expect(names.into_iter());
        let (hidden, vocabulary) = (config.hidden, config.vocab_size);
        let w = &mut weights;
        self.zero_last_tile(tensors.embedding, vocabulary, hidden)?;
        self.matrix(w, "model.embed_tokens.weight", (vocabulary, hidden), BELOW(0), tensors.embedding)?;
        if !config.tied {
            self.zero_last_tile(tensors.head, vocabulary, hidden)?;
            self.matrix(w, "lm_head.weight", (vocabulary, hidden), BELOW(0), tensors.head)?;
        }
        self.vector(w, "model.norm.weight", hidden, tensors.norm)?;
        for (index, layer) in tensors.layers.iter().enumerate() {
            self.layer(w, index, config, layer)?;
        }
        self.frequencies(config, tensors)
    }

    fn layer(
        &mut self,
        w: &mut Weights<'_>,
        index: usize,
        config: &ModelConfig,
        layer: &Layer,
    ) -> Result<(), LoadError> {
        let (hidden, inner) = (config.hidden, config.intermediate);
        let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let name = |part: &str| format!("model.layers.{index}.{part}");
        self.vector(w, &name("input_layernorm.weight"), hidden, layer.attention_norm)?;
        self.vector(w, &name("post_attention_layernorm.weight"), hidden, layer.mlp_norm)?;
        let parts = [("q", 0, q), ("k", q, kv), ("v", q + kv, kv)];
        for (part, first, outputs) in parts {
            let to = layer.qkv.weight;
            self.matrix(w, &name(&format!("self_attn.{part}_proj.weight")), (outputs, hidden), BELOW(first), to)?;
            if config.qkv_bias {
                let to = layer.qkv.bias.offset(first * 4);
                self.vector(w, &name(&format!("self_attn.{part}_proj.bias")), outputs, to)?;
            }
        }
        if config.qk_norm {
            for (part, to) in ["q", "k"].iter().zip(layer.qk_norm) {
                self.vector(w, &name(&format!("self_attn.{part}_norm.weight")), config.head_dim, to)?;
            }
        }
        self.zero_last_tile(layer.gate_up.weight, 2 * inner, hidden)?;
        for (second, part) in ["gate", "up"].iter().enumerate() {
            let placement = match self.dtype {
                Dtype::Bf16 => [8, 16, 8 * second as u32],
                Dtype::F32 => BELOW(second * inner),
            };
            let to = layer.gate_up.weight;
            self.matrix(w, &name(&format!("mlp.{part}_proj.weight")), (inner, hidden), placement, to)?;
            if config.mlp_bias {
                let to = layer.gate_up.bias.offset(second * inner * 4);
                self.vector(w, &name(&format!("mlp.{part}_proj.bias")), inner, to)?;
            }
        }
        for (part, linear, inputs, bias) in [
            ("self_attn.o_proj", &layer.output, q, config.output_bias),
            ("mlp.down_proj", &layer.down, inner, config.mlp_bias),
        ] {
            self.matrix(w, &name(&format!("{part}.weight")), (hidden, inputs), BELOW(0), linear.weight)?;
            if bias {
                self.vector(w, &name(&format!("{part}.bias")), hidden, linear.bias)?;
            }
        }
        Ok(())
    }

    fn gpu(&self, error: GpuError) -> LoadError {
        LoadError::new(&self.place, error.to_string())
    }

    /// Rows that fill up the last tile of packed weights are zero.
    fn zero_last_tile(&self, at: DevicePtr, outputs: usize, inputs: usize) -> Result<(), LoadError> {
        if self.dtype == Dtype::F32 {
            return Ok(());
        }
        let tile = 16 * inputs;
        let first = packed_numbers(outputs, inputs) - tile;
        // SAFETY: the tile is part of the allocation.
        let zeroed = unsafe { self.stream.fill_u8_async(at.offset(first * 2), 0, tile * 2) };
        zeroed.map_err(|e| self.gpu(e))
    }

    fn matrix(
        &mut self,
        weights: &mut Weights<'_>,
        name: &str,
        (rows, inputs): (usize, usize),
        placement: Placement,
        to: DevicePtr,
    ) -> Result<(), LoadError> {
        let at_a_time = (STAGED / inputs).max(1).min(rows) * inputs;
        let place = self.place.clone();
        let failed = |e: GpuError| LoadError::new(&place, e.to_string());
        let Self { kernels, stream, dtype, staging, pinned, .. } = self;
        weights.read(name, &[rows, inputs], at_a_time, &mut |start, stored| {
            let count = stored.len();
            // SAFETY: the staging memory has room for STAGED numbers of 4 bytes, the matrix for its rows; the
            // page-locked memory is not written again before the stream is through with it.
            unsafe {
                match dtype {
                    Dtype::Bf16 => {
                        stored.to_bf16(&mut halves(pinned)[..count]);
                        stream.upload_async(*staging, pinned, count * 2).map_err(failed)?;
                        let first = start / inputs;
                        let piece = Piece { first, rows: count / inputs, inputs };
                        piece.pack(kernels, stream, *staging, placement, to).map_err(failed)?;
                    }
                    Dtype::F32 => {
                        stored.to_f32(&mut floats(pinned)[..count]);
                        let first = start / inputs + placement[2] as usize;
                        stream.upload_async(to.offset(first * inputs * 4), pinned, count * 4).map_err(failed)?;
                    }
                }
            }
            stream.synchronize().map_err(failed)
        })
    }

    fn vector(&mut self, weights: &mut Weights<'_>, name: &str, len: usize, to: DevicePtr) -> Result<(), LoadError> {
        let values = weights.load(name, &[len])?;
        self.floats(&values, to).map_err(|e| self.gpu(e))
    }

    fn frequencies(&mut self, config: &ModelConfig, tensors: &Tensors) -> Result<(), LoadError> {
        self.floats(&config.rope_frequencies(), tensors.frequencies).map_err(|e| self.gpu(e))
    }

    /// Upload f32 numbers.
    pub(super) fn floats(&mut self, values: &[f32], to: DevicePtr) -> Result<(), GpuError> {
        for (index, part) in values.chunks(STAGED).enumerate() {
            floats(&mut self.pinned)[..part.len()].copy_from_slice(part);
            // SAFETY: the destination has room for `values`; the stream is waited for before the memory is reused.
            unsafe { self.stream.upload_async(to.offset(index * STAGED * 4), &self.pinned, part.len() * 4)? };
            self.stream.synchronize()?;
        }
        Ok(())
    }

    /// Random weights: matrices such that values keep their size through a layer, norms near 1, no bias.
    pub(super) fn random(&mut self, config: &ModelConfig, tensors: &Tensors, seed: u64) -> Result<(), LoadError> {
        let (hidden, inner) = (config.hidden, config.intermediate);
        let q = config.heads * config.head_dim;
        let mut next = seed << 32;
        let bf16 = self.dtype == Dtype::Bf16;
        let mut fill = |at: DevicePtr, count: usize, bf16: bool, mean: f32, deviation: f32| {
            next += 1;
            // SAFETY: `count` numbers are allocated there.
            unsafe { self.kernels.fill_random(self.stream, bf16, (at, count as u64), next, (mean, deviation)) }
        };
        let numbers = |outputs, inputs| if bf16 { packed_numbers(outputs, inputs) } else { outputs * inputs };
        let mut all = || -> Result<(), GpuError> {
            let mut matrix = |at, outputs, inputs: usize| {
                fill(at, numbers(outputs, inputs), bf16, 0.0, (inputs as f32).sqrt().recip())
            };
            matrix(tensors.embedding, config.vocab_size, hidden)?;
            if !config.tied {
                matrix(tensors.head, config.vocab_size, hidden)?;
            }
            for layer in &tensors.layers {
                matrix(layer.qkv.weight, super::memory::qkv_width(config), hidden)?;
                matrix(layer.output.weight, hidden, q)?;
                matrix(layer.gate_up.weight, 2 * inner, hidden)?;
                matrix(layer.down.weight, hidden, inner)?;
            }
            let mut norm = |at: DevicePtr, len| fill(at, len, false, 1.0, 0.1);
            norm(tensors.norm, hidden)?;
            for layer in &tensors.layers {
                norm(layer.attention_norm, hidden)?;
                norm(layer.mlp_norm, hidden)?;
                for at in layer.qk_norm.into_iter().filter(|at| at.0 != 0) {
                    norm(at, config.head_dim)?;
                }
                let biases = [
                    (layer.qkv.bias, super::memory::qkv_width(config)),
                    (layer.output.bias, hidden),
                    (layer.gate_up.bias, 2 * inner),
                    (layer.down.bias, hidden),
                ];
                for (at, len) in biases.into_iter().filter(|(at, _)| at.0 != 0) {
                    // SAFETY: as above.
                    unsafe { self.stream.fill_u8_async(at, 0, len * 4)? };
                }
            }
            Ok(())
        };
        all().map_err(|e| self.gpu(e))?;
        self.frequencies(config, tensors)?;
        self.stream.synchronize().map_err(|e| self.gpu(e))
    }
}

/// Some rows of a matrix in the staging memory.
struct Piece {
    first: usize,
    rows: usize,
    inputs: usize,
}

impl Piece {
    /// # Safety
    /// `from` holds the rows, `to` has room for the matrix.
    unsafe fn pack(
        &self,
        kernels: &Kernels,
        stream: &Stream,
        from: DevicePtr,
        [run, stride, offset]: Placement,
        to: DevicePtr,
    ) -> Result<(), GpuError> {
        // Row `first + r` of the matrix; the kernel counts from 0, so go by runs.
        let mut done = 0;
        while done < self.rows {
            let row = self.first + done;
            let (into, whole) = (row % run as usize, row.is_multiple_of(run as usize));
            // From the beginning of a run all the rest goes at once.
            let rows = if whole { self.rows - done } else { (run as usize - into).min(self.rows - done) };
            let offset = (row / run as usize) * stride as usize + into + offset as usize;
            let from = from.offset(done * self.inputs * 2);
            let placement = [run, stride, offset as u32];
            // SAFETY: the caller's.
            unsafe { kernels.pack_rows(stream, from, (rows as u32, self.inputs as u32), placement, to)? };
            done += rows;
        }
        Ok(())
    }
}

fn floats(pinned: &mut Pinned<u32>) -> &mut [f32] {
    // SAFETY: f32 has the size and alignment of u32, and every bit pattern is a value.
    unsafe { std::slice::from_raw_parts_mut(pinned.as_mut_ptr().cast(), pinned.len()) }
}

fn halves(pinned: &mut Pinned<u32>) -> &mut [u16] {
    // SAFETY: twice as many u16 as u32; every bit pattern is a value.
    unsafe { std::slice::from_raw_parts_mut(pinned.as_mut_ptr().cast(), pinned.len() * 2) }
}
