//! From a row of raw logits to what it gives a token that is known.

use tokenrouter_kernels::{self as kernels, Distribution};

use super::Rows;
use crate::request::{SamplingParams, Score, TokenId};

/// What row `position` of `rows` gives the token that follows it. Masked tokens get `-inf` in `logits`. `None`
/// when a logit is NaN or +inf.
pub(super) fn score(logits: &mut [f32], rows: &Rows<'_>, position: usize) -> Option<Score> {
    mask(logits, rows.masked);
    let raw = Distribution::of(logits)?;
    let token = rows.context[position + 1];
    let logit = logits[token as usize];
    let before = |(id, &other): (usize, &f32)| other > logit || (other == logit && id < token as usize);
    let rank = 1 + logits.iter().enumerate().filter(|&value| before(value)).count() as u32;
    let top = rows.sampling.prompt_logprobs.map_or(0, |wanted| wanted.top);
    let top_logprobs = top_logprobs(logits, &raw, top, rows.sampling, &mut Vec::new());
    Some(Score { logprob: raw.log_prob(logit), rank, top_logprobs })
}

/// The `top` most probable tokens, then those that are listed. `best` is work memory.
pub(super) fn top_logprobs(
    logits: &[f32],
    raw: &Distribution,
    top: u32,
    params: &SamplingParams,
    best: &mut Vec<TokenId>,
) -> Vec<(TokenId, f32)> {
    kernels::top(logits, top as usize, best);
    let ids = best.iter().chain(&params.listed_logprobs);
    ids.filter_map(|&id| Some((id, raw.log_prob(*logits.get(id as usize)?)))).collect()
}

/// Leave `masked` out of the distribution. Returns how many tokens are left in it.
pub(super) fn mask(logits: &mut [f32], masked: &[TokenId]) -> usize {
    let mut possible = logits.len();
    for &id in masked {
        if let Some(logit) = logits.get_mut(id as usize) {
            *logit = f32::NEG_INFINITY;
            possible -= 1;
        }
    }
    possible
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::PromptLogprobs;

    fn scored(logits: &[f32], masked: &[TokenId], token: TokenId) -> Option<Score> {
        let sampling = SamplingParams {
            prompt_logprobs: Some(PromptLogprobs { from: 1, top: 2 }),
            listed_logprobs: vec![0],
            ..SamplingParams::greedy()
        };
        let context = [0, token];
        let rows = Rows {
            context: &context,
            start: 0,
            end: 1,
            pages: &[0],
            sampled: 0,
            scored: 1,
            sampling: &sampling,
            prompt_len: 2,
            masked,
            nets: &[],
            allowed: &[],
        };
        score(&mut logits.to_vec(), &rows, 0)
    }

    #[test]
    fn the_given_token_among_all() {
        let logits = [0.0, 2.0f32.ln(), 2.0f32.ln(), 5.0f32.ln()];
        let score = scored(&logits, &[], 2).unwrap();
        assert_eq!(score.rank, 3, "of equal ones the lower id goes first");
        assert!((score.logprob - 0.2f32.ln()).abs() < 1e-6, "{score:?}");
        assert_eq!(score.top_logprobs.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [3, 1, 0]);
        assert!((score.top_logprobs[2].1 - 0.1f32.ln()).abs() < 1e-6, "the listed token: {score:?}");
        assert_eq!(scored(&logits, &[], 3).unwrap().rank, 1);
    }

    #[test]
    fn masked_tokens_and_bad_logits() {
        let logits = [0.0, 0.0, 7.0];
        let score = scored(&logits, &[2], 1).unwrap();
        assert!((score.logprob - 0.5f32.ln()).abs() < 1e-6, "{score:?}");
        assert_eq!(scored(&logits, &[2], 2).unwrap().logprob, f32::NEG_INFINITY);
        assert_eq!(scored(&[0.0, f32::NAN], &[], 1), None);
    }
}
