//! The tokens of a model, laid out for finding those that a grammar allows.

use std::sync::Arc;

use llguidance::ParserFactory;
use llguidance::earley::SlicedBiasComputer;
use toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};

use super::compile::limits;
use super::mask::mask_words;
use crate::request::TokenId;

/// The texts of all tokens.
pub struct Vocabulary {
    pub(super) factory: ParserFactory,
    /// Tokens with a text, as bits. Grammars of the library may name others, by number.
    pub(super) texts: Arc<[u32]>,
}

impl Vocabulary {
    /// Of `size` tokens; `text` gives what a token adds to a text, nothing for one that no grammar may allow.
    pub fn new<'a>(size: usize, text: impl Fn(TokenId) -> &'a [u8]) -> Result<Self, String> {
        let mut words: Vec<Vec<u8>> = (0..size as TokenId).map(|id| text(id).to_vec()).collect();
        let mut texts = vec![0; mask_words(size)];
        for (id, _) in words.iter().enumerate().filter(|(_, word)| !word.is_empty()) {
            texts[id / 32] |= 1 << (id % 32);
        }
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
        Ok(Self { factory, texts: texts.into() })
    }
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vocabulary").field("words", &self.texts.len()).finish()
    }
}
