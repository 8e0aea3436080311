//! Runners compute models. A runner is synchronous, has one owner thread, and owns the K/V pages of
//! one model; it knows positions and pages, never requests' lives.

mod check;
pub mod cpu;
pub mod cuda;
pub mod model_config;
pub mod net;
pub(crate) mod safetensors_file;
pub mod sampler;
mod score;
mod signals;
pub mod simulated;
pub(crate) mod weights;

use check::check;
pub use signals::{Columns, Gathered, NetScores, SignalRequest};

use crate::constraint::mask_words;
use crate::request::{SamplingParams, Score, TokenId};
use net::{MakeReady, Net, NetId, ReadyNet};

/// Tokens a page of K/V holds.
pub const PAGE_TOKENS: usize = 16;

/// A page of a model's K/V pool: an index below [`ModelInfo::pages`].
pub type PageId = u32;

/// What is fixed about a loaded model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelInfo {
    /// Name in the configuration.
    pub name: String,
    /// Architecture and size in words, for people, for example `qwen3, 2 layers x 160, 1.1 M`.
    pub description: String,
    /// Width of the logits.
    pub vocab_size: u32,
    /// Width of a hidden state and of an input embedding.
    pub hidden_size: u32,
    /// Most tokens of a sequence, prompt and answer together.
    pub context: u32,
    /// All tokens that end a sequence at this model, ascending.
    pub eos: Vec<TokenId>,
    /// Pages of the K/V pool.
    pub pages: u32,
    /// Bytes of the weights as loaded.
    pub weight_bytes: u64,
    /// Bytes of one K/V page over all layers.
    pub page_bytes: u64,
}

/// The rows of one sequence in a forward: positions `start..end` of `context`.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// The sequence; at least `end` tokens.
    pub context: &'a [TokenId],
    /// First position to compute. K/V of the positions below is in `pages`.
    pub start: usize,
    /// One past the last position to compute; more than `start`.
    pub end: usize,
    /// The sequence's pages in order: position p lives in `pages[p / PAGE_TOKENS]`.
    pub pages: &'a [PageId],
    /// How many of the last rows are sampled; 0 for a chunk of a prompt.
    pub sampled: usize,
    /// How many of the rows before those are scored: asked what they give the next token of `context`, with
    /// `sampling.prompt_logprobs` and `sampling.listed_logprobs`.
    pub scored: usize,
    /// How they are sampled.
    pub sampling: &'a SamplingParams,
    /// How many tokens of `context` are the prompt.
    pub prompt_len: usize,
    /// Tokens left out of every distribution: never sampled, not counted in any signal. Ascending.
    pub masked: &'a [TokenId],
    /// Nets to evaluate at the sampled rows. The same in every forward of a sequence.
    pub nets: &'a [NetId],
    /// For each sampled row, which tokens may be drawn there, as bits ([`mask_words`] words a row): all others are
    /// left out of the draw, but out of no signal and no log-probability. `min_tokens` is in it already. Empty: all
    /// may be drawn.
    pub allowed: &'a [u32],
}

impl<'a> Rows<'a> {
    /// The tokens that may be drawn at sampled row number `index`, for a model with `vocab_size` logits.
    pub fn allowed_at(&self, index: usize, vocab_size: usize) -> &'a [u32] {
        let words = mask_words(vocab_size);
        self.allowed.get(index * words..(index + 1) * words).unwrap_or_default()
    }
}

/// One forward: the rows of all sequences, computed together.
///
/// No result may depend on what else is in the batch: a row's arithmetic has the same order of
/// operations alone and in company.
#[derive(Clone, Debug, Default)]
pub struct RowBatch<'a> {
    pub sequences: Vec<Rows<'a>>,
    /// Signals to compute for every sampled row.
    pub signals: SignalRequest,
    /// Whether to give the hidden states of the sampled rows.
    pub hidden: bool,
}

impl Rows<'_> {
    /// The scored positions.
    pub fn scored_positions(&self) -> std::ops::Range<usize> {
        let end = self.end - self.sampled;
        end - self.scored..end
    }
}

impl RowBatch<'_> {
    /// Rows of all sequences.
    pub fn rows(&self) -> usize {
        self.sequences.iter().map(|s| s.end - s.start).sum()
    }
    /// Sampled rows of all sequences.
    pub fn sampled(&self) -> usize {
        self.sequences.iter().map(|s| s.sampled).sum()
    }
    /// Scored rows of all sequences.
    pub fn scored(&self) -> usize {
        self.sequences.iter().map(|s| s.scored).sum()
    }
}

/// What one sampled row gave.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The candidate.
    pub token: TokenId,
    /// Its log-probability under the raw distribution (before temperature, penalties and bias).
    pub logprob: f32,
    /// As for a [`Committed`](crate::request::Committed) token.
    pub top_logprobs: Vec<(TokenId, f32)>,
    /// False when a logit was NaN or +inf; the other fields then mean nothing.
    pub finite: bool,
}

/// Samples and signal columns of a forward: sequences in order, rows of each in order.
#[derive(Clone, Debug, Default)]
pub struct RowOutputs {
    pub samples: Vec<Sample>,
    pub signals: Columns,
    /// One a scored row; `None` when a logit was NaN or +inf.
    pub scores: Vec<Option<Score>>,
    /// Last hidden state of each sampled row, after the final norm, where the batch asked for it.
    pub hidden: Vec<f32>,
}

/// A forward that failed as a whole.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct RunnerError {
    pub message: String,
    /// No later forward can succeed either, for example because the context of the device is gone. The
    /// runner is not called again.
    pub fatal: bool,
}

impl RunnerError {
    /// This forward failed; others may succeed.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), fatal: false }
    }

    /// The runner can compute nothing any more.
    pub fn fatal(message: impl Into<String>) -> Self {
        Self { message: message.into(), fatal: true }
    }
}

/// Computes one model.
pub trait Runner: Send {
    /// What is fixed about the model.
    fn info(&self) -> &ModelInfo;
    /// Take a net, to be evaluated in the forwards that name it. Before the first forward.
    fn load_net(&mut self, net: Net) -> Result<NetId, RunnerError> {
        Err(RunnerError::new(format!("{}: the runner of model `{}` evaluates no nets", net.name, self.info().name)))
    }
    /// Makes nets ready for [`Self::place_net`]. `None`: this runner takes nets before its first forward alone.
    fn net_maker(&self) -> Option<MakeReady> {
        None
    }
    /// Take a net between two forwards, under an id that no net has.
    fn place_net(&mut self, _id: NetId, _net: ReadyNet) -> Result<(), RunnerError> {
        Err(RunnerError::new("the runner takes router networks at its start alone"))
    }
    /// Give up a net that nothing names any more, between two forwards.
    fn remove_net(&mut self, _id: NetId) -> Option<ReadyNet> {
        None
    }
    /// Forget all nets: the runner goes to another engine.
    fn forget_nets(&mut self) {}
    /// Compute `batch`: store K/V of its rows in their pages, then sample.
    fn forward(&mut self, batch: &RowBatch<'_>) -> Result<RowOutputs, RunnerError>;
}
