//! One forward: all rows through all layers, then sampling.

use tokenrouter_kernels::{self as kernels, Query, RopeTable};

use super::CpuRunner;
use super::model::Linear;
use crate::runner::sampler::Row;
use crate::runner::{PAGE_TOKENS, RowBatch, RowOutputs, RunnerError};

/// Work memory, kept between forwards.
#[derive(Default)]
pub(super) struct Buffers {
    /// The residual stream, `[rows, hidden]`.
    x: Vec<f32>,
    normed: Vec<f32>,
    qkv: Vec<f32>,
    heads: Vec<f32>,
    /// What a block adds to the residual stream.
    update: Vec<f32>,
    gate_up: Vec<f32>,
    gated: Vec<f32>,
    logits: Vec<f32>,
    rope: RopeTable,
    scratch: Vec<[f32; 16]>,
}

impl CpuRunner {
    /// Refuse what would index out of bounds.
    pub(super) fn check(&self, batch: &RowBatch<'_>) -> Result<(), RunnerError> {
        let info = &self.info;
        let wrong = |index: usize, what: String| {
            Err(RunnerError(format!("model `{}`: sequence {index} of the batch: {what}", info.name)))
        };
        for (i, s) in batch.sequences.iter().enumerate() {
            let (start, end) = (s.start, s.end);
            if start >= end || end > s.context.len() {
                return wrong(i, format!("rows {start}..{end} of {} tokens", s.context.len()));
            }
            if end > info.context as usize {
                return wrong(i, format!("position {} of a context of {}", end - 1, info.context));
            }
            if s.sampled > end - start {
                return wrong(i, format!("{} sampled of {} rows", s.sampled, end - start));
            }
            if s.prompt_len > s.context.len() {
                return wrong(i, format!("a prompt of {} in a sequence of {} tokens", s.prompt_len, s.context.len()));
            }
            let needed = end.div_ceil(PAGE_TOKENS);
            if s.pages.len() < needed {
                return wrong(i, format!("{} pages, but {end} positions need {needed}", s.pages.len()));
            }
            if let Some(page) = s.pages[..needed].iter().find(|&&page| page >= info.pages) {
                return wrong(i, format!("page {page} of a pool of {}", info.pages));
            }
            if let Some(token) = s.context[start..end].iter().find(|&&token| token >= info.vocab_size) {
                return wrong(i, format!("token {token} of a vocabulary of {}", info.vocab_size));
            }
        }
        if let Some(token) = batch.signals.token_logits.iter().find(|&&token| token >= info.vocab_size) {
            return Err(RunnerError(format!(
                "model `{}`: a signal asks for the logit of token {token}, but the vocabulary has {}",
                info.name, info.vocab_size
            )));
        }
        Ok(())
    }

