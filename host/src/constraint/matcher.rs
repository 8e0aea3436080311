//! How far an answer has come in its grammar.

use std::sync::Arc;

use super::mask::{Rules, allows};
use crate::request::TokenId;

/// The grammar cannot be followed any further. The request fails: without it nothing says what may be written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Broken(pub String);

/// The state of a grammar behind some tokens of an answer. End tokens are never among them.
#[derive(Clone)]
pub struct Matcher {
    parser: llguidance::Matcher,
    /// What `parser` has read.
    tokens: Vec<TokenId>,
    /// Tokens with a text, as bits.
    texts: Arc<[u32]>,
}

impl Matcher {
    pub(super) fn new(parser: llguidance::Matcher, texts: Arc<[u32]>) -> Self {
        Self { parser, tokens: Vec::new(), texts }
    }

    /// Put the state behind exactly `tokens`, from wherever it is.
    pub fn follow(&mut self, tokens: &[TokenId]) -> Result<(), Broken> {
        let same = self.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        self.rollback(self.tokens.len() - same)?;
        for &token in &tokens[same..] {
            self.advance(token)?;
        }
        Ok(())
    }

    /// Read one more token.
    pub fn advance(&mut self, token: TokenId) -> Result<(), Broken> {
        if !allows(&self.texts, token) {
            return Err(Broken(format!("token {token} has no text")));
        }
        self.parser.consume_token(token).map_err(broken)?;
        self.tokens.push(token);
        Ok(())
    }

    /// Take the last `count` tokens back.
    pub fn rollback(&mut self, count: usize) -> Result<(), Broken> {
        if count > 0 {
            self.parser.rollback(count).map_err(broken)?;
            self.tokens.truncate(self.tokens.len().saturating_sub(count));
        }
        Ok(())
    }

    /// The tokens are an answer, and no token may follow them.
    pub fn is_complete(&self) -> bool {
        self.parser.is_stopped() && !self.parser.is_error()
    }

    /// The tokens are an answer.
    pub fn is_accepting(&mut self) -> Result<bool, Broken> {
        Ok(self.is_complete() || self.parser.is_accepting().map_err(broken)?)
    }

    /// Fill `words` with the tokens that may come next, a bit each. An error if there is none.
    pub fn mask(&mut self, rules: &Rules<'_>, words: &mut [u32]) -> Result<(), Broken> {
        words.fill(0);
        let accepts = self.is_accepting()?;
        if !self.is_complete() {
            let allowed = self.parser.compute_mask().map_err(broken)?;
            for ((word, allowed), texts) in words.iter_mut().zip(allowed.as_slice()).zip(&*self.texts) {
                *word = allowed & texts;
            }
        }
        rules.apply(accepts, words)
    }
}

/// The library's words, without the state and the grammar that may follow them.
pub(super) fn words(error: impl std::fmt::Display) -> String {
    const MOST: usize = 400;
    let text = error.to_string();
    let text = text.split("\n<").next().unwrap_or_default();
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match text.char_indices().nth(MOST) {
        None => text,
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

fn broken(error: impl std::fmt::Display) -> Broken {
    Broken(words(error))
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher").field("tokens", &self.tokens).finish()
    }
}
