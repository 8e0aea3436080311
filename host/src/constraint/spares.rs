//! Parsers that answers have used, for later answers of the same form: what states of the lexer allow is found out once
//! for all of them, not anew for each.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use llguidance::TokenParser;

use super::compile::{Grammar, MAX_LEXER_STATES};

/// Most memory of the spare parsers of one form.
const MOST_BYTES: usize = 2 << 20;
/// A small form has room for so many of its size.
const MOST: usize = 32;
/// Where the library gives up is far from here: no answer fails for what others have found out.
const MOST_STATES: usize = MAX_LEXER_STATES / 8;

/// All stand at the start of an answer, and nobody else has them.
pub(super) struct Spares {
    room: usize,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    parsers: Vec<(TokenParser, usize)>,
    bytes: usize,
}

impl Spares {
    /// Of a form with a parser of so many bytes.
    pub fn new(bytes: usize) -> Self {
        Self { room: bytes.saturating_mul(MOST).min(MOST_BYTES), kept: Mutex::default() }
    }

    /// Most bytes of all of them.
    pub fn room(&self) -> usize {
        self.room
    }

    /// Each change of them is whole, so a panic elsewhere cannot spoil them.
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Option<TokenParser> {
        let mut kept = self.kept();
        let (parser, bytes) = kept.parsers.pop()?;
        kept.bytes -= bytes;
        Some(parser)
    }

    fn put(&self, parser: TokenParser) {
        let stats = parser.parser.lexer_stats();
        if stats.error || stats.num_states > MOST_STATES {
            return;
        }
        let mut kept = self.kept();
        if kept.bytes + stats.num_bytes <= self.room {
            kept.bytes += stats.num_bytes;
            kept.parsers.push((parser, stats.num_bytes));
        }
    }

    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.kept().parsers.len()
    }
}

/// A parser at the start of an answer, whose matchers share its lexer. Dropped with the last of them, it goes back.
pub(super) struct Lent {
    parser: Option<TokenParser>,
    grammar: Arc<Grammar>,
    /// A matcher failed: what it left in the lexer is not known.
    spoiled: AtomicBool,
}

impl Lent {
    pub fn of(grammar: &Arc<Grammar>) -> Self {
        let parser = grammar.spares.take().unwrap_or_else(|| grammar.start.deep_clone());
        Self { parser: Some(parser), grammar: Arc::clone(grammar), spoiled: AtomicBool::new(false) }
    }

    pub fn parser(&self) -> TokenParser {
        // It goes when this is dropped.
        self.parser.as_ref().unwrap_or(&self.grammar.start).clone()
    }

    pub fn spoil(&self) {
        self.spoiled.store(true, Ordering::Release);
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(parser) = self.parser.take()
            && !*self.spoiled.get_mut()
        {
            self.grammar.spares.put(parser);
        }
    }
}
