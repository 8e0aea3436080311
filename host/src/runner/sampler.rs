//! From a row of raw logits to a candidate and signals. Every runner that has logits on the host uses it.
//!
//! Order: masked tokens leave the distribution; signals and log-probabilities are taken; then bias,
//! penalties, and `min_tokens` or the tokens allowed; then greedy, or temperature, min-p, top-k, top-p and one draw.

use tokenrouter_kernels::{self as kernels, Distribution};
use tokenrouter_plugin_api::{SignalSet, random};

use super::score::{mask, top_logprobs};
use super::{Columns, Sample, SignalRequest};
use crate::constraint::allows;
use crate::request::{ModelId, SamplingParams, TokenId};

/// Below this, temperature is greedy.
pub(super) const GREEDY: f32 = 1e-5;

/// Id that fills up `topk_ids` of rows with too few tokens.
pub const NO_TOKEN: TokenId = TokenId::MAX;

/// A sampled row.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    /// The sequence up to this row; the sampled token comes next.
    pub context: &'a [TokenId],
    /// How many tokens of `context` are the prompt (at most all).
    pub prompt_len: usize,
    /// How to sample.
    pub params: &'a SamplingParams,
    /// Tokens left out of every distribution.
    pub masked: &'a [TokenId],
    /// Tokens that may be drawn, as bits; empty: all. With it `min_tokens` has no effect: it is in the bits.
    pub allowed: &'a [u32],
}

/// Samples for one model. Keeps nothing between calls but work memory.
#[derive(Clone, Debug)]
pub struct Sampler {
    model: ModelId,
    eos: Vec<TokenId>,
    adjusted: Vec<f32>,
    counts: Vec<u32>,
    weights: Vec<f32>,
    kept: Vec<TokenId>,
}

pub(super) const NOT_FINITE: Sample = Sample { token: 0, logprob: f32::NAN, top_logprobs: Vec::new(), finite: false };

impl Sampler {
    /// `eos` are the tokens that end a sequence at `model`.
    pub fn new(model: ModelId, eos: Vec<TokenId>) -> Self {
        Self { model, eos, adjusted: Vec::new(), counts: Vec::new(), weights: Vec::new(), kept: Vec::new() }
    }

    /// Sample one row and push its signals to `columns`. Masked tokens get `-inf` in `logits`.
    pub fn sample(
        &mut self,
        logits: &mut [f32],
        row: &Row<'_>,
        wanted: &SignalRequest,
        columns: &mut Columns,
    ) -> Sample {
        for &id in &wanted.token_logits {
            columns.token_logits.push(logits.get(id as usize).copied().unwrap_or(f32::NAN));
        }
        let possible = mask(logits, row.masked);
        let Some(raw) = Distribution::of(logits) else {
            columns.push_top(logits, &[], wanted.top_k as usize);
            columns.push_scalars(wanted.scalars, None);
            return NOT_FINITE;
        };
        kernels::top(logits, wanted.top_k as usize, &mut self.kept);
        columns.push_top(logits, &self.kept, wanted.top_k as usize);
        let token = self.choose(logits, row, &raw);
        let logprob = token.map_or(f32::NAN, |token| raw.log_prob(logits[token as usize]));
        columns.push_scalars(wanted.scalars, Some((&raw, possible, logprob)));
        let Some(token) = token else { return NOT_FINITE };
        let top = row.params.top_logprobs.unwrap_or(0);
        let top_logprobs = top_logprobs(logits, &raw, top, row.params, &mut self.kept);
        Sample { token, logprob, top_logprobs, finite: true }
    }

    /// The candidate; `None` when bias and penalties leave nothing or are not finite.
    fn choose(&mut self, logits: &[f32], row: &Row<'_>, raw: &Distribution) -> Option<TokenId> {
        if !needs_adjusting(row) {
            return self.draw(logits, row, raw);
        }
        let mut adjusted = std::mem::take(&mut self.adjusted);
        adjusted.clear();
        adjusted.extend_from_slice(logits);
        self.adjust(&mut adjusted, row);
        let token = Distribution::of(&adjusted).and_then(|distribution| self.draw(&adjusted, row, &distribution));
        self.adjusted = adjusted;
        token
    }

