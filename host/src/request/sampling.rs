//! How tokens are drawn. Whoever makes [`SamplingParams`] keeps to the ranges given here.

use super::TokenId;
use crate::constraint::Constraint;

/// Sampling parameters of one request.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy: the largest logit, ties to the lowest id.
    pub temperature: f32,
    /// Keep the `top_k` most probable tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the most probable tokens whose probabilities together reach `top_p`; in (0, 1].
    pub top_p: f32,
    /// Drop tokens less probable than `min_p` times the most probable one; in [0, 1].
    pub min_p: f32,
    /// Divide (positive) or multiply (negative) the logits of tokens of prompt and answer; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once from the logits of tokens of the answer.
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens of the answer for each time they occur in it.
    pub frequency_penalty: f32,
    /// Noise is a function of (seed, position, model) alone.
    pub seed: u64,
    /// `Some(n)`: the `n` most probable tokens with each committed token (0 to [`MAX_TOP_LOGPROBS`]).
    pub top_logprobs: Option<u32>,
    /// `Some`: the tokens of the prompt are scored as well.
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// Tokens whose log-probabilities come behind the most probable ones, in this order, with each
    /// committed and each scored token.
    pub listed_logprobs: Vec<TokenId>,
    /// Added to logits.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// End tokens are not sampled before this many tokens.
    pub min_tokens: u32,
    /// The models' end tokens do not end the request.
    pub ignore_eos: bool,
    /// Further tokens that end the request.
    pub stop_token_ids: Vec<TokenId>,
    /// The form that the answer must have. End tokens come only where it is complete or may be, whatever
    /// `min_tokens` and `ignore_eos` say of them: those hold where something else may follow as well.
    pub constraint: Option<Constraint>,
}

/// Which tokens of a prompt are scored, and with what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptLogprobs {
    /// The first one, by position; from 1, as nothing comes before token 0.
    pub from: u32,
    /// As many of the most probable tokens with each (0 to [`MAX_TOP_LOGPROBS`]).
    pub top: u32,
}

/// Bound of [`SamplingParams::top_logprobs`] and [`SamplingParams::listed_logprobs`].
pub const MAX_TOP_LOGPROBS: u32 = 20;

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
            top_logprobs: None,
            prompt_logprobs: None,
            listed_logprobs: Vec::new(),
            logit_bias: Vec::new(),
            min_tokens: 0,
            ignore_eos: false,
            stop_token_ids: Vec::new(),
            constraint: None,
        }
    }
}

impl SamplingParams {
    /// Greedy decoding.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }
}
