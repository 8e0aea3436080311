//! The device, runners on it whose memory is full of other results, and what a forward gave as bits.

use std::path::Path;

use serde::Deserialize;
use tokenrouter::request::{ModelId, SamplingParams, TokenId};
use tokenrouter::runner::cuda::{CudaRunner, Dtype, LoadOptions, Partition, Source, device};
use tokenrouter::runner::model_config::ModelConfig;
use tokenrouter::runner::net::{Net, NetId};
use tokenrouter::runner::{
    ModelInfo, PAGE_TOKENS, PageId, RowBatch, RowOutputs, Rows, Runner, RunnerError, SignalRequest,
};
use tokenrouter_plugin_api::{SignalSet, random};

use crate::support::{Sequence, fixtures};

/// Whether there is a GPU; without one the reason is printed.
pub fn gpu() -> bool {
    let Err(reason) = device(0) else { return true };
    let required = std::env::var("TOKENROUTER_REQUIRE_GPU").is_ok_and(|value| value == "1");
    assert!(!required, "TOKENROUTER_REQUIRE_GPU is 1, but {reason}");
    eprintln!("skipped: {reason}");
    false
}

/// Most logits of named tokens that CUDA gives in one forward.
const LOGITS_AT_A_TIME: usize = 128;
/// Most rows of a step.
pub const MAX_ROWS: u32 = 512;

/// A counter-based source of numbers.
#[derive(Clone)]
pub struct Draws {
    seed: u64,
    next: u64,
}

impl Draws {
    pub fn new(seed: u64) -> Self {
        Self { seed, next: 0 }
    }

    /// Below `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        self.next += 1;
        (random::uniform(self.seed, self.next, 7 << 20) * bound as f64) as usize
    }

    pub fn tokens(&mut self, count: usize, vocabulary: u32) -> Vec<TokenId> {
        (0..count).map(|_| self.below(vocabulary as usize) as TokenId).collect()
    }
}

/// Whether a checker that slows kernels down a thousandfold watches: then a part of everything is done.
pub fn short() -> bool {
    std::env::var_os("TOKENROUTER_TEST_SHORT").is_some()
}

/// All, or the first `few` in a short run.
pub fn some<T>(all: &[T], few: usize) -> &[T] {
    if short() { &all[..few] } else { all }
}

/// A runner that computes something else before each forward, so that what a forward leaves out of its results
/// shows. The last pages are kept for that.
pub struct Poisoned {
    runner: Box<dyn Runner>,
    info: ModelInfo,
    nets: Vec<NetId>,
    draws: Draws,
}

/// Pages of the sequence that is computed in between.
const POISON_PAGES: u32 = 16;

/// How to load a runner.
#[derive(Clone, Copy)]
pub struct How {
    /// Multiprocessors of the first part of the device, and which part; `None`: the whole device.
    pub part: Option<(u32, usize)>,
    pub dtype: Dtype,
    /// Without those of [`Poisoned`].
    pub pages: u32,
    pub max_rows: u32,
    pub graphs: bool,
}

pub const F32: How = How { part: None, dtype: Dtype::F32, pages: 64, max_rows: MAX_ROWS, graphs: true };
pub const BF16: How = How { part: None, dtype: Dtype::Bf16, pages: 64, max_rows: MAX_ROWS, graphs: true };

impl Poisoned {
    pub fn load(directory: &Path, how: How) -> Self {
        let config = ModelConfig::load(directory, None).unwrap_or_else(|e| panic!("{e}"));
        Self::new(config, Source::Directory(directory), how)
    }

    pub fn new(config: ModelConfig, source: Source<'_>, how: How) -> Self {
        let options = LoadOptions {
            name: "test".into(),
            model: ModelId(0),
            ordinal: 0,
            dtype: how.dtype,
            pages: how.pages + POISON_PAGES,
            max_rows: how.max_rows,
            partition: how.part.map(|(first, part)| Partition { reserved: vec![first], part }),
            graphs: how.graphs,
            high_priority: false,
            progress: None,
        };
        let runner = CudaRunner::load(config, source, options).unwrap_or_else(|e| panic!("{e}"));
        let info = ModelInfo { pages: how.pages, ..runner.info().clone() };
        Self { runner, info, nets: Vec::new(), draws: Draws::new(11) }
    }

