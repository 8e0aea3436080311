//! What a policy sees. Every view is valid until the hook returns.

use crate::{ModelIndex, Slot, TokenId};

/// Stands for "no model" where a [`ModelIndex`] is expected.
pub const NO_MODEL: ModelIndex = u32::MAX;
/// Stands for "no token" where a [`TokenId`] is expected.
pub const NO_TOKEN: TokenId = u32::MAX;

/// One request, as this model knows it.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct RequestView<'a> {
    /// Id of the request, unique in the life of the server.
    pub id: u64,
    /// Where this policy instance keeps the request's state.
    pub slot: Slot,
    /// Seed of the request, for [`random::uniform`](crate::random::uniform).
    pub seed: u64,
    /// How many of `tokens` are the prompt.
    pub prompt_len: u32,
    /// Most tokens the request may generate, over all models together.
    pub max_tokens: u32,
    /// The prompt, the committed tokens, and at the end the provisional ones.
    pub tokens: &'a [TokenId],
    /// How many of the last tokens are provisional.
    pub provisional: u32,
    /// The candidate of the row that decided, or [`NO_TOKEN`].
    pub candidate: TokenId,
}

impl<'a> RequestView<'a> {
    /// For hosts and for tests: all fields but `provisional` (0) and `candidate` (none).
    pub fn new(id: u64, slot: Slot, seed: u64, prompt_len: u32, max_tokens: u32, tokens: &'a [TokenId]) -> Self {
        Self { id, slot, seed, prompt_len, max_tokens, tokens, provisional: 0, candidate: NO_TOKEN }
    }

    /// The committed and provisional tokens after the prompt.
    pub fn generated(&self) -> &'a [TokenId] {
        &self.tokens[(self.prompt_len as usize).min(self.tokens.len())..]
    }
}

/// A message that hands a request to this model.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct PeerView<'a> {
    /// The model that hands over.
    pub from: ModelIndex,
    /// The tokens that this model did not hold; the last `provisional` of them are provisional.
    pub tokens: &'a [TokenId],
    /// How many of `tokens` are provisional.
    pub provisional: u32,
    /// What the sender's policy put into [`Handoff::payload`](crate::Handoff::payload).
    pub payload: &'a [u8],
}

impl<'a> PeerView<'a> {
    /// For hosts and for tests.
    pub fn new(from: ModelIndex, tokens: &'a [TokenId], provisional: u32, payload: &'a [u8]) -> Self {
        Self { from, tokens, provisional, payload }
    }
}

/// Signal columns: one value a row, empty where [`Requirements`](crate::Requirements) did not ask.
/// NaN means "no signal"; comparisons with NaN are false, so `x > threshold` stays.
#[derive(Clone, Copy, Debug, Default)]
pub struct SignalColumns<'a> {
    /// Entropy in nats.
    pub entropy: &'a [f32],
    /// Entropy divided by ln of the number of tokens that can be sampled, 0 to 1.
    pub entropy_norm: &'a [f32],
    /// Probability of the best token.
    pub top1_prob: &'a [f32],
    /// Probability of the best token less that of the second.
    pub margin: &'a [f32],
    /// Log-sum-exp of the logits.
    pub logsumexp: &'a [f32],
    /// Probability of the candidate.
    pub candidate_prob: &'a [f32],
    /// `top_k` largest raw logits a row, descending, row after row.
    pub topk_values: &'a [f32],
    /// Token ids of `topk_values`.
    pub topk_ids: &'a [TokenId],
    /// Values a row in the two columns above.
    pub top_k: u32,
    /// Raw logits of the required tokens, in the order of the requirement, row after row.
    pub token_logits: &'a [f32],
    /// Values a row in `token_logits`.
    pub token_logit_count: u32,
    /// Scores of the required nets, in the order of the requirement, row after row. The nets' own last
    /// operation decides what a score is, for example a logit or a probability.
    pub net_scores: &'a [f32],
    /// Values a row in `net_scores`.
    pub net_width: u32,
}

/// The rows of one step that one policy instance decides about, as a struct of arrays.
///
/// Usually each request has one row. On a verifying visit a request has several, oldest first: one
/// for each provisional token and one behind them.
#[derive(Clone, Copy, Debug, Default)]
pub struct RouteBatch<'a> {
    /// Request of each row.
    pub request_ids: &'a [u64],
    /// State slot of each row's request.
    pub slots: &'a [Slot],
    /// Seed of each row's request.
    pub seeds: &'a [u64],
    /// Index of the candidate among the generated tokens: 0 is the first after the prompt.
    pub positions: &'a [u32],
    /// The token just sampled.
    pub candidates: &'a [TokenId],
    /// The provisional token at the candidate's position, or [`NO_TOKEN`].
    pub drafts: &'a [TokenId],
    /// The model that handed the request over for this visit, or [`NO_MODEL`].
    pub last_models: &'a [ModelIndex],
    /// Tokens that the request may still generate, the candidate included. At 1 a
    /// [`Decision::DRAFT`](crate::Decision::DRAFT)
    /// is taken as [`Decision::STAY`](crate::Decision::STAY).
    pub remaining: &'a [u32],
    /// The signals that were asked for.
    pub signals: SignalColumns<'a>,
}

impl RouteBatch<'_> {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.request_ids.len()
    }
    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.request_ids.is_empty()
    }
}
