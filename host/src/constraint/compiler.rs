//! Forms are compiled on threads of their own: a few at a time, for a bounded time, and each form once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::{Semaphore, oneshot};

use super::{CompileError, Form, Grammar, Vocabulary, compile};
use crate::text::ModelText;

/// Grammars kept for later requests.
const KEPT: usize = 64;
/// Of their forms, bytes at most.
const KEPT_BYTES: usize = 4 << 20;
/// Compilers recur into what they read, which is bounded (`MAX_NESTING`), but not by little.
pub const STACK: usize = 256 << 20;
const PATIENCE: Duration = Duration::from_secs(10);

/// Why there is no grammar.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The form is at fault.
    #[error(transparent)]
    Form(#[from] CompileError),
    /// Others are being compiled.
    #[error("too many grammars are being compiled")]
    Busy,
    /// The server is at fault.
    #[error("{0}")]
    Failed(String),
}

/// Compiles forms, and keeps the grammars used last.
#[derive(Debug)]
pub struct Compiler {
    turns: Arc<Semaphore>,
    kept: Mutex<Kept>,
    /// By the address of the model's text, which it holds.
    vocabularies: Mutex<HashMap<usize, Arc<Laid>>>,
    patience: Duration,
}

#[derive(Debug, Default)]
struct Kept {
    /// By vocabulary and form, with when it was used last.
    grammars: HashMap<(usize, Form), (Arc<Grammar>, u64)>,
    uses: u64,
    bytes: usize,
}

/// A model's vocabulary, laid out by whoever needs it first.
#[derive(Debug)]
struct Laid {
    text: Arc<ModelText>,
    vocabulary: OnceLock<Result<Vocabulary, String>>,
}

impl Laid {
    fn vocabulary(&self) -> &Result<Vocabulary, String> {
        let tokenizer = &self.text.tokenizer;
        self.vocabulary.get_or_init(|| Vocabulary::new(tokenizer.vocab_size(), |id| tokenizer.text_bytes(id)))
    }
}

impl Default for Compiler {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self::new(cores.div_ceil(2), PATIENCE)
    }
}

impl Compiler {
    /// With `at_once` compilations at a time, each of at most `patience`.
    pub fn new(at_once: usize, patience: Duration) -> Self {
        Self {
            turns: Arc::new(Semaphore::new(at_once)),
            kept: Mutex::default(),
            vocabularies: Mutex::default(),
            patience,
        }
    }

    /// The grammar of `form` for the tokens of `text`.
    pub async fn grammar(&self, form: Form, text: &Arc<ModelText>) -> Result<Arc<Grammar>, Refused> {
        let laid = self.laid(text);
        let key = (Arc::as_ptr(text) as usize, form);
        if let Some(grammar) = self.known(&key) {
            return Ok(grammar);
        }
        let turn = tokio::time::timeout(self.patience, Arc::clone(&self.turns).acquire_owned()).await;
        let Ok(Ok(turn)) = turn else { return Err(Refused::Busy) };
        // Whoever had the turn before may have compiled the same.
        if let Some(grammar) = self.known(&key) {
            return Ok(grammar);
        }
        let form = key.1.clone();
        let (sender, receiver) = oneshot::channel();
        // It has the turn to its end: a compilation that nobody waits for any more still takes a core.
        let work = move || {
            let grammar = match laid.vocabulary() {
                Ok(vocabulary) => compile(form, vocabulary).map_err(Refused::Form),
                Err(error) => Err(Refused::Failed(error.clone())),
            };
            // The turn goes along, so that the next one finds this grammar. Nobody may wait any more.
            let _ = sender.send((grammar, turn));
        };
        let thread = std::thread::Builder::new().name("grammar".into()).stack_size(STACK).spawn(work);
        thread.map_err(|e| Refused::Failed(format!("no thread can be started: {e}")))?;
        match tokio::time::timeout(self.patience, receiver).await {
            Ok(Ok((grammar, _turn))) => {
                let grammar = Arc::new(grammar?);
                self.keep(key, Arc::clone(&grammar));
                Ok(grammar)
            }
            Ok(Err(_)) => Err(Refused::Failed("the compiler panicked; see above".into())),
            Err(_) => {
                let message = format!("compiling it takes longer than {} seconds", self.patience.as_secs_f64());
                Err(CompileError(message).into())
            }
        }
    }

    fn laid(&self, text: &Arc<ModelText>) -> Arc<Laid> {
        let mut vocabularies = self.vocabularies.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || Arc::new(Laid { text: Arc::clone(text), vocabulary: OnceLock::new() });
        Arc::clone(vocabularies.entry(Arc::as_ptr(text) as usize).or_insert_with(new))
    }

    #[cfg(test)]
    pub(super) fn kept_len(&self) -> usize {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).grammars.len()
    }

    fn known(&self, key: &(usize, Form)) -> Option<Arc<Grammar>> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.uses += 1;
        let now = kept.uses;
        let (grammar, used) = kept.grammars.get_mut(key)?;
        *used = now;
        Some(Arc::clone(grammar))
    }

    fn keep(&self, key: (usize, Form), grammar: Arc<Grammar>) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.uses += 1;
        let now = kept.uses;
        kept.bytes += key.1.bytes();
        if let Some(_twice) = kept.grammars.insert(key.clone(), (grammar, now)) {
            kept.bytes -= key.1.bytes();
        }
        while kept.grammars.len() > KEPT || kept.bytes > KEPT_BYTES {
            let oldest = kept.grammars.iter().min_by_key(|(_, (_, used))| *used).map(|(key, _)| key.clone());
            let Some(oldest) = oldest else { return };
            kept.bytes -= oldest.1.bytes();
            kept.grammars.remove(&oldest);
        }
    }
}
