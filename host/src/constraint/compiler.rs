//! Forms are compiled on threads of their own, for a bounded time, and each form once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::kept::Kept;
use super::{CompileError, Form, Grammar, Vocabulary, compile};
use crate::text::ModelText;

/// Grammars kept for later requests.
const KEPT: usize = 64;
/// Of their memory at most, as [`Grammar::bytes`] tells it.
const KEPT_BYTES: usize = 128 << 20;
/// Compilers recur into what they read, which is bounded (`MAX_NESTING`), but not by little.
pub const STACK: usize = 256 << 20;
const PATIENCE: Patience = Patience { turns: Duration::from_secs(10), compiling: Duration::from_secs(10) };

/// Why there is no grammar.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The form is at fault.
    #[error(transparent)]
    Form(#[from] CompileError),
    /// The server is at fault.
    #[error("{0}")]
    Failed(String),
}

/// Time that all forms of one request have together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// To wait for turns at the compilers.
    pub turns: Duration,
    /// To be compiled.
    pub compiling: Duration,
}

/// By vocabulary and form.
type Key = (usize, Form);
type Outcome = Result<Arc<Grammar>, Refused>;

/// Compiles forms, and keeps the grammars used last.
#[derive(Debug)]
pub struct Compiler {
    known: Arc<Mutex<Known>>,
    /// By the address of the model's text, which it holds.
    vocabularies: Mutex<HashMap<usize, Arc<Laid>>>,
    patience: Patience,
}

#[derive(Debug)]
struct Known {
    kept: Kept<Key, Arc<Grammar>>,
    underway: HashMap<Key, Underway>,
}

/// A compilation under way, for all who ask for its form.
#[derive(Clone, Debug)]
struct Underway {
    since: Instant,
    outcome: watch::Receiver<Option<Outcome>>,
}

/// Held by a compilation. Without an outcome it panicked.
struct Work {
    known: Arc<Mutex<Known>>,
    key: Key,
    outcome: watch::Sender<Option<Outcome>>,
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
        Self::new(PATIENCE)
    }
}

impl Compiler {
    /// A request has `patience` for its forms.
    pub fn new(patience: Patience) -> Self {
        let known = Known { kept: Kept::new(KEPT, KEPT_BYTES), underway: HashMap::new() };
        Self { known: Arc::new(Mutex::new(known)), vocabularies: Mutex::default(), patience }
    }

    /// For a new request.
    pub fn patience(&self) -> Patience {
        self.patience
    }

    /// The grammar of `form` for the tokens of `text` if it is known, or as soon as it is if it is being compiled.
    /// `None`: whoever asks has to let it [`Self::compile`].
    pub async fn find(&self, form: &Form, text: &Arc<ModelText>, patience: &mut Patience) -> Option<Outcome> {
        let key = (Arc::as_ptr(text) as usize, form.clone());
        let underway = {
            let mut known = lock(&self.known);
            match known.kept.get(&key) {
                Some(grammar) => return Some(Ok(grammar)),
                None => known.underway.get(&key).cloned()?,
            }
        };
        Some(self.outcome(underway, patience).await)
    }

    /// Compile `form` for the tokens of `text`, unless that has happened or is under way by now. `turn` is held as long as
    /// that takes a core: also when nobody waits for it any more.
    pub async fn compile<T: Send + 'static>(
        &self,
        form: Form,
        text: &Arc<ModelText>,
        turn: T,
        patience: &mut Patience,
    ) -> Outcome {
        let laid = self.laid(text);
        let key = (Arc::as_ptr(text) as usize, form);
        let underway = {
            let mut known = lock(&self.known);
            if let Some(grammar) = known.kept.get(&key) {
                return Ok(grammar);
            }
            match known.underway.get(&key).cloned() {
                Some(underway) => {
                    drop(turn);
                    underway
                }
                None => {
                    let (sender, outcome) = watch::channel(None);
                    let work = Work { known: Arc::clone(&self.known), key: key.clone(), outcome: sender };
                    let underway = Underway { since: Instant::now(), outcome };
                    known.underway.insert(key, underway.clone());
                    drop(known);
                    start(work, laid, turn)?;
                    underway
                }
            }
        };
        self.outcome(underway, patience).await
    }

    async fn outcome(&self, Underway { since, mut outcome }: Underway, patience: &mut Patience) -> Outcome {
        let begun = Instant::now();
        let end = (begun + patience.compiling).min(since + self.patience.compiling);
        let done = timeout_at(end, outcome.wait_for(Option::is_some)).await;
        patience.compiling = patience.compiling.saturating_sub(begun.elapsed());
        match done.map(|done| done.map(|outcome| outcome.clone())) {
            Ok(Ok(Some(outcome))) => outcome,
            Ok(_) => Err(Refused::Failed("the compiler panicked; see above".into())),
            Err(_) => {
                let seconds = self.patience.compiling.as_secs_f64();
                let message =
                    format!("compiling it, and the request's forms before it, takes longer than {seconds} seconds");
                Err(CompileError(message).into())
            }
        }
    }

    fn laid(&self, text: &Arc<ModelText>) -> Arc<Laid> {
        let mut vocabularies = lock(&self.vocabularies);
        let new = || Arc::new(Laid { text: Arc::clone(text), vocabulary: OnceLock::new() });
        Arc::clone(vocabularies.entry(Arc::as_ptr(text) as usize).or_insert_with(new))
    }
}

/// Each change of what is locked is complete before anything can panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn start(work: Work, laid: Arc<Laid>, turn: impl Send + 'static) -> Result<(), Refused> {
    let compile = move || {
        let outcome = match laid.vocabulary() {
            Ok(vocabulary) => compile(work.key.1.clone(), vocabulary).map(Arc::new).map_err(Refused::Form),
            Err(error) => Err(Refused::Failed(error.clone())),
        };
        work.done(outcome);
        drop(turn);
    };
    let thread = std::thread::Builder::new().name("grammar".into()).stack_size(STACK).spawn(compile);
    thread.map(drop).map_err(|e| Refused::Failed(format!("no thread can be started: {e}")))
}

impl Work {
    fn done(self, outcome: Outcome) {
        if let Ok(grammar) = &outcome {
            lock(&self.known).kept.keep(self.key.clone(), Arc::clone(grammar), grammar.bytes());
        }
        self.outcome.send_replace(Some(outcome));
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        lock(&self.known).underway.remove(&self.key);
    }
}
