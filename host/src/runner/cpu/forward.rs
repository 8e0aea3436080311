//! One forward: all rows through all layers, then sampling.

use tokenrouter_kernels::{self as kernels, Query, RopeTable};

use super::CpuRunner;
use super::model::Linear;
use super::nets::{CpuNet, Inputs};
use crate::request::Score;
use crate::runner::net::NetId;
use crate::runner::sampler::Row;
use crate::runner::score::score;
use crate::runner::{NetScores, PAGE_TOKENS, PageId, RowBatch, RowOutputs, Rows, Sample};

/// Rows that are scored at a time: their logits are many.
const SCORED_ROWS: usize = 16;

/// Work memory, kept between forwards.
#[derive(Default)]
pub(super) struct Buffers {
    /// The residual stream, `[rows, hidden]`.
    x: Vec<f32>,
    normed: Vec<f32>,
    /// Last hidden states of the sampled rows, after the final norm.
    pub(super) hidden: Vec<f32>,
    /// Those of the scored rows.
    scored: Vec<f32>,
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
    /// Store K/V of all rows and leave the logits of the sampled ones in the buffers.
    pub(super) fn compute(&mut self, batch: &RowBatch<'_>) {
        let Self { config, model, pool, frequencies, buffers: b, nets, hidden_pages, .. } = self;
        // Rows whose last hidden state is needed: sampled and scored ones, and all that a later row may look back at.
        let looks_back =
            |s: &Rows<'_>| s.nets.iter().any(|net| nets[net.0 as usize].as_ref().is_some_and(|net| net.back > 0));
        let kept = |s: &Rows<'_>| if looks_back(s) { s.end - s.start } else { s.scored + s.sampled };
        let sampled = |s: &Rows<'_>| s.sampled;
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
                let all = |s: &Rows<'_>| s.end - s.start;
                keep_last(batch, all, kept, &mut b.x, hidden);
                keep_last(batch, all, kept, &mut b.qkv, qkv_width);
                keep_last(batch, all, kept, &mut queries, 1);
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

        norm(&b.x, &model.norm, config.norm_eps, &mut b.hidden);
        let mut states = b.hidden.chunks_exact(hidden);
        for s in &batch.sequences {
            let states = states.by_ref().take(kept(s));
            if !looks_back(s) {
                states.for_each(drop);
                continue;
            }
            for (position, state) in (s.start..s.end).zip(states) {
                hidden_pages[cell(s.pages, position) * hidden..][..hidden].copy_from_slice(state);
            }
        }
        b.scored.clear();
        let mut states = 0;
        for s in &batch.sequences {
            states += kept(s);
            let end = states - s.sampled;
            b.scored.extend_from_slice(&b.hidden[(end - s.scored) * hidden..end * hidden]);
        }
        keep_last(batch, kept, sampled, &mut b.hidden, hidden);
        b.logits.resize(batch.sampled() * config.vocab_size, 0.0);
        kernels::linear(model.head(), &b.hidden, &mut b.logits, &mut b.scratch);
    }

    /// Sample from the logits in the buffers.
    pub(super) fn sample(&mut self, batch: &RowBatch<'_>) -> RowOutputs {
        let mut out = RowOutputs::default();
        let mut logits = self.buffers.logits.chunks_exact_mut(self.config.vocab_size);
        for s in &batch.sequences {
            for (index, logits) in (0..s.sampled).zip(&mut logits) {
                let row = Row {
                    context: &s.context[..s.end - s.sampled + index + 1],
                    prompt_len: s.prompt_len,
                    params: s.sampling,
                    masked: s.masked,
                    allowed: s.allowed_at(index, self.config.vocab_size),
                };
                out.samples.push(self.sampler.sample(logits, &row, &batch.signals, &mut out.signals));
            }
        }
        out
    }

    /// What the scored rows give the tokens that follow them.
    pub(super) fn score(&mut self, batch: &RowBatch<'_>) -> Vec<Option<Score>> {
        let Self { config, model, buffers: b, .. } = self;
        let mut positions = batch.sequences.iter().flat_map(|s| s.scored_positions().map(move |at| (s, at)));
        let (mut scores, mut logits) = (Vec::with_capacity(batch.scored()), Vec::new());
        for states in b.scored.chunks(SCORED_ROWS * config.hidden) {
            logits.resize(states.len() / config.hidden * config.vocab_size, 0.0);
            kernels::linear(model.head(), states, &mut logits, &mut b.scratch);
            let rows = logits.chunks_exact_mut(config.vocab_size);
            scores.extend(rows.zip(&mut positions).map(|(logits, (s, at))| score(logits, s, at)));
        }
        scores
    }

