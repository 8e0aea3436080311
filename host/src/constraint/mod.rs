//! Answers of a given form: a JSON schema, a regular expression, a list of choices or a grammar.
//!
//! A [`Form`] is compiled for a [`Vocabulary`] into a [`Grammar`], apart from the threads that decode. A request
//! carries it as a [`Constraint`]; each model that the request visits follows the answer with a [`Matcher`] of its
//! own. The end tokens of models are no part of a grammar: whoever samples adds them where it accepts.

mod compile;
mod compiler;
mod kept;
mod mask;
mod matcher;
mod spares;
mod vocabulary;

use std::sync::{Arc, OnceLock};

pub use compile::{CompileError, Grammar, MAX_BYTES, compile};
pub use compiler::{Compiler, Patience, Refused, STACK};
pub use mask::{Rules, allows, mask_words};
pub use matcher::{Broken, Matcher};
use spares::Lent;
pub use vocabulary::Vocabulary;

/// What an answer must look like, as the client wrote it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// A JSON value that this schema admits.
    JsonSchema(String),
    /// A text that this expression matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A text of this grammar, in the Lark syntax of llguidance; it begins with `start`.
    Lark(String),
}

impl Form {
    /// Any JSON object.
    pub fn json_object() -> Self {
        Self::JsonSchema(r#"{"type":"object"}"#.into())
    }

    /// Bytes that the client wrote.
    pub fn bytes(&self) -> usize {
        match self {
            Self::JsonSchema(text) | Self::Regex(text) | Self::Lark(text) => text.len(),
            Self::Choice(texts) => texts.iter().map(String::len).sum(),
        }
    }
}

/// The form of one answer. Its matchers share what they find out about texts, so that a model to which the
/// request comes back need not find it out again; other answers have a constraint of their own, and what this one leaves.
#[derive(Clone)]
pub struct Constraint {
    grammar: Arc<Grammar>,
    /// Made by whoever needs it first.
    start: Arc<OnceLock<Arc<Lent>>>,
}

impl Constraint {
    pub fn new(grammar: Arc<Grammar>) -> Self {
        Self { grammar, start: Arc::default() }
    }

    /// The same form for another answer.
    pub fn again(&self) -> Self {
        Self::new(Arc::clone(&self.grammar))
    }

    /// Copy what the answer needs of the grammar for itself, before a model that decodes has to, if no other answer has
    /// left it. 7 to 20 us for usual forms, a third of a millisecond and 2 MB for 20,000 choices or a schema of 300 objects (opt-level 3).
    pub fn prepare(&self) {
        self.lent();
    }

    /// At the start of the answer.
    pub fn matcher(&self) -> Matcher {
        let lent = self.lent();
        Matcher::new(lent.parser(), Arc::clone(&self.grammar.texts), Some(Arc::clone(lent)))
    }

    fn lent(&self) -> &Arc<Lent> {
        self.start.get_or_init(|| Arc::new(Lent::of(&self.grammar)))
    }
}

impl PartialEq for Constraint {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.grammar, &other.grammar)
    }
}

impl std::fmt::Debug for Constraint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Constraint").field(self.grammar.form()).finish()
    }
}

#[cfg(test)]
mod tests;
