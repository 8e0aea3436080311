//! Between text and tokens: tokenizers, chat templates, incremental detokenising, stop strings.
//!
//! Models and policies never see this; the client loop does.

mod bytes;
mod chat;
mod clock;
mod detokenizer;
mod model_text;
mod python_json;
mod shared_vocab;
mod stop;
mod tokenizer;
#[cfg(test)]
pub(crate) mod tokenizer_fixtures;

pub use bytes::readable;
pub use chat::{ChatTemplate, TemplateError};
pub use clock::strftime;
pub use detokenizer::Detokenizer;
pub use model_text::ModelText;
pub use shared_vocab::{VocabularyMismatch, excluded_tokens};
pub use stop::{StopMatcher, Stopped};
pub use tokenizer::{TRIAL_THREAD, Tokenizer};

/// A tokenizer or template that cannot be used. One line: which file, what is wrong, what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TextError(pub String);