    /// A forward of random rows that asks for everything, of up to 64 rows or of more.
    fn poison(&mut self) -> Result<(), RunnerError> {
        let most = (POISON_PAGES as usize * PAGE_TOKENS).min(self.info.context as usize);
        let vocabulary = self.info.vocab_size;
        let prompt = self.draws.below(2) == 1;
        let rows = if prompt { 65 + self.draws.below(most - 65) } else { 1 + self.draws.below(64) };
        let start = self.draws.below(most - rows + 1);
        let context = self.draws.tokens(start + rows, vocabulary);
        let pages: Vec<PageId> = (self.info.pages..self.info.pages + POISON_PAGES).rev().collect();
        let listed = self.draws.below(100) as u32;
        let sampling = SamplingParams {
            top_k: if listed < 50 { listed } else { 0 },
            top_p: if listed.is_multiple_of(3) { 0.7 } else { 1.0 },
            top_logprobs: Some(20),
            seed: u64::from(listed),
            ..SamplingParams::default()
        };
        let sampled = if prompt { 64 } else { rows };
        let sequence = Rows {
            context: &context,
            start,
            end: start + rows,
            pages: &pages,
            sampled,
            scored: 0,
            sampling: &sampling,
            prompt_len: 1,
            masked: &[],
            nets: &self.nets,
            allowed: &[],
        };
        let signals = SignalRequest {
            scalars: SignalSet::ALL,
            top_k: 100,
            token_logits: self.draws.tokens(LOGITS_AT_A_TIME, vocabulary),
        };
        let out = self.runner.forward(&RowBatch { sequences: vec![sequence], signals, hidden: true })?;
        assert_eq!(out.samples.len(), sampled);
        assert!(out.samples.iter().all(|sample| sample.finite), "random rows give numbers");
        Ok(())
    }
}

impl Runner for Poisoned {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn load_net(&mut self, net: Net) -> Result<NetId, RunnerError> {
        let id = self.runner.load_net(net)?;
        self.nets.push(id);
        Ok(id)
    }

    fn forget_nets(&mut self) {
        self.nets.clear();
        self.runner.forget_nets();
    }

    fn forward(&mut self, batch: &RowBatch<'_>) -> Result<RowOutputs, RunnerError> {
        if !short() {
            self.poison()?;
        }
        self.runner.forward(batch)
    }
}

/// Everything that can be asked of a row.
pub fn everything(vocabulary: u32) -> SignalRequest {
    let token_logits = (0..vocabulary).rev().step_by(vocabulary as usize / 20).collect();
    SignalRequest { scalars: SignalSet::ALL, top_k: 20, token_logits }
}

/// What a sampled row gave, bit by bit.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    hidden: Vec<u32>,
    scalars: Vec<u32>,
    top: Vec<(TokenId, u32)>,
    token_logits: Vec<u32>,
    token: TokenId,
    logprob: u32,
    top_logprobs: Vec<(TokenId, u32)>,
    scores: Vec<u32>,
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// A forward with everything of each sampled row.
pub fn observe(runner: &mut dyn Runner, sequences: Vec<Rows<'_>>) -> Vec<Seen> {
    let signals = everything(runner.info().vocab_size);
    let (top_k, ids, width) = (signals.top_k as usize, signals.token_logits.len(), runner.info().hidden_size as usize);
    let batch = RowBatch { sequences, signals, hidden: true };
    let out = runner.forward(&batch).unwrap_or_else(|e| panic!("{e}"));
    let s = &out.signals;
    assert_eq!((out.samples.len(), out.hidden.len()), (batch.sampled(), batch.sampled() * width));
    let row = |i: usize| {
        let sample = &out.samples[i];
        assert!(sample.finite, "row {i} is not finite");
        let top = s.topk_ids[i * top_k..][..top_k].iter().zip(&s.topk_values[i * top_k..]);
        let columns = [&s.entropy, &s.entropy_norm, &s.top1_prob, &s.margin, &s.logsumexp, &s.candidate_prob];
        Seen {
            hidden: bits(&out.hidden[i * width..][..width]),
            scalars: columns.iter().map(|column| column[i].to_bits()).collect(),
            top: top.map(|(id, value)| (*id, value.to_bits())).collect(),
            token_logits: bits(&s.token_logits[i * ids..][..ids]),
            token: sample.token,
            logprob: sample.logprob.to_bits(),
            top_logprobs: sample.top_logprobs.iter().map(|(id, value)| (*id, value.to_bits())).collect(),
            scores: s.nets.iter().flat_map(|(_, scores)| bits(scores.row(i))).collect(),
        }
    };
    (0..out.samples.len()).map(row).collect()
}

