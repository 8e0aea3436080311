//! How far an answer has come in its grammar.

use std::sync::Arc;

use llguidance::TokenParser;

use super::mask::{Rules, allows};
use super::spares::Lent;
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
    /// Whose lexer the parser shares. It may be lent again when the parser is gone, which is dropped before it.
    lent: Option<Arc<Lent>>,
}

impl Matcher {
    pub(super) fn new(parser: TokenParser, texts: Arc<[u32]>, lent: Option<Arc<Lent>>) -> Self {
        Self { parser: llguidance::Matcher::new(Ok(parser)), tokens: Vec::new(), texts, lent }
    }

    fn checked<T, E: std::fmt::Display>(&self, result: Result<T, E>) -> Result<T, Broken> {
        result.map_err(|error| {
            if let Some(lent) = &self.lent {
                lent.spoil();
            }
            Broken(words(error))
        })
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
        let read = self.parser.consume_token(token);
        self.checked(read)?;
        self.tokens.push(token);
        Ok(())
    }

    /// Take the last `count` tokens back.
    pub fn rollback(&mut self, count: usize) -> Result<(), Broken> {
        if count > 0 {
            let taken_back = self.parser.rollback(count);
            self.checked(taken_back)?;
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
        if self.is_complete() {
            return Ok(true);
        }
        let accepting = self.parser.is_accepting();
        self.checked(accepting)
    }

    /// Fill `words` with the tokens that may come next, a bit each. An error if there is none.
    pub fn mask(&mut self, rules: &Rules<'_>, words: &mut [u32]) -> Result<(), Broken> {
        words.fill(0);
        let accepts = self.is_accepting()?;
        if !self.is_complete() {
            let allowed = self.parser.compute_mask();
            let allowed = self.checked(allowed)?;
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

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher").field("tokens", &self.tokens).finish()
    }
}
