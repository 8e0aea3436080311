//! The tokens of a model, laid out for finding those that a grammar allows.

use std::sync::Arc;

use llguidance::ParserFactory;
use llguidance::earley::SlicedBiasComputer;
use toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};

use super::compile::limits;
use crate::request::TokenId;

/// The texts of all tokens.
pub struct Vocabulary {
    pub(super) factory: ParserFactory,
    size: usize,
}

impl Vocabulary {
    /// Of `size` tokens; `text` gives what a token adds to a text, nothing for one that no grammar may allow.
    pub fn new<'a>(size: usize, text: impl Fn(TokenId) -> &'a [u8]) -> Result<Self, String> {
        let mut words: Vec<Vec<u8>> = (0..size as TokenId).map(|id| text(id).to_vec()).collect();
        // The library needs an end token. Models have their own, which they may write only where the grammar
        // accepts, so it gets one that no model has: behind all others, and of a byte that no text holds.
        words.push(vec![TokTrie::SPECIAL_TOKEN_MARKER, b'<', b'>']);
        let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, size as TokenId), &words);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
            .map_err(|e| format!("the vocabulary cannot be laid out for grammars: {e}"))?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(Self { factory, size })
    }

    /// Tokens; ids from here on are those of no token.
    pub fn size(&self) -> usize {
        self.size
    }
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vocabulary").field("size", &self.size).finish()
    }
}