/// The same bits, or what differs first.
pub fn assert_same(what: &str, got: &[Seen], want: &[Seen]) {
    assert_eq!(got.len(), want.len(), "{what}: rows");
    let rows = want.len();
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let differs = [
            ("hidden", got.hidden != want.hidden),
            ("logits", got.token_logits != want.token_logits),
            ("best logits", got.top != want.top),
            ("scalars", got.scalars != want.scalars),
            ("net scores", got.scores != want.scores),
            ("token", got.token != want.token),
            ("logprob", got.logprob != want.logprob),
            ("top logprobs", got.top_logprobs != want.top_logprobs),
        ];
        let differs: Vec<&str> = differs.iter().filter(|(_, differs)| *differs).map(|(name, _)| *name).collect();
        assert!(differs.is_empty(), "{what}, row {i} of {rows}: {differs:?} differ");
    }
}

/// All logits of the sampled rows, by as many forwards as that takes on CUDA.
pub fn all_logits(runner: &mut dyn Runner, rows: Rows<'_>) -> Vec<Vec<f32>> {
    logits_by(runner, rows, LOGITS_AT_A_TIME)
}

/// All logits of the sampled rows, by one forward: on the CPU.
pub fn all_logits_at_once(runner: &mut dyn Runner, rows: Rows<'_>) -> Vec<Vec<f32>> {
    logits_by(runner, rows, usize::MAX)
}

fn logits_by(runner: &mut dyn Runner, rows: Rows<'_>, at_a_time: usize) -> Vec<Vec<f32>> {
    let vocabulary = runner.info().vocab_size;
    let mut logits = vec![Vec::with_capacity(vocabulary as usize); rows.sampled];
    let ids: Vec<TokenId> = (0..vocabulary).collect();
    for ids in ids.chunks(at_a_time) {
        let signals = SignalRequest { token_logits: ids.to_vec(), ..SignalRequest::default() };
        let out = runner
            .forward(&RowBatch { sequences: vec![rows], signals, hidden: false })
            .unwrap_or_else(|e| panic!("{e}"));
        let columns = out.signals.token_logits.chunks(ids.len());
        assert_eq!(columns.len(), logits.len());
        logits.iter_mut().zip(columns).for_each(|(row, column)| row.extend(column));
    }
    logits
}

/// The sequence in steps of these sizes, again and again: what `compute` gives of its rows at `from` and after.
pub fn in_steps<T>(
    runner: &mut dyn Runner,
    sequence: &Sequence,
    from: usize,
    steps: &[usize],
    mut compute: impl FnMut(&mut dyn Runner, Rows<'_>) -> Vec<T>,
) -> Vec<T> {
    let mut sequence = sequence.clone();
    let mut seen = Vec::new();
    for step in steps.iter().cycle() {
        let end = (sequence.done + step).min(sequence.tokens.len());
        let sampled = end.saturating_sub(from).min(end - sequence.done);
        seen.extend(compute(runner, sequence.rows(end, sampled)));
        sequence.done = end;
        if end == sequence.tokens.len() {
            break;
        }
    }
    seen
}

/// Prompt and answer of a reference trace.
pub fn written(trace: &str) -> Vec<TokenId> {
    #[derive(Deserialize)]
    struct Trace {
        prompt_ids: Vec<TokenId>,
        token_ids: Vec<TokenId>,
    }
    let text = std::fs::read_to_string(fixtures().join(format!("traces/{trace}.json"))).unwrap();
    let Trace { mut prompt_ids, token_ids } = serde_json::from_str(&text).unwrap();
    prompt_ids.extend(token_ids);
    prompt_ids
}
