//! Composing two distributions, and the message that takes the small model's to the large one.

use std::collections::BTreeMap;

use tokenrouter_plugin_api::{MAX_PAYLOAD_BYTES, SignalColumns, TokenId};

/// The probability to defer and the log-sum-exp, both `f64`.
const HEADER: usize = 16;
/// A token's id (`u32`) and its logit (`f32`).
const PAIR: usize = 8;

/// Most tokens of a distribution that fit into a payload.
pub const MAX_TOKENS: u32 = ((MAX_PAYLOAD_BYTES - HEADER) / PAIR) as u32;

/// The best tokens of a distribution.
#[derive(Clone, Debug, PartialEq)]
pub struct TopTokens {
    /// Of all logits of the distribution.
    pub logsumexp: f64,
    /// Ids and logits. A token that cannot be sampled is not among them.
    pub tokens: Vec<(TokenId, f32)>,
}

impl TopTokens {
    /// The best tokens of a row. `top_k` and `LOGSUMEXP` must have been asked for.
    pub fn of_row(signals: &SignalColumns<'_>, row: usize) -> Self {
        let k = signals.top_k as usize;
        let places = row * k..(row + 1) * k;
        let tokens = signals.topk_ids[places.clone()].iter().copied().zip(signals.topk_values[places].iter().copied());
        // Masked tokens have a logit of -inf, and fill the list up where the vocabulary is short.
        let tokens = tokens.filter(|(_, logit)| logit.is_finite()).collect();
        Self { logsumexp: f64::from(signals.logsumexp[row]), tokens }
    }

    fn probabilities(&self) -> impl Iterator<Item = (TokenId, f64)> {
        self.tokens.iter().map(|&(id, logit)| (id, (f64::from(logit) - self.logsumexp).exp()))
    }
}

/// A position that the small model deferred.
#[derive(Clone, Debug, PartialEq)]
pub struct Deferral {
    /// Probability to defer.
    pub probability: f64,
    /// The small model's distribution.
    pub base: TopTokens,
}

impl Deferral {
    /// As a payload, little-endian.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER + PAIR * self.base.tokens.len());
        bytes.extend(self.probability.to_le_bytes());
        bytes.extend(self.base.logsumexp.to_le_bytes());
        for (id, logit) in &self.base.tokens {
            bytes.extend(id.to_le_bytes());
            bytes.extend(logit.to_le_bytes());
        }
        bytes
    }

    /// Read a payload; `None` unless [`Deferral::to_bytes`] may have made it for a vocabulary of this size.
    pub fn from_bytes(bytes: &[u8], vocab_size: u32) -> Option<Self> {
        let (probability, rest) = bytes.split_first_chunk()?;
        let (logsumexp, rest) = rest.split_first_chunk()?;
        let (probability, logsumexp) = (f64::from_le_bytes(*probability), f64::from_le_bytes(*logsumexp));
        let (pairs, []) = rest.as_chunks::<PAIR>() else { return None };
        let pair = |&[a, b, c, d, e, f, g, h]: &[u8; PAIR]| {
            let (id, logit) = (TokenId::from_le_bytes([a, b, c, d]), f32::from_le_bytes([e, f, g, h]));
            (id < vocab_size && logit.is_finite()).then_some((id, logit))
        };
        let tokens = pairs.iter().map(pair).collect::<Option<_>>()?;
        let valid = (0.0..=1.0).contains(&probability) && logsumexp.is_finite();
        valid.then_some(Self { probability, base: TopTokens { logsumexp, tokens } })
    }

    /// The token with the highest `(1 - p) P_base + p P_reference` among those in either list, with `p` the
    /// probability to defer. A token in one list only counts as impossible in the other distribution. Of
    /// equals the lowest id; `None` when both lists are empty.
    pub fn compose(&self, reference: &TopTokens) -> Option<TokenId> {
        let p = self.probability;
        let mut scores = BTreeMap::new();
        for (id, probability) in self.base.probabilities() {
            *scores.entry(id).or_insert(0.0) += (1.0 - p) * probability;
        }
        for (id, probability) in reference.probabilities() {
            *scores.entry(id).or_insert(0.0) += p * probability;
        }
        let better = |best: (TokenId, f64), next: (TokenId, f64)| if next.1 > best.1 { next } else { best };
        scores.into_iter().reduce(better).map(|(id, _)| id)
    }
}
