//! Driving a runner by hand.

use std::path::{Path, PathBuf};

use tokenrouter::request::{ModelId, SamplingParams, TokenId};
use tokenrouter::runner::cpu::{CpuRunner, LoadOptions};
use tokenrouter::runner::{PAGE_TOKENS, PageId, RowBatch, RowOutputs, Rows, Runner, SignalRequest};

pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/goldens")
}

pub fn demo(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo").join(name)
}

pub fn options(pages: u32) -> LoadOptions<'static> {
    LoadOptions { name: "test".into(), model: ModelId(0), pages, context: None, progress: None }
}

pub fn load(dir: &Path, pages: u32) -> CpuRunner {
    CpuRunner::load(dir, options(pages)).unwrap_or_else(|e| panic!("{e}"))
}

/// A sequence with pages of its own.
#[derive(Clone)]
pub struct Sequence {
    pub tokens: Vec<TokenId>,
    pub pages: Vec<PageId>,
    pub done: usize,
    pub prompt_len: usize,
    pub sampling: SamplingParams,
    pub masked: Vec<TokenId>,
}

impl Sequence {
    /// Pages `first, first + step, …`: not in order in memory, as in use.
    pub fn new(tokens: &[TokenId], room: usize, first: PageId, step: PageId) -> Self {
        let pages = (0..room.div_ceil(PAGE_TOKENS) as PageId).map(|i| first + i * step).collect();
        let prompt_len = tokens.len();
        let tokens = tokens.to_vec();
        Self { tokens, pages, done: 0, prompt_len, sampling: SamplingParams::greedy(), masked: Vec::new() }
    }

    /// Rows up to position `end`, the last `sampled` of them sampled.
    pub fn rows(&self, end: usize, sampled: usize) -> Rows<'_> {
        Rows {
            context: &self.tokens,
            start: self.done,
            end,
            pages: &self.pages,
            sampled,
            sampling: &self.sampling,
            prompt_len: self.prompt_len,
            masked: &self.masked,
            nets: &[],
        }
    }
}

pub fn forward(runner: &mut CpuRunner, sequences: Vec<Rows<'_>>, signals: &SignalRequest) -> RowOutputs {
    let batch = RowBatch { sequences, signals: signals.clone(), hidden: false };
    runner.forward(&batch).unwrap_or_else(|e| panic!("{e}"))
}

/// Asks for all raw logits.
pub fn all_logits(runner: &CpuRunner) -> SignalRequest {
    SignalRequest { top_k: runner.info().vocab_size, ..SignalRequest::default() }
}

/// The raw logits of each sampled row, put back in the order of ids.
pub fn logits(out: &RowOutputs, vocab: usize) -> Vec<Vec<f32>> {
    let columns = &out.signals;
    columns
        .topk_values
        .chunks(vocab)
        .zip(columns.topk_ids.chunks(vocab))
        .map(|(values, ids)| {
            let mut row = vec![f32::NAN; vocab];
            values.iter().zip(ids).for_each(|(v, id)| row[*id as usize] = *v);
            row
        })
        .collect()
}
