//! Driving a runner by hand, and what it should give.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use tokenrouter::request::{ModelId, SamplingParams, TokenId};
use tokenrouter::runner::cpu::{CpuRunner, LoadOptions};
use tokenrouter::runner::{PAGE_TOKENS, PageId, RowBatch, RowOutputs, Rows, Runner, SignalRequest};

/// The repository; a test that runs on another machine than it was built on is told where it lies.
pub fn root() -> PathBuf {
    match std::env::var_os("TOKENROUTER_TEST_ROOT") {
        Some(root) => root.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join(".."),
    }
}

pub fn fixtures() -> PathBuf {
    root().join("tests/fixtures/goldens")
}

pub fn demo(name: &str) -> PathBuf {
    root().join("models/demo").join(name)
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
            scored: 0,
            sampling: &self.sampling,
            prompt_len: self.prompt_len,
            masked: &self.masked,
            nets: &[],
            allowed: &[],
        }
    }
}

pub fn forward(runner: &mut dyn Runner, sequences: Vec<Rows<'_>>, signals: &SignalRequest) -> RowOutputs {
    let batch = RowBatch { sequences, signals: signals.clone(), hidden: false };
    runner.forward(&batch).unwrap_or_else(|e| panic!("{e}"))
}

/// Asks for all raw logits.
pub fn all_logits(runner: &dyn Runner) -> SignalRequest {
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

/// Random models of every architecture.
pub mod tiny {
    use super::{PathBuf, TokenId, fixtures};

    pub const ARCHITECTURES: [&str; 6] = ["llama2", "llama3", "mistral", "qwen2", "qwen3", "qwen3-head-dim"];
    pub const LENGTHS: [usize; 3] = [1, 17, 70];

    pub fn dir(architecture: &str) -> PathBuf {
        fixtures().join("tiny").join(architecture)
    }

    /// A sequence and the logits at each of its positions.
    pub struct Golden {
        pub ids: Vec<TokenId>,
        pub logits: Vec<Vec<f32>>,
    }

    pub fn goldens(architecture: &str) -> Vec<Golden> {
        let bytes = std::fs::read(dir(architecture).join("golden.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        LENGTHS
            .iter()
            .map(|length| {
                let ids = file.tensor(&format!("ids_{length}")).unwrap();
                let logits = file.tensor(&format!("logits_{length}")).unwrap();
                let values: Vec<f32> =
                    logits.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
                Golden {
                    ids: ids
                        .data()
                        .chunks_exact(8)
                        .map(|b| i64::from_le_bytes(b.try_into().unwrap()) as TokenId)
                        .collect(),
                    logits: values.chunks(logits.shape()[1]).map(<[f32]>::to_vec).collect(),
                }
            })
            .collect()
    }

    /// Within 1e-4 of the range of the values.
    pub fn assert_close(architecture: &str, got: &[Vec<f32>], want: &[Vec<f32>]) {
        assert_eq!(got.len(), want.len());
        let all = || want.iter().flatten().copied();
        let range = all().fold(f32::MIN, f32::max) - all().fold(f32::MAX, f32::min);
        // Unlike `max`, the total order keeps NaN.
        let differences = got.iter().flatten().zip(all()).map(|(g, w)| (g - w).abs());
        let worst = differences.max_by(f32::total_cmp).unwrap();
        assert!(worst <= 1e-4 * range, "{architecture}, {} rows: off by {worst} of {range}", want.len());
    }
}

/// The token of `small-collm` that is a signal, not a word.
pub const DEFER: TokenId = 2048;

#[derive(Deserialize)]
struct ModelGolden {
    prompts: Vec<Prompt>,
}

#[derive(Deserialize)]
struct Prompt {
    prompt_ids: Vec<TokenId>,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
struct Step {
    token: TokenId,
    top5: Vec<(TokenId, f32)>,
    defer_logit: Option<f32>,
}

/// All prompts of a demo model in one batch: tokens, largest logits and the logit of deferral.
pub fn assert_greedy(runner: &mut dyn Runner, name: &str) {
    let text = std::fs::read_to_string(fixtures().join(format!("models/{name}.json"))).unwrap();
    let golden: ModelGolden = serde_json::from_str(&text).unwrap();
    let collm = name == "small-collm";
    let signals =
        SignalRequest { top_k: 5, token_logits: if collm { vec![DEFER] } else { vec![] }, ..SignalRequest::default() };
    let mut sequences: Vec<Sequence> = Vec::new();
    for (prompt, first) in golden.prompts.iter().zip(0..) {
        let mut sequence = Sequence::new(&prompt.prompt_ids, 256, first, 4);
        sequence.masked = if collm { vec![DEFER] } else { vec![] };
        sequences.push(sequence);
    }
    for step in 0..32 {
        let rows = sequences.iter().map(|s| s.rows(s.tokens.len(), 1)).collect();
        let out = forward(runner, rows, &signals);
        for (i, sequence) in sequences.iter_mut().enumerate() {
            let want = &golden.prompts[i].steps[step];
            assert_eq!(out.samples[i].token, want.token, "{name}, prompt {i}, step {step}");
            let ids: Vec<TokenId> = want.top5.iter().map(|(id, _)| *id).collect();
            assert_eq!(out.signals.topk_ids[i * 5..][..5], ids, "{name}, prompt {i}, step {step}");
            let mut pairs: Vec<(f32, f32)> =
                want.top5.iter().zip(&out.signals.topk_values[i * 5..]).map(|((_, w), g)| (*w, *g)).collect();
            if let Some(defer) = want.defer_logit {
                pairs.push((defer, out.signals.token_logits[i]));
            }
            for (want, got) in pairs {
                assert!((want - got).abs() < 1e-3, "{name}, prompt {i}, step {step}: {got}, not {want}");
            }
            sequence.done = sequence.tokens.len();
            sequence.tokens.push(want.token);
        }
    }
}