    /// Evaluate the nets that the sequences name, at their sampled rows.
    pub(super) fn evaluate_nets(&mut self, batch: &RowBatch<'_>, out: &mut RowOutputs) {
        let mut named: Vec<NetId> = batch.sequences.iter().flat_map(|s| s.nets).copied().collect();
        named.sort_unstable();
        named.dedup();
        for id in named {
            // Sequence, position and sample of each row that has a candidate.
            let mut rows: Vec<(&Rows<'_>, usize, usize)> = Vec::new();
            let mut sample = 0;
            for s in &batch.sequences {
                for position in s.end - s.sampled..s.end {
                    if s.nets.contains(&id) && out.samples[sample].finite {
                        rows.push((s, position, sample));
                    }
                    sample += 1;
                }
            }
            let Some(net) = self.net(id) else { continue };
            let mut scores = NetScores { width: net.width, scores: vec![f32::NAN; out.samples.len() * net.width] };
            if !rows.is_empty() {
                let values = self.net_scores(net, &rows, &out.samples);
                for (value, (_, _, sample)) in values.chunks_exact(net.width).zip(&rows) {
                    scores.scores[sample * net.width..][..net.width].copy_from_slice(value);
                }
            }
            out.signals.nets.push((id, scores));
        }
    }

    fn net_scores(&self, net: &CpuNet, rows: &[(&Rows<'_>, usize, usize)], samples: &[Sample]) -> Vec<f32> {
        let (b, width, vocab) = (&self.buffers, self.config.hidden, self.config.vocab_size);
        let mut scratch = Vec::new();
        let (mut hidden, mut logits) = (Vec::new(), Vec::new());
        for back in 0..=net.back {
            let mut states = vec![0.0; rows.len() * width];
            for (state, (s, position, sample)) in states.chunks_exact_mut(width).zip(rows) {
                if back == 0 {
                    state.copy_from_slice(&b.hidden[sample * width..][..width]);
                } else if let Some(position) = position.checked_sub(back) {
                    state.copy_from_slice(&self.hidden_pages[cell(s.pages, position) * width..][..width]);
                }
            }
            let mut values = Vec::new();
            if net.reads_logits(back) && back == 0 {
                values.extend(rows.iter().flat_map(|(_, _, sample)| &b.logits[sample * vocab..][..vocab]));
            } else if net.reads_logits(back) {
                values.resize(rows.len() * vocab, 0.0);
                kernels::linear(self.model.head(), &states, &mut values, &mut scratch);
                for (values, (s, position, _)) in values.chunks_exact_mut(vocab).zip(rows) {
                    if *position < back {
                        values.fill(0.0);
                    } else {
                        s.masked.iter().for_each(|&id| values[id as usize] = f32::NEG_INFINITY);
                    }
                }
            }
            hidden.push(states);
            logits.push(values);
        }
        let candidates: Vec<_> = rows.iter().map(|(_, _, sample)| samples[*sample].token).collect();
        let inputs =
            Inputs { hidden: &hidden, logits: &logits, candidates: &candidates, embedding: &self.model.embedding };
        net.evaluate(&inputs, &mut scratch)
    }
}

/// Place of a position among the cells of all pages.
fn cell(pages: &[PageId], position: usize) -> usize {
    pages[position / PAGE_TOKENS] as usize * PAGE_TOKENS + position % PAGE_TOKENS
}

/// Of the `have` rows of each sequence keep the last `keep` ones; `values` holds `width` numbers a row.
fn keep_last<T: Copy>(
    batch: &RowBatch<'_>,
    have: impl Fn(&Rows<'_>) -> usize,
    keep: impl Fn(&Rows<'_>) -> usize,
    values: &mut Vec<T>,
    width: usize,
) {
    let (mut end, mut kept) = (0, 0);
    for s in &batch.sequences {
        end += have(s);
        values.copy_within((end - keep(s)) * width..end * width, kept * width);
        kept += keep(s);
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
