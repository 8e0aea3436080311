//! Which tokens may be drawn, as bits. Pure.

use super::Broken;
use crate::request::TokenId;

/// Words of a mask of `vocabulary` tokens.
pub fn mask_words(vocabulary: usize) -> usize {
    vocabulary.div_ceil(32)
}

/// Whether `mask` allows `token`.
pub fn allows(mask: &[u32], token: TokenId) -> bool {
    mask.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
}

fn set(mask: &mut [u32], token: TokenId, to: bool) {
    if let Some(word) = mask.get_mut(token as usize / 32) {
        let bit = 1 << (token % 32);
        *word = if to { *word | bit } else { *word & !bit };
    }
}

/// What decides at one model beside the grammar.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rules<'a> {
    /// Width of the model's logits.
    pub width: usize,
    /// The model's end tokens.
    pub eos: &'a [TokenId],
    /// Further tokens that end the answer.
    pub stop: &'a [TokenId],
    /// Tokens that must not be written.
    pub masked: &'a [TokenId],
    /// The answer should go on: end tokens only where nothing else may follow.
    pub hold_eos: bool,
    /// The same for `stop`.
    pub hold_stop: bool,
}

impl Rules<'_> {
    /// Turn what the grammar allows into what may be drawn. `accepts`: whether it may end.
    pub(super) fn apply(&self, accepts: bool, mask: &mut [u32]) -> Result<(), Broken> {
        for (index, word) in mask.iter_mut().enumerate() {
            let left = self.width.saturating_sub(index * 32);
            if left < 32 {
                *word &= (1 << left) - 1;
            }
        }
        for &token in self.eos.iter().chain(self.masked) {
            set(mask, token, false);
        }
        let empty = |mask: &[u32]| mask.iter().all(|word| *word == 0);
        if self.hold_stop && self.stop.iter().any(|&token| allows(mask, token)) {
            let held: Vec<TokenId> = self.stop.iter().copied().filter(|&token| allows(mask, token)).collect();
            held.iter().for_each(|&token| set(mask, token, false));
            if empty(mask) {
                held.iter().for_each(|&token| set(mask, token, true));
            }
        }
        if accepts && (!self.hold_eos || empty(mask)) {
            let possible = |token: &&TokenId| (**token as usize) < self.width && !self.masked.contains(token);
            self.eos.iter().filter(possible).for_each(|&token| set(mask, token, true));
        }
        if empty(mask) {
            return Err(Broken("no token of this model continues the answer in the form asked for".into()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(rules: &Rules<'_>, grammar: &[TokenId], accepts: bool) -> Result<Vec<TokenId>, Broken> {
        let mut mask = vec![0; mask_words(rules.width)];
        grammar.iter().for_each(|&token| set(&mut mask, token, true));
        rules.apply(accepts, &mut mask)?;
        Ok((0..rules.width as TokenId + 64).filter(|&token| allows(&mask, token)).collect())
    }

    const RULES: Rules<'_> =
        Rules { width: 90, eos: &[3, 80], stop: &[5], masked: &[7], hold_eos: false, hold_stop: false };

    #[test]
    fn ends_are_for_where_the_grammar_accepts() {
        assert_eq!(allowed(&RULES, &[1, 3, 64], false), Ok(vec![1, 64]));
        assert_eq!(allowed(&RULES, &[1, 64], true), Ok(vec![1, 3, 64, 80]), "an end token may lie behind the texts");
        assert_eq!(allowed(&Rules { masked: &[3], ..RULES }, &[1], true), Ok(vec![1, 80]));
        assert_eq!(allowed(&Rules { width: 60, ..RULES }, &[1], true), Ok(vec![1, 3]), "the model has no token 80");
    }

    #[test]
    fn masked_ids_and_those_without_a_logit_are_never_allowed() {
        assert_eq!(allowed(&RULES, &[7, 8, 89, 90, 95], false), Ok(vec![8, 89]));
        assert_eq!(allowed(&Rules { width: 64, ..RULES }, &[63, 64], false), Ok(vec![63]));
        assert!(allowed(&RULES, &[7, 95], false).is_err());
    }

    #[test]
    fn what_should_wait_waits_while_something_else_is_allowed() {
        let held = Rules { hold_eos: true, hold_stop: true, ..RULES };
        assert_eq!(allowed(&held, &[1, 5], true), Ok(vec![1]));
        assert_eq!(allowed(&held, &[5], false), Ok(vec![5]));
        assert_eq!(allowed(&held, &[], true), Ok(vec![3, 80]));
        assert_eq!(allowed(&RULES, &[1, 5], false), Ok(vec![1, 5]));
    }
}