    /// Bias, penalties, and `min_tokens` or the tokens allowed.
    fn adjust(&mut self, logits: &mut [f32], row: &Row<'_>) {
        let params = row.params;
        for &(id, bias) in &params.logit_bias {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit += bias;
            }
        }
        let (counts, size) = (&mut self.counts, logits.len());
        counts.resize(size, 0);
        let known = |id: &TokenId| (*id as usize) < size;
        if params.repetition_penalty != 1.0 {
            for id in row.context.iter().filter(|id| known(id)) {
                let id = *id as usize;
                if counts[id] == 0 {
                    counts[id] = 1;
                    let logit = &mut logits[id];
                    *logit = if *logit > 0.0 {
                        *logit / params.repetition_penalty
                    } else {
                        *logit * params.repetition_penalty
                    };
                }
            }
            row.context.iter().filter(|id| known(id)).for_each(|id| counts[*id as usize] = 0);
        }
        if params.presence_penalty != 0.0 || params.frequency_penalty != 0.0 {
            let answer = &row.context[row.prompt_len..];
            answer.iter().filter(|id| known(id)).for_each(|id| counts[*id as usize] += 1);
            for id in answer.iter().filter(|id| known(id)) {
                let count = std::mem::take(&mut counts[*id as usize]);
                if count > 0 {
                    logits[*id as usize] -= params.frequency_penalty * count as f32 + params.presence_penalty;
                }
            }
        }
        if !row.allowed.is_empty() {
            for (id, logit) in logits.iter_mut().enumerate() {
                if !allows(row.allowed, id as TokenId) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        } else if row.generated() < params.min_tokens as usize {
            for &id in self.eos.iter().chain(&params.stop_token_ids) {
                if let Some(logit) = logits.get_mut(id as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }

    /// Greedy, or one draw from what temperature, min-p, top-k and top-p leave.
    fn draw(&mut self, logits: &[f32], row: &Row<'_>, distribution: &Distribution) -> Option<TokenId> {
        let params = row.params;
        if params.temperature < GREEDY {
            return Some(distribution.argmax as TokenId);
        }
        // The best token weighs exactly 1, so min-p is a bound on weights.
        kernels::weights(logits, distribution.max, 1.0 / params.temperature, &mut self.weights);
        if params.min_p > 0.0 {
            self.weights.iter_mut().filter(|w| **w < params.min_p).for_each(|w| *w = 0.0);
        }
        let uniform = random::uniform(params.seed, row.context.len() as u64, u64::from(self.model.0));
        let top_k = if params.top_k == 0 { logits.len() } else { params.top_k as usize };
        if top_k >= logits.len() && params.top_p >= 1.0 {
            return kernels::pick(&self.weights, uniform).map(|i| i as TokenId);
        }
        self.nucleus(logits, top_k, params.top_p);
        self.kept.sort_unstable();
        let kept: Vec<f32> = self.kept.iter().map(|&id| self.weights[id as usize]).collect();
        kernels::pick(&kept, uniform).map(|i| self.kept[i])
    }

    /// Leave in `kept` the fewest of the best `top_k` tokens that hold `top_p` of their weight.
    fn nucleus(&mut self, logits: &[f32], top_k: usize, top_p: f32) {
        let (weights, kept) = (&self.weights, &mut self.kept);
        let weigh = |ids: &[TokenId]| ids.iter().map(|&id| f64::from(weights[id as usize])).sum::<f64>();
        let target;
        if top_k < logits.len() {
            kernels::top(logits, top_k, kept);
            target = weigh(kept) * f64::from(top_p);
        } else {
            target = weights.iter().map(|&w| f64::from(w)).sum::<f64>() * f64::from(top_p);
            let mut n = 64;
            kernels::top(logits, n, kept);
            while weigh(kept) < target && n < logits.len() {
                n *= 16;
                kernels::top(logits, n, kept);
            }
        }
        if top_p < 1.0 {
            let mut held = 0.0;
            let enough = kept.iter().position(|&id| {
                held += f64::from(weights[id as usize]);
                held >= target
            });
            kept.truncate(enough.map_or(kept.len(), |last| last + 1));
        }
    }
}

impl Row<'_> {
    /// Tokens of the answer before the sampled one.
    fn generated(&self) -> usize {
        self.context.len().saturating_sub(self.prompt_len)
    }
}

fn needs_adjusting(row: &Row<'_>) -> bool {
    !row.allowed.is_empty() || changes_logits(row)
}

/// Whether a finite logit does not stay as it is.
pub(super) fn changes_logits(row: &Row<'_>) -> bool {
    let params = row.params;
    !params.logit_bias.is_empty()
        || params.repetition_penalty != 1.0
        || params.presence_penalty != 0.0
        || params.frequency_penalty != 0.0
        || (row.allowed.is_empty() && row.generated() < params.min_tokens as usize)
}

impl Columns {
    /// The values of `ids` (best first), filled up to `width`.
    pub(super) fn push_top(&mut self, logits: &[f32], ids: &[TokenId], width: usize) {
        self.topk_values.extend(ids.iter().map(|&id| logits[id as usize]));
        self.topk_ids.extend(ids);
        self.topk_values.extend(std::iter::repeat_n(f32::NEG_INFINITY, width - ids.len()));
        self.topk_ids.extend(std::iter::repeat_n(NO_TOKEN, width - ids.len()));
    }

    /// The scalars in `wanted`; NaN for a row without a distribution. Given are the distribution, the
    /// number of tokens in it and the candidate's log-probability.
    pub(super) fn push_scalars(&mut self, wanted: SignalSet, row: Option<(&Distribution, usize, f32)>) {
        let mut push = |signal: SignalSet,
                        column: fn(&mut Self) -> &mut Vec<f32>,
                        value: &dyn Fn(&Distribution, usize, f32) -> f32| {
            if wanted.contains(signal) {
                column(self).push(row.map_or(f32::NAN, |(d, n, logprob)| value(d, n, logprob)));
            }
        };
        push(SignalSet::ENTROPY, |c| &mut c.entropy, &|d, _, _| d.entropy);
        push(SignalSet::ENTROPY_NORM, |c| &mut c.entropy_norm, &|d, n, _| {
            if n > 1 { d.entropy / (n as f32).ln() } else { 0.0 }
        });
        push(SignalSet::TOP1_PROB, |c| &mut c.top1_prob, &|d, _, _| d.log_prob(d.max).exp());
        push(SignalSet::MARGIN, |c| &mut c.margin, &|d, _, _| d.log_prob(d.max).exp() - d.log_prob(d.second).exp());
        push(SignalSet::LOGSUMEXP, |c| &mut c.logsumexp, &|d, _, _| d.log_sum_exp);
        push(SignalSet::CANDIDATE_PROB, |c| &mut c.candidate_prob, &|_, _, logprob| logprob.exp());
    }
}

#[cfg(test)]
mod tests;
