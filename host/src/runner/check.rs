//! What no runner computes.

use super::net::NetId;
use super::{ModelInfo, PAGE_TOKENS, RowBatch, RunnerError};
use crate::constraint::mask_words;

/// Refuse what would index out of bounds. `has`: whether the runner has a net.
pub(super) fn check(info: &ModelInfo, has: impl Fn(NetId) -> bool, batch: &RowBatch<'_>) -> Result<(), RunnerError> {
    let wrong = |index: usize, what: String| {
        Err(RunnerError::new(format!("model `{}`: sequence {index} of the batch: {what}", info.name)))
    };
    for (i, s) in batch.sequences.iter().enumerate() {
        let (start, end) = (s.start, s.end);
        if start >= end || end > s.context.len() {
            return wrong(i, format!("rows {start}..{end} of {} tokens", s.context.len()));
        }
        if end > info.context as usize {
            return wrong(i, format!("position {} of a context of {}", end - 1, info.context));
        }
        if s.sampled > end - start {
            return wrong(i, format!("{} sampled of {} rows", s.sampled, end - start));
        }
        let words = mask_words(info.vocab_size as usize) * s.sampled;
        if !s.allowed.is_empty() && s.allowed.len() != words {
            return wrong(
                i,
                format!("masks of {} words, but {} sampled rows need {words}", s.allowed.len(), s.sampled),
            );
        }
        if s.scored > end - start - s.sampled {
            return wrong(i, format!("{} scored and {} sampled of {} rows", s.scored, s.sampled, end - start));
        }
        if s.scored > 0 && end - s.sampled >= s.context.len() {
            return wrong(i, format!("position {} is scored, but no token follows it", end - s.sampled - 1));
        }
        if s.prompt_len > s.context.len() {
            return wrong(i, format!("a prompt of {} in a sequence of {} tokens", s.prompt_len, s.context.len()));
        }
        let needed = end.div_ceil(PAGE_TOKENS);
        if s.pages.len() < needed {
            return wrong(i, format!("{} pages, but {end} positions need {needed}", s.pages.len()));
        }
        if let Some(page) = s.pages[..needed].iter().find(|&&page| page >= info.pages) {
            return wrong(i, format!("page {page} of a pool of {}", info.pages));
        }
        if let Some(token) = s.context[start..end].iter().find(|&&token| token >= info.vocab_size) {
            return wrong(i, format!("token {token} of a vocabulary of {}", info.vocab_size));
        }
        if let Some(net) = s.nets.iter().find(|&&net| !has(net)) {
            return wrong(i, format!("net {}, which the runner does not have", net.0));
        }
    }
    if let Some(token) = batch.signals.token_logits.iter().find(|&&token| token >= info.vocab_size) {
        return Err(RunnerError::new(format!(
            "model `{}`: a signal asks for the logit of token {token}, but the vocabulary has {}",
            info.name, info.vocab_size
        )));
    }
    Ok(())
}