    /// Store K/V of all rows and leave the logits of the sampled ones in the buffers.
    pub(super) fn compute(&mut self, batch: &RowBatch<'_>) {
        let Self { config, model, pool, frequencies, buffers: b, .. } = self;
        let (hidden, dim) = (config.hidden, config.head_dim);
        let (q_width, kv_width) = (config.heads * dim, config.kv_heads * dim);
        let qkv_width = q_width + 2 * kv_width;

        let rows = batch.rows();
        b.x.resize(rows * hidden, 0.0);
        let tokens = batch.sequences.iter().flat_map(|s| &s.context[s.start..s.end]);
        for (row, &token) in b.x.chunks_exact_mut(hidden).zip(tokens) {
            model.embedding.copy_row(token as usize, row);
        }
        b.rope.fill(frequencies, batch.sequences.iter().flat_map(|s| s.start..s.end));
        let mut queries: Vec<Query<'_>> = batch
            .sequences
            .iter()
            .flat_map(|s| (s.start..s.end).map(|position| Query { pages: s.pages, len: position + 1 }))
            .collect();

        for (l, layer) in model.layers.iter().enumerate() {
            norm(&b.x, &layer.attention_norm, config.norm_eps, &mut b.normed);
            apply(&layer.qkv, &b.normed, &mut b.qkv, &mut b.scratch);
            for (r, row) in b.qkv.chunks_exact_mut(qkv_width).enumerate() {
                let (q, rest) = row.split_at_mut(q_width);
                let (k, v) = rest.split_at_mut(kv_width);
                if let Some((q_norm, k_norm)) = &layer.qk_norm {
                    kernels::rms_norm_in_place(q, q_norm, config.norm_eps);
                    kernels::rms_norm_in_place(k, k_norm, config.norm_eps);
                }
                b.rope.apply(r, dim, q);
                b.rope.apply(r, dim, k);
                let position = queries[r].len - 1;
                pool.store(l, queries[r].pages[position / PAGE_TOKENS], position % PAGE_TOKENS, k, v);
            }
            if l + 1 == model.layers.len() {
                // Of the other rows only K/V was still needed.
                keep_sampled(batch, &mut b.x, hidden);
                keep_sampled(batch, &mut b.qkv, qkv_width);
                keep_sampled(batch, &mut queries, 1);
            }
            b.heads.resize(queries.len() * q_width, 0.0);
            kernels::attention(pool, l, &queries, &b.qkv, qkv_width, &mut b.heads);
            apply(&layer.output, &b.heads, &mut b.update, &mut b.scratch);
            kernels::add(&mut b.x, &b.update);

            norm(&b.x, &layer.mlp_norm, config.norm_eps, &mut b.normed);
            apply(&layer.gate_up, &b.normed, &mut b.gate_up, &mut b.scratch);
            b.gated.resize(queries.len() * config.intermediate, 0.0);
            kernels::silu_mul(&b.gate_up, config.intermediate, &mut b.gated);
            apply(&layer.down, &b.gated, &mut b.update, &mut b.scratch);
            kernels::add(&mut b.x, &b.update);
        }

        norm(&b.x, &model.norm, config.norm_eps, &mut b.normed);
        b.logits.resize(queries.len() * config.vocab_size, 0.0);
        kernels::linear(model.head(), &b.normed, &mut b.logits, &mut b.scratch);
    }

    /// Sample from the logits in the buffers.
    pub(super) fn sample(&mut self, batch: &RowBatch<'_>) -> RowOutputs {
        let mut out = RowOutputs::default();
        let mut logits = self.buffers.logits.chunks_exact_mut(self.config.vocab_size);
        for s in &batch.sequences {
            for (end, logits) in (s.end - s.sampled + 1..=s.end).zip(&mut logits) {
                let row =
                    Row { context: &s.context[..end], prompt_len: s.prompt_len, params: s.sampling, masked: s.masked };
                out.samples.push(self.sampler.sample(logits, &row, &batch.signals, &mut out.signals));
            }
        }
        out
    }
}

/// Keep the sampled rows of `values`, `width` each.
fn keep_sampled<T: Copy>(batch: &RowBatch<'_>, values: &mut Vec<T>, width: usize) {
    let (mut row, mut kept) = (0, 0);
    for s in &batch.sequences {
        row += s.end - s.start;
        values.copy_within((row - s.sampled) * width..row * width, kept * width);
        kept += s.sampled;
    }
    values.truncate(kept * width);
}

fn norm(x: &[f32], weight: &[f32], eps: f32, out: &mut Vec<f32>) {
    out.resize(x.len(), 0.0);
    kernels::rms_norm(x, weight, eps, out);
}

fn apply(linear: &Linear, x: &[f32], out: &mut Vec<f32>, scratch: &mut Vec<[f32; 16]>) {
    let rows = x.len() / linear.weight.inputs();
    out.resize(rows * linear.weight.outputs(), 0.0);
    kernels::linear(&linear.weight, x, out, scratch);
    if !linear.bias.is_empty() {
        kernels::add_bias(out, &linear.bias);
    }
}
